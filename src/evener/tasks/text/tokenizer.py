"""Tokenizers for causal language models: bytes by default, or any local Hugging Face folder."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from evener.errors import ConfigError, DataError
from evener.files import blake2b, explaining, require_regular
from evener.tasks.language_model import in_short, quiet

END: Final = "<|endoftext|>"

TOKENIZER_FILE: Final = "tokenizer.json"
CONFIG_FILE: Final = "tokenizer_config.json"

CONFIG: Final[Mapping[str, Any]] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": True,
}
"""``CONFIG_FILE`` of the tokenizers that evener makes."""

_CHAT: Final = "chat_template"
"""Prefix of files that do not affect the ids of a text."""

_FILES: Final = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "tekken.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", f"{_CHAT}*.jinja"),
)
"""Globs of the files that make up a tokenizer."""


class CausalTokenizer(ABC):
    """Converts text to ids and back; the interface for corpus, model and checkpoint.

    Attributes:
        vocab_size: The largest id plus one, added tokens included.
        eos_id: Id of the token that ends a document.
        fingerprint: Hash of what defines the tokenizer: equal for equal ids.
    """

    vocab_size: int
    eos_id: int
    fingerprint: str

    def encode(self, text: str, /) -> NDArray[Any]:
        """Return the ids of ``text``, 1-d unsigned integers; no special tokens are added."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return ``encode`` of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Return the text of ``ids`` without special tokens; invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """Return the files that ``AutoTokenizer`` loads the tokenizer from, by name."""

    def save(self, folder: Path) -> None:
        """Write ``files()`` into ``folder``, which is created if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            (folder / name).write_bytes(content)


@final
class ByteTokenizer(CausalTokenizer):
    """One token per byte of UTF-8, its value being the id, and ``<|endoftext|>`` as 256.

    It needs no library, and decoding returns every text exactly.
    """

    vocab_size = 257
    eos_id = 256
    fingerprint = "utf-8-bytes-and-end-of-text"

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return the bytes of each text; ``<|endoftext|>`` within it is text as well."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Return the text of ``ids``; end-of-text is left out, broken UTF-8 becomes U+FFFD."""
        array = np.asarray(ids, np.int64)
        return array[array < self.eos_id].astype(np.uint8).tobytes().decode(errors="replace")

    def files(self) -> dict[str, bytes]:
        """Describe the same tokenizer as a byte-level BPE without merges."""
        from tokenizers import AddedToken
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        # Without merges the regex that splits words does not affect ids, but costs time.
        names = {name: byte for byte, name in bytes_to_unicode().items()}
        backend = byte_level({**names, END: self.eos_id}, splits_words=False)
        backend.add_special_tokens([AddedToken(END, normalized=False, special=True)])
        return to_files(backend)


def byte_level(vocabulary: Mapping[str, int] | None, *, splits_words: bool) -> Any:
    """Return a byte-level BPE of the tokenizers library, without merges.

    Args:
        vocabulary: Ids by token; None if it is still to be trained.
        splits_words: Whether no token spans two words.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE() if vocabulary is None else models.BPE(vocab=dict(vocabulary), merges=[])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_words)
    backend.decoder = decoders.ByteLevel()
    return backend


def to_files(backend: Any) -> dict[str, bytes]:
    """Return the files from which ``AutoTokenizer`` loads a tokenizer of the tokenizers library."""
    return {
        TOKENIZER_FILE: backend.to_str(pretty=True).encode(),
        CONFIG_FILE: json.dumps(CONFIG, indent=1).encode() + b"\n",
    }


def load_auto(folder: Path) -> Any:
    """Return the tokenizer of transformers in a local folder; no code from it is run.

    Raises:
        DataError: It does not load.
    """
    from transformers import AutoTokenizer

    try:
        with quiet():
            require_regular(folder)
            return AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # missing or damaged files: errors have any type
        raise DataError(
            f"{folder} does not load as a tokenizer: {in_short(error).rstrip('.')}. It needs the "
            f"files that tokenizer.save_pretrained() writes"
        ) from error


@final
class FolderTokenizer(CausalTokenizer):
    """A tokenizer that ``transformers.AutoTokenizer`` loads from a local folder.

    Nothing is downloaded, and no code from the folder is run.

    Args:
        folder: Holds the tokenizer's files; may be a model's folder.

    Raises:
        DataError: It cannot be loaded, or has no end-of-text token.
    """

    def __init__(self, folder: Path) -> None:
        self._own = own = load_auto(folder)
        if own.eos_token_id is None:
            raise DataError(
                f"the tokenizer in {folder} has no end-of-text token, which separates documents: "
                f'set "eos_token" in its tokenizer_config.json to a token of its vocabulary'
            )
        self.eos_id = int(own.eos_token_id)
        self.vocab_size = max(*own.get_vocab().values(), self.eos_id) + 1
        paths = {path.name: path for glob in _FILES for path in folder.glob(glob) if path.is_file()}
        self._files = {name: paths[name].read_bytes() for name in sorted(paths)}
        hasher = blake2b()
        for name, content in self._files.items():
            if not name.startswith(_CHAT):
                hasher.update(f"{name} {len(content)} ".encode() + content)
        self.fingerprint = hasher.hexdigest()

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Return the ids of the Hugging Face tokenizer, without special tokens."""
        with quiet():  # it warns about texts longer than the model allows; they are cut later
            found = self._own(
                list(texts),
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        return [np.array(ids, np.uint32) for ids in found["input_ids"]]

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        """Return the text of the Hugging Face tokenizer, without special tokens."""
        return str(
            self._own.decode(
                np.asarray(ids, np.int64).tolist(),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
        )

    def files(self) -> dict[str, bytes]:
        """Return the folder's files as they were when it was loaded."""
        return dict(self._files)


def load_tokenizer(spec: str | Path | None) -> CausalTokenizer:
    """Load a tokenizer that ends documents; never from the network.

    Args:
        spec: A folder with tokenizer files, or None for ``ByteTokenizer``.

    Raises:
        DataError: The folder does not exist, cannot be loaded, or has no end-of-text token.
    """
    if spec is None:
        return ByteTokenizer()
    folder = Path(spec).expanduser()
    with explaining(f"tokenizer folder {folder}", "give this user access to it", DataError):
        is_there = folder.is_dir()
    if not is_there:
        raise DataError(
            f"there is no tokenizer folder {folder}: evener downloads nothing. Name a folder with "
            f"tokenizer.json (hf download NAME --local-dir FOLDER downloads one), or none for "
            f"the byte-level tokenizer"
        )
    return FolderTokenizer(folder)


def check_vocabulary(vocab_size: int, model_vocab_size: int) -> None:
    """Check that the model has an embedding for every id of the tokenizer.

    Args:
        vocab_size: Ids of the tokenizer.
        model_vocab_size: Rows of the model's token embedding; may be more than needed.

    Raises:
        ConfigError: There are too few.
    """
    if vocab_size > model_vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} ids, the model only {model_vocab_size} "
            f"embeddings: use the tokenizer that the model was made with, or set the model's "
            f"vocab_size to {vocab_size} when it starts from scratch"
        )
