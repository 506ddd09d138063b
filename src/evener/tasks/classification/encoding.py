"""Texts as token ids, for models that read one text and name its class."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigError
from evener.tasks.text.tokenizer import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    CausalTokenizer,
    FolderTokenizer,
    fingerprint_of,
    open_tokenizer,
)

Encoded = tuple[list[int], int]
"""Token ids of a text, and the index of its class."""

_NUL = 0
"""Padding for bytes: no text holds it, and the end-of-text token stays free to end texts."""

#: Post-processors that put nothing before or after a text, or only what is put there anew.
_KNOWN = frozenset({"ByteLevel", "TemplateProcessing"})


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, padded at their ends.

    Attributes:
        input_ids: ``(B, T)``, int64.
        attention_mask: ``(B, T)``, int64: 1 for tokens, 0 for padding.
        labels: ``(B,)``, int64.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """Cuts a text to ``seq_len`` tokens and puts the model's special tokens around it.

    Decoders classify by the state at the last token. Where the tokenizer has none that ends a
    text, the end-of-text token is added: the same question at the end of every text.

    Attributes:
        tokenizer: Gives the ids of a text without special ones.
        prefix: Ids before every text.
        suffix: Ids after it.
        pad_id: What fills shorter texts.
        seq_len: Most tokens of a text, special ones included.
    """

    tokenizer: CausalTokenizer
    prefix: list[int]
    suffix: list[int]
    pad_id: int
    seq_len: int

    @classmethod
    def load(cls, folder: Path | None, seq_len: int, end_tokens: int = 1) -> "TextEncoder":
        """Return the encoder with the tokenizer of a folder, or with bytes without one.

        Args:
            folder: Holds the tokenizer.
            seq_len: Most tokens of a text.
            end_tokens: How many end-of-text tokens a decoder's texts get.

        Raises:
            DataError: It does not load.
            ConfigError: ``seq_len`` leaves no room for text.
        """
        tokenizer = open_tokenizer(folder)
        eos_id, prefix, suffix, pad_id = tokenizer.eos_id, [], [], _NUL
        if isinstance(tokenizer, FolderTokenizer):
            own, plain = tokenizer.hugging_face, tokenizer.encode("a").tolist()
            whole = list(own.encode("a", add_special_tokens=True))
            start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
            prefix, suffix = whole[:start], whole[start + len(plain) :]
            pad_id = -1 if own.pad_token_id is None else int(own.pad_token_id)
            if pad_id in (-1, eos_id):
                pad_id = eos_id if own.unk_token_id is None else int(own.unk_token_id)
        if not suffix and eos_id not in (-1, pad_id):
            suffix = [eos_id] * end_tokens
        if seq_len <= (around := len(prefix) + len(suffix)):
            raise ConfigError(
                f"seq_len is {seq_len}, and the tokenizer puts {around} tokens around every text, "
                "which leaves no room for it; raise seq_len"
            )
        return cls(tokenizer, prefix, suffix, max(0, pad_id), seq_len)

    @property
    def fingerprint(self) -> str:
        """Equal for equal ids of equal texts."""
        settings = f"{self.seq_len} {self.prefix} {self.suffix} {self.pad_id} "
        return fingerprint_of(self.tokenizer.files(), settings)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, at most ``seq_len``."""
        room = self.seq_len - len(self.prefix) - len(self.suffix)
        # Of the whole text: tokenizers drop spaces, and have tokens of any length.
        ids = self.tokenizer.encode(text)[:room]
        return [*self.prefix, *ids.tolist(), *self.suffix]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """Put texts side by side, as wide as the longest."""
        width = max(len(ids) for ids, _ in encoded)
        input_ids = torch.full((len(encoded), width), self.pad_id)
        mask = torch.zeros(len(encoded), width, dtype=torch.long)
        for row, (ids, _) in enumerate(encoded):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        return Batch(input_ids, mask, torch.tensor([label for _, label in encoded]))

    def save(self, folder: Path) -> None:
        """Write the files of a tokenizer that ends, cuts and pads texts as this encoder does.

        ``tokenizer(texts, padding=True, truncation=True)`` of ``AutoTokenizer`` then gives what
        ``encode`` and ``collate`` give. Tokenizers without a ``tokenizer.json`` stay as they are.
        """
        from tokenizers import Tokenizer

        self.tokenizer.save(folder)
        files = self.tokenizer.files()
        if not {TOKENIZER_FILE, CONFIG_FILE} <= files.keys():
            return
        name_of = Tokenizer.from_str(files[TOKENIZER_FILE].decode()).id_to_token
        tokenizer, config = json.loads(files[TOKENIZER_FILE]), json.loads(files[CONFIG_FILE])
        before, after = ([(str(name_of(i)), i) for i in ids] for ids in (self.prefix, self.suffix))
        tokenizer |= {
            "truncation": None,
            "padding": None,
            "post_processor": _with_ends(tokenizer.get("post_processor"), before, after),
        }
        config |= {"model_max_length": self.seq_len, "pad_token": name_of(self.pad_id)}
        config |= {"padding_side": "right", "truncation_side": "right"}
        for name, document in ((TOKENIZER_FILE, tokenizer), (CONFIG_FILE, config)):
            content = json.dumps(document, ensure_ascii=False, indent=1) + "\n"
            (folder / name).write_text(content, encoding="utf-8")


def _with_ends(
    old: Mapping[str, Any] | None,
    before: Sequence[tuple[str, int]],
    after: Sequence[tuple[str, int]],
) -> Any:
    """Return a post-processor that puts tokens around a text, in the place of ``old``."""
    steps = [] if old is None else list(old.get("processors") or [old])
    if any(step["type"] not in _KNOWN for step in steps):
        return old  # it ends texts in a way of its own
    start, end = (
        [{"SpecialToken": {"id": n, "type_id": 0}} for n, _ in t] for t in (before, after)
    )
    text, second = ({"Sequence": {"id": key, "type_id": i}} for i, key in enumerate("AB"))
    around = {
        "type": "TemplateProcessing",
        "single": [*start, text, *end],
        "pair": [*start, text, *end, second, *end],
        "special_tokens": {
            name: {"id": name, "ids": [i], "tokens": [name]} for name, i in (*before, *after)
        },
    }
    kept = [step for step in steps if step["type"] != "TemplateProcessing"]
    return {"type": "Sequence", "processors": [*kept, around]} if kept else around


class EncodedSamples(torch.utils.data.Dataset[Encoded]):
    """Samples that are encoded when they are asked for."""

    def __init__(self, encoder: TextEncoder, texts: Sequence[str], indices: Sequence[int]) -> None:
        self._encoder = encoder
        self._texts = texts
        self.indices = indices

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Encoded:
        return self._encoder.encode(self._texts[index]), self.indices[index]
