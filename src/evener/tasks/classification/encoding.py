"""Texts as token ids, for models that read one text and name its class."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.errors import ConfigError
from evener.tasks.classification.finished_tokenizer import finished_files
from evener.tasks.tokenizer import (
    ByteTokenizer,
    is_byte_level,
    load_auto_tokenizer,
    tokenizer_files,
)

Encoded = tuple[list[int], int]
"""Token ids of a text, and the index of its class."""

_NUL = 0
"""Padding for bytes: no text holds it, and the end-of-text token stays free to end texts."""


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


class TextEncoder:
    """Cuts a text to ``seq_len`` tokens and puts the model's special tokens around it.

    Decoders classify by the state at the last token. Where the tokenizer has none that ends a
    text, the end-of-text token is added: the same question at the end of every text.

    Args:
        ids_of: Token ids of a text, without special ones.
        prefix: What comes before every text.
        suffix: What comes after it.
        pad_id: What fills shorter texts.
        vocab_size: The largest id plus one.
        seq_len: Most tokens of a text, special ones included.
        files: What ``AutoTokenizer`` loads the tokenizer from, by name.

    Raises:
        ConfigError: The tokens around a text leave no room for it.
    """

    def __init__(
        self,
        ids_of: Callable[[str], Sequence[int]],
        *,
        prefix: Sequence[int],
        suffix: Sequence[int],
        pad_id: int,
        vocab_size: int,
        seq_len: int,
        files: dict[str, bytes],
    ) -> None:
        if seq_len <= (around := len(prefix) + len(suffix)):
            raise ConfigError(
                f"seq_len is {seq_len}, and the tokenizer puts {around} tokens around every text, "
                "which leaves no room for it; raise seq_len"
            )
        self._ids_of = ids_of
        self._prefix = list(prefix)
        self._suffix = list(suffix)
        self.pad_id = pad_id
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.files = files

    @classmethod
    def load(cls, folder: Path | None, seq_len: int, end_tokens: int = 1) -> "TextEncoder":
        """The tokenizer of a folder, or bytes without one.

        Args:
            folder: Holds the tokenizer.
            seq_len: Most tokens of a text.
            end_tokens: How many end-of-text tokens a decoder's texts get.

        Raises:
            DataError: It does not load.
            ConfigError: ``seq_len`` leaves no room for text.
        """
        if folder is None or is_byte_level(folder):
            tokenizer = ByteTokenizer()
            return cls(
                lambda text: list(text.encode()),
                prefix=[],
                suffix=[tokenizer.eos_id] * end_tokens,
                pad_id=_NUL,
                vocab_size=tokenizer.vocab_size,
                seq_len=seq_len,
                files=tokenizer.files(),
            )
        return cls._of_hugging_face(
            load_auto_tokenizer(folder), seq_len, end_tokens, tokenizer_files(folder)
        )

    @classmethod
    def _of_hugging_face(
        cls, tokenizer: Any, seq_len: int, end_tokens: int, files: dict[str, bytes]
    ) -> "TextEncoder":
        def ids_of(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        if tokenizer.is_fast:
            # Set up once: asking the wrapper changes the tokenizer, which two threads may not.
            backend = tokenizer.backend_tokenizer
            backend.no_truncation()
            backend.no_padding()
            # Whether `<|endoftext|>` in a text is that text, or the end of it.
            backend.encode_special_tokens = bool(tokenizer.split_special_tokens)

            def ids_of(text: str) -> list[int]:
                return list(backend.encode(text, add_special_tokens=False).ids)

        plain = ids_of("a")
        whole = list(tokenizer.encode("a", add_special_tokens=True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        prefix, suffix = whole[:start], whole[start + len(plain) :]
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        if pad is None or pad == eos:
            pad = tokenizer.unk_token_id if tokenizer.unk_token_id is not None else eos
        if not suffix and eos is not None and eos != pad:
            suffix = [eos] * end_tokens
        return cls(
            ids_of,
            prefix=prefix,
            suffix=suffix,
            pad_id=0 if pad is None else int(pad),
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            seq_len=seq_len,
            files=files,
        )

    @property
    def fingerprint(self) -> str:
        """Equal for equal ids of equal texts."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(f"{self.seq_len} {self._prefix} {self._suffix} {self.pad_id} ".encode())
        for name, content in sorted(self.files.items()):
            hasher.update(f"{name} {len(content)} ".encode())
            hasher.update(content)
        return hasher.hexdigest()

    def finished_files(self) -> dict[str, bytes]:
        """What ``AutoTokenizer`` loads a tokenizer from that gives the ids of ``encode``."""
        return finished_files(
            self.files,
            prefix=self._prefix,
            suffix=self._suffix,
            pad_id=self.pad_id,
            seq_len=self.seq_len,
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, at most ``seq_len``."""
        room = self.seq_len - len(self._prefix) - len(self._suffix)
        # A token has at most some hundred characters; a book need not be read to its end.
        ids = self._ids_of(text[: room * 64])[:room]
        return [*self._prefix, *ids, *self._suffix]

    def collate(self, encoded: Sequence[Encoded]) -> Batch:
        """Puts texts side by side, as wide as the longest."""
        width = max(len(ids) for ids, _ in encoded)
        input_ids = torch.full((len(encoded), width), self.pad_id)
        mask = torch.zeros(len(encoded), width, dtype=torch.long)
        for row, (ids, _) in enumerate(encoded):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        return Batch(input_ids, mask, torch.tensor([label for _, label in encoded]))


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
