"""The tokenizer of a classifier: truncates, ends and pads texts, also when it is saved."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from evener.errors import ConfigError
from evener.files import blake2b
from evener.tasks.text.tokenizer import ByteTokenizer, load_auto

_NUL = "\u0100"
"""The byte 0 in byte-level vocabularies; no text holds it."""


def load_encoder(folder: Path | None, seq_len: int, end_tokens: int = 1) -> Any:
    """Return a tokenizer of transformers that truncates texts to ``seq_len`` and pads their end.

    Decoders classify by the state at the last token. If the tokenizer does not end texts with the
    end-of-text token, it is added, so that all texts end alike. It is not added if it is also the
    padding, as decoders look for the last token before the padding.

    Args:
        folder: Folder of the tokenizer; bytes without one.
        seq_len: Most tokens of a text, special ones included.
        end_tokens: How many end-of-text tokens are added.

    Raises:
        DataError: It cannot be loaded.
        ConfigError: ``seq_len`` leaves no room for text.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    own = _load(folder)
    names = dict(own.special_tokens_map)
    nul = _NUL if _NUL in own.get_vocab() else None
    others = (own.pad_token, own.unk_token, nul)
    pad = next((t for t in others if t not in (None, own.eos_token)), own.eos_token)
    names["pad_token"] = pad or own.convert_ids_to_tokens(0)
    backend = own.backend_tokenizer
    plain, whole = (own.encode("a", add_special_tokens=special) for special in (False, True))
    if own.eos_token not in (None, pad) and whole[-len(plain) :] == plain:
        before = own.convert_ids_to_tokens(whole[: -len(plain)])
        backend.post_processor = TemplateProcessing(
            single=[*before, "$A", *[own.eos_token] * end_tokens],
            special_tokens=[(t, own.convert_tokens_to_ids(t)) for t in {*before, own.eos_token}],
        )
    encoder = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=seq_len,
        padding_side="right",
        truncation_side="right",
        split_special_tokens=own.split_special_tokens,
        clean_up_tokenization_spaces=False,
        **names,
    )
    if seq_len <= (around := encoder.num_special_tokens_to_add()):
        raise ConfigError(
            f"seq_len is {seq_len}, and the tokenizer adds {around} tokens to every text, which "
            "leaves no room for it; raise seq_len"
        )
    return encoder


def fingerprint_of_encoder(encoder: Any) -> str:
    """Return a hash that is equal for equal ids of equal texts."""
    made = (encoder.backend_tokenizer.to_str(), encoder.model_max_length, encoder.pad_token_id)
    return blake2b(repr(made).encode()).hexdigest()


def _load(folder: Path | None) -> Any:
    if folder is not None:
        return load_auto(folder)
    with TemporaryDirectory() as made:
        ByteTokenizer().save(Path(made))
        return load_auto(Path(made))
