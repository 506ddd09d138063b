"""Text tokenised once into a memory-mapped file, and split by document.

A prepared corpus is a folder of the cache, named by its source and its tokenizer::

    corpus-<digest>/
      tokens.bin      little-endian uint16 or uint32: the documents, each followed by end-of-text
      documents.bin   little-endian uint64, per document: start, stop, hash of its label

Files are tokenised again if path, size or modification time differ. The signature hashes the
documents' labels and lengths in tokens, so a copy of the files elsewhere counts as the same data.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evener.config.runs import DataConfig
from evener.data.cursor import derive_seed
from evener.errors import DataError
from evener.files import blake2b
from evener.tasks.text.cache import digest, load_or_make
from evener.tasks.text.documents import Document, DocumentSource
from evener.tasks.text.packing import PackedDocuments
from evener.tasks.text.tokenizer import CausalTokenizer

_FORMAT: Final = 4
"""Increased when the same files would give other tokens or another layout."""

BATCH_CHARACTERS: Final = 1024 * 1024
"""Text that is tokenised at once; the last document may exceed it."""

_TOKENS, _DOCUMENTS = "tokens.bin", "documents.bin"
_ROW: Final = "<u8"


class CorpusSplits(NamedTuple):
    """The training and the held-out documents of a corpus."""

    train: PackedDocuments
    heldout: PackedDocuments


def prepare_corpus(
    source: DocumentSource,
    tokenizer: CausalTokenizer,
    cache_dir: Path,
    data: DataConfig,
    *,
    seed: int = 0,
) -> CorpusSplits:
    """Tokenise a source, or find the result in the cache, and open both sides as samples.

    A hash of its label and the seed decides whether a document is held out, so adding files moves
    no other document to the other side. Each side gets at least one. Several processes may call
    this at once with one ``cache_dir``. About a mebibyte of documents is in memory at a time.

    Args:
        source: The documents.
        tokenizer: Converts text to ids.
        cache_dir: Folder for the result; created if missing.
        data: Tokens of a sample, and the fraction of held-out documents.
        seed: Chooses which documents are held out.

    Raises:
        DataError: The source cannot be read, or holds no text or one document only; the training
            side is shorter than a sample; the cache cannot be written.
    """
    seq_len, fraction = data.seq_len, data.heldout_fraction
    identity = [_FORMAT, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.vocab_size]
    folder = cache_dir / f"corpus-{digest([*identity, source.identity])}"
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"

    def load() -> tuple[NDArray[Any], NDArray[np.uint64]]:
        tokens = np.memmap(folder / _TOKENS, dtype, "r")
        documents = np.fromfile(folder / _DOCUMENTS, _ROW).reshape(-1, 3)
        if documents[-1:, 1].tolist() != [len(tokens)]:
            raise ValueError("its files do not belong together")
        return tokens, documents

    def make(fresh: Path) -> None:
        _write(fresh, _encoded(source.documents("tokenising"), tokenizer, dtype))

    tokens, documents = load_or_make(folder, load, make)
    if len(documents) < 2:
        raise DataError(
            f"{source.name} has only one document, so none can be held out: give more text, or "
            "several files"
        )
    content = blake2b(documents.tobytes()).hexdigest()
    is_heldout = _choose(documents[:, 2], fraction, seed)
    sides = [
        PackedDocuments(
            np.asarray(tokens),  # a plain view: indexing a memmap costs microseconds
            documents[chosen, :2].astype(np.int64),
            seq_len,
            eos_id=tokenizer.eos_id,
            signature=digest([*identity, content, name, fraction, seed, seq_len]),
        )
        for name, chosen in (("train", ~is_heldout), ("heldout", is_heldout))
    ]
    if sides[0].num_tokens < seq_len:
        raise DataError(
            f"the training documents hold {sides[0].num_tokens} tokens to predict, less than one "
            f"sample of seq_len={seq_len}: give more text, or lower seq_len"
        )
    return CorpusSplits(*sides)


def _write(folder: Path, encoded: Iterator[tuple[Document, NDArray[Any]]]) -> None:
    stop = 0
    with (folder / _TOKENS).open("xb") as tokens, (folder / _DOCUMENTS).open("xb") as rows:
        for document, ids in encoded:
            start, stop = stop, stop + len(ids)
            tokens.write(ids.data)
            rows.write(np.array([start, stop, document.hash_label()], _ROW).data)


def _encoded(
    documents: Iterator[Document], tokenizer: CausalTokenizer, dtype: str
) -> Iterator[tuple[Document, NDArray[Any]]]:
    """Yield the documents in their order, with their ids and end-of-text."""
    while batch := _next_batch(documents):
        texts = [document.text for document in batch]
        for document, ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
            yield document, np.append(ids, tokenizer.eos_id).astype(dtype)


def _next_batch(documents: Iterator[Document]) -> list[Document]:
    """Return the next documents, of ``BATCH_CHARACTERS`` together; empty at the end."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS:
            break
    return batch


def _choose(label_hashes: NDArray[np.uint64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return whether each document is held out: a hash below ``fraction`` of the range."""
    # splitmix64's finaliser, so that one stored hash per label is enough for every seed.
    mixed = label_hashes ^ np.uint64(derive_seed(seed, "heldout"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    chosen: NDArray[np.bool_] = mixed < np.uint64(int(fraction * 2**64))
    chosen[mixed.argmin()] = True
    chosen[mixed.argmax()] = False
    return chosen
