"""A tokenizer trained on the corpus: byte-level BPE, as GPT-2's, stored in the cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from evener.tasks.text.cache import digest, load_or_make
from evener.tasks.text.documents import DocumentSource
from evener.tasks.text.tokenizer import END, CausalTokenizer, byte_level, load_tokenizer, to_files
from evener.team.terminal import say

EOS_ID: Final = 0
"""Id of ``<|endoftext|>`` in every tokenizer made here."""

SAMPLE_BYTES: Final = 256 * 1024 * 1024
"""If the corpus is larger, a sample of about this size is used, chosen by hashes of labels."""

_FORMAT: Final = 2
"""Increased when the same text would give another tokenizer."""


def trained_tokenizer(source: DocumentSource, vocab_size: int, cache_dir: Path) -> CausalTokenizer:
    """Train a tokenizer on a source, or load it from the cache.

    Held-out documents are used, too, so that the tokenizer does not depend on the split.

    Args:
        source: The documents.
        vocab_size: Most ids, at least 257 (bytes and end-of-text); with little text, fewer.
        cache_dir: Folder for the result; created if missing.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written.
    """
    folder = cache_dir / f"tokenizer-{digest([_FORMAT, vocab_size, source.identity])}"

    def load() -> CausalTokenizer:
        folder.stat()  # a missing folder is not a damaged one
        return load_tokenizer(folder)

    def make(fresh: Path) -> None:
        backend = _train(_sample(source), vocab_size)
        for name, content in to_files(backend).items():
            (fresh / name).write_bytes(content)
        if not source.quiet:
            say(f"note: trained a tokenizer of {backend.get_vocab_size()} ids on {source.name}")

    return load_or_make(folder, load, make)


def _sample(source: DocumentSource) -> Iterator[str]:
    threshold = 2**64 * min(1.0, SAMPLE_BYTES / max(1, source.num_bytes))
    return (
        doc.text for doc in source.documents("training a tokenizer") if doc.hash_label() < threshold
    )


def _train(texts: Iterator[str], vocab_size: int) -> Any:
    from tokenizers import pre_tokenizers, trainers

    backend = byte_level(vocabulary=None, splits_words=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
