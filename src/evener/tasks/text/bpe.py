"""A tokenizer trained on the corpus: byte-level BPE, as GPT-2's, kept in the cache."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from evener.errors import ConfigError
from evener.tasks.text.cache import digest, load_or_make
from evener.tasks.text.documents import Document, DocumentSource, Note, Progress, ignore
from evener.tasks.text.tokenizer import (
    CONFIG,
    CONFIG_FILE,
    END,
    TOKENIZER_FILE,
    CausalTokenizer,
    load_tokenizer,
)

EOS_ID: Final = 0
"""Id of ``<|endoftext|>`` in every tokenizer made here."""

SAMPLE_BYTES: Final = 256 * 1024 * 1024
"""Of a larger corpus, documents of about this size are taken, chosen by the hash of their label."""

_FORMAT: Final = 1
"""Raised when the same text would give another tokenizer."""


def trained_tokenizer(
    source: DocumentSource,
    vocab_size: int,
    cache_dir: Path,
    *,
    progress: Progress = ignore,
    on_note: Note = ignore,
) -> CausalTokenizer:
    """Train a tokenizer on a source once, or find that it has been done.

    Held-out documents take part: which documents these are may change without another tokenizer.

    Args:
        source: Gives the documents.
        vocab_size: Most ids, at least 257 (bytes and end-of-text); short text gives fewer.
        cache_dir: Folder for the result; made if missing.
        progress: Told of the reading; the merges are found after it.
        on_note: Told, in a sentence, that it was trained.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written.
        ConfigError: tokenizers is not installed.
    """
    folder = cache_dir / f"tokenizer-{digest([_FORMAT, vocab_size, source.identity])}"

    def load() -> CausalTokenizer:
        if not all((folder / name).is_file() for name in (CONFIG_FILE, TOKENIZER_FILE)):
            raise ValueError("a file is missing")
        return load_tokenizer(folder)

    def make(fresh: Path) -> None:
        documents = source.documents(progress=progress)
        backend = _train(_sample(documents, source.num_bytes), vocab_size)
        (fresh / TOKENIZER_FILE).write_text(backend.to_str(pretty=True), encoding="utf-8")
        (fresh / CONFIG_FILE).write_text(json.dumps(CONFIG, indent=1) + "\n")
        on_note(f"trained a tokenizer of {backend.get_vocab_size()} ids on {source.name}")

    return load_or_make(folder, load, make, on_note)


def _sample(documents: Iterator[Document], num_bytes: int) -> Iterator[str]:
    threshold = 2**64 if num_bytes <= SAMPLE_BYTES else 2**64 * SAMPLE_BYTES // num_bytes
    return (doc.text for doc in documents if doc.hash_label(b"bpe") < threshold)


def _train(texts: Iterator[str], vocab_size: int) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.tokenizer: bpe needs {error.name}: pip install 'evener[hf]', or leave the key "
            "out for the byte-level tokenizer"
        ) from None
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
