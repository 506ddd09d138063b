"""Tokenizers for causal language models: bytes by default, or any local Hugging Face folder."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from evener.errors import ConfigError, DataError
from evener.files import read_json, require_regular

_DEFINING_FILES: Final = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken"),
)
"""Globs of the files that decide what ids a text gets."""

_OTHER_FILES: Final = ("chat_template*.jinja",)


class CausalTokenizer(ABC):
    """Turns text into ids and back; what a corpus, a model and a checkpoint need of a tokenizer."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""

    @property
    @abstractmethod
    def eos_id(self) -> int:
        """Id of the token that ends a document."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of what defines the tokenizer: equal for equal ids."""

    @abstractmethod
    def encode(self, text: str, /) -> NDArray[Any]:
        """Returns the ids of ``text``, 1-d unsigned integers; no special tokens are added."""

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Returns ``encode`` of each text; all at once may be quicker."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Returns the text of ``ids`` without special tokens; what is no text becomes U+FFFD."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Returns the files that ``AutoTokenizer`` loads the tokenizer from, by name."""

    def save(self, folder: Path) -> None:
        """Writes ``files()`` into ``folder``, which is made if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


@final
class ByteTokenizer(CausalTokenizer):
    """One token per byte of UTF-8, its value being the id, and ``<|endoftext|>`` as 256.

    Needs no library and no files, and every text comes back exactly.
    """

    @property
    def vocab_size(self) -> int:
        """256 bytes and end-of-text."""
        return 257

    @property
    def eos_id(self) -> int:
        """The id after the bytes."""
        return 256

    @property
    def fingerprint(self) -> str:
        """A constant: the definition never changes."""
        return "utf-8-bytes-and-end-of-text"

    def encode(self, text: str, /) -> NDArray[Any]:
        """Returns the bytes of ``text``; ``<|endoftext|>`` within it is text as well."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Returns the text of ``ids``; end-of-text is left out, broken UTF-8 becomes U+FFFD."""
        array = np.asarray(ids, np.int64)
        return array[array < self.eos_id].astype(np.uint8).tobytes().decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Describes the same tokenizer as a byte-level BPE without merges."""
        return {
            name: json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
            for name, content in _byte_level_files().items()
        }


def _byte_level_files() -> dict[str, dict[str, Any]]:
    end = {"content": "<|endoftext|>", "normalized": False, "special": True}
    strict = {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    # A BPE without merges gives the same ids with and without the regex, but faster without.
    byte_level |= {"use_regex": False}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None}
    model |= {"continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"ignore_merges": False, "vocab": _byte_vocabulary() | {"<|endoftext|>": 256}}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 256, **end, **strict}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model | {"merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        },
    }


def _byte_vocabulary() -> dict[str, int]:
    """Names of the bytes in byte-level BPE: printable Latin-1 as it is, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return {names[byte]: byte for byte in range(256)}


@final
class FolderTokenizer(CausalTokenizer):
    """A tokenizer that ``transformers.AutoTokenizer`` loads from a local folder.

    Nothing is downloaded, and no code from the folder is run.

    Args:
        folder: Holds the tokenizer's files; may be a model's folder.

    Raises:
        DataError: It does not load, or has no end-of-text token.
        ConfigError: transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokenizer = load_auto_tokenizer(folder)
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {folder} has no end-of-text token, which separates documents: "
                f'set "eos_token" in its tokenizer_config.json to a token of its vocabulary'
            )
        self._tokenizer = tokenizer
        self._eos_id = int(tokenizer.eos_token_id)
        self._vocab_size: int = max(*tokenizer.get_vocab().values(), self._eos_id) + 1
        self._files = tokenizer_files(folder)
        self._fingerprint = _fingerprint(_read_files(folder, _DEFINING_FILES))
        self._is_fast = bool(tokenizer.is_fast)
        if self._is_fast:
            # tokenizer.json may hold both, as saved after a fine-tuning; a document is never cut.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            # Whether `<|endoftext|>` in a text is that text, or the end of it.
            tokenizer.backend_tokenizer.encode_special_tokens = bool(tokenizer.split_special_tokens)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, added tokens included."""
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        """Id of the folder's ``eos_token``."""
        return self._eos_id

    @property
    def fingerprint(self) -> str:
        """Hash of the folder's files that decide what ids a text gets."""
        return self._fingerprint

    def encode(self, text: str, /) -> NDArray[Any]:
        """Returns the ids that the Hugging Face tokenizer gives without special tokens."""
        if self._is_fast:
            backend = self._tokenizer.backend_tokenizer
            return np.array(backend.encode(text, add_special_tokens=False).ids, np.uint32)
        with _quiet():  # it advises on texts longer than the model takes; they are cut later
            return np.array(self._tokenizer.encode(text, add_special_tokens=False), np.uint32)

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Returns ``encode`` of each text, computed on all cores."""
        if not self._is_fast:
            return super().encode_batch(texts)
        backend = self._tokenizer.backend_tokenizer
        # The fast kind leaves out where in the text each token stands.
        found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.uint32) for each in found]

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Returns the text that the Hugging Face tokenizer gives without special tokens."""
        plain = np.asarray(ids, np.int64).tolist()
        return str(
            self._tokenizer.decode(
                plain, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def files(self) -> dict[str, bytes]:
        """Returns the folder's files as they were when it was loaded."""
        return dict(self._files)


def load_tokenizer(spec: str | Path | None) -> CausalTokenizer:
    """Loads a tokenizer; never from the network.

    Args:
        spec: A folder with tokenizer files, or None for ``ByteTokenizer``. A folder to which a
            ``ByteTokenizer`` was saved gives one.

    Raises:
        DataError: There is no such folder, it does not load, or it has no end-of-text token.
        ConfigError: transformers is not installed.
    """
    if spec is None:
        return ByteTokenizer()
    folder = Path(spec).expanduser()
    if not folder.is_dir():
        raise DataError(
            f"there is no tokenizer folder {folder}: evener downloads nothing. Name a folder that "
            f"holds tokenizer.json (hf download NAME --local-dir FOLDER fetches one), or none for "
            f"the byte-level tokenizer"
        )
    return ByteTokenizer() if is_byte_level(folder) else FolderTokenizer(folder)


def check_vocabulary(vocab_size: int, model_vocab_size: int) -> None:
    """Checks that the model has an embedding for every id of the tokenizer.

    Args:
        vocab_size: Ids of the tokenizer.
        model_vocab_size: Rows of the model's token embedding; more than needed are fine.

    Raises:
        ConfigError: There are too few.
    """
    if vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} ids, the model only {model_vocab_size} "
            f"embeddings: use the tokenizer that the model was made with, or set the model's "
            f"vocab_size to {vocab_size} when it starts from scratch"
        )


def load_auto_tokenizer(folder: Path) -> Any:
    """Loads the ``transformers`` tokenizer of a local folder, and runs no code from it.

    Raises:
        DataError: It does not load.
        ConfigError: transformers is not installed.
    """
    try:
        with _quiet():
            from transformers import AutoTokenizer

            require_regular(folder)
            return AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the tokenizer in {folder} needs {error.name}: pip install 'evener[hf]', or use the "
            f"byte-level tokenizer"
        ) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
        raise DataError(
            f"{folder} does not load as a tokenizer: {cause}. It needs the files that "
            f"tokenizer.save_pretrained() writes"
        ) from error


def is_byte_level(folder: Path) -> bool:
    """Whether a folder holds what ``ByteTokenizer.save`` writes."""
    try:
        names = _byte_level_files()
        return all(read_json(folder / name) == names[name] for name in names)
    except (OSError, ValueError):
        return False


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder that make up its tokenizer, by name."""
    return _read_files(folder, (*_DEFINING_FILES, *_OTHER_FILES))


def _read_files(folder: Path, globs: Sequence[str]) -> dict[str, bytes]:
    paths = {path.name: path for glob in globs for path in folder.glob(glob) if path.is_file()}
    return {name: paths[name].read_bytes() for name in sorted(paths)}


def _fingerprint(files: Mapping[str, bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, content in files.items():
        hasher.update(f"{name} {len(content)} ".encode())
        hasher.update(content)
    return hasher.hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers from logging advice on standard error; errors still show."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
