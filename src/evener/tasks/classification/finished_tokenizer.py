"""A tokenizer as a classifier's readers need it: it gives the ids that the model was trained on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"

#: Post-processors that put nothing before or after a text, or only what is put there anew.
_KNOWN = frozenset({"ByteLevel", "TemplateProcessing"})


def finished_files(
    files: Mapping[str, bytes],
    *,
    prefix: Sequence[int],
    suffix: Sequence[int],
    pad_id: int,
    seq_len: int,
) -> dict[str, bytes]:
    """The files of a tokenizer that ends, cuts and pads texts as in training.

    ``tokenizer(texts, padding=True, truncation=True)`` of ``AutoTokenizer`` then gives what
    evener's encoder gives. Tokenizers without a ``tokenizer.json`` stay as they are.

    Args:
        files: What ``AutoTokenizer`` loads, by name.
        prefix: Ids before every text.
        suffix: Ids after it.
        pad_id: What fills shorter texts.
        seq_len: Most tokens of a text, special ones included.
    """
    if not {_TOKENIZER, _CONFIG} <= files.keys():
        return dict(files)
    tokenizer, config = json.loads(files[_TOKENIZER]), json.loads(files[_CONFIG])
    names = {int(i): token for token, i in _vocabulary(tokenizer).items()}
    names |= {int(token["id"]): token["content"] for token in tokenizer.get("added_tokens") or ()}
    tokenizer["truncation"] = tokenizer["padding"] = None
    tokenizer["post_processor"] = _with_ends(
        tokenizer.get("post_processor"),
        [names[i] for i in prefix],
        [names[i] for i in suffix],
        {names[i]: i for i in (*prefix, *suffix)},
    )
    config |= {"model_max_length": seq_len, "padding_side": "right", "truncation_side": "right"}
    config["pad_token"] = names.get(pad_id)
    return {
        **files,
        **{
            name: json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"
            for name, document in {_TOKENIZER: tokenizer, _CONFIG: config}.items()
        },
    }


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer["model"].get("vocab", {})
    if isinstance(vocabulary, list):  # Unigram: pieces and their scores
        return {piece: i for i, (piece, *_) in enumerate(vocabulary)}
    return dict(vocabulary)


def _with_ends(
    old: Mapping[str, Any] | None,
    before: Sequence[str],
    after: Sequence[str],
    ids: Mapping[str, int],
) -> Any:
    """A post-processor that puts tokens around a text, in the place of ``old``."""
    steps = [] if old is None else list(old.get("processors") or [old])
    if any(step["type"] not in _KNOWN for step in steps):
        return old  # it ends texts in a way of its own
    around = {
        "type": "TemplateProcessing",
        "single": [*map(_token, before), _TEXT, *map(_token, after)],
        "pair": [*map(_token, before), _TEXT, *map(_token, after), _SECOND, *map(_token, after)],
        "special_tokens": {
            name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()
        },
    }
    kept = [step for step in steps if step["type"] != "TemplateProcessing"]
    return {"type": "Sequence", "processors": [*kept, around]} if kept else around


def _token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
_SECOND = {"Sequence": {"id": "B", "type_id": 1}}
