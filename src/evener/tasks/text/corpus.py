"""Text tokenised once into a memory-mapped file, and split by document.

A prepared corpus is a folder of the cache, named by its source and its tokenizer::

    corpus-<digest>/
      tokens.bin      little-endian uint16 or uint32: the documents, each followed by end-of-text
      documents.bin   little-endian uint64, per document: start, stop, hash of its label
      signature       hash of the tokens, the documents' labels and the tokenizer

Where the text lies and when it was written decide whether it is tokenised again. The signature is
of the result, so it is the same on every machine that has the same text under the same names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evener.data.cursor import derive_seed
from evener.errors import ConfigError, DataError
from evener.files import blake2b, read_file
from evener.tasks.text.cache import digest, load_or_make
from evener.tasks.text.documents import Document, DocumentSource, Note, Progress, ignore
from evener.tasks.text.packing import PackedDocuments
from evener.tasks.text.tokenizer import CausalTokenizer

_FORMAT: Final = 3
"""Raised when the same files would give other tokens or another layout."""

BATCH_CHARACTERS: Final = 1024 * 1024
"""So much text, or one document more, is tokenised at once."""

_TOKENS, _DOCUMENTS, _SIGNATURE = "tokens.bin", "documents.bin", "signature"
_ROW: Final = "<u8"


class CorpusSplits(NamedTuple):
    """The two sides of a corpus; no document is on both."""

    train: PackedDocuments
    heldout: PackedDocuments


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        folder: Where it lies in the cache.
        signature: Identifies tokens, labels and tokenizer, on every machine.
        tokens: Tokens of all documents, one end-of-text after each.
        documents: uint64 of shape (documents, 3): start and stop in ``tokens``, hash of the label.
        eos_id: End-of-text token.
        heldout_fraction: Chance of a document to be held out.
        seed: Chooses which documents are.
    """

    folder: Path
    signature: str
    tokens: NDArray[Any] = field(repr=False, compare=False)
    documents: NDArray[np.uint64] = field(repr=False, compare=False)
    eos_id: int
    heldout_fraction: float
    seed: int

    def split(self, seq_len: int) -> CorpusSplits:
        """Open both sides as samples of ``seq_len`` tokens.

        A document is held out if the hash of its label and the seed says so: adding files moves no
        other document to the other side. Each side gets at least one.

        Raises:
            ConfigError: ``seq_len`` is less than 2.
            DataError: The training side is shorter than one sample.
        """
        is_heldout = _choose(self.documents[:, 2], self.heldout_fraction, self.seed)
        sides = []
        for name, chosen in (("train", ~is_heldout), ("heldout", is_heldout)):
            identity = [self.signature, name, self.heldout_fraction, self.seed, seq_len]
            sides.append(
                PackedDocuments(
                    self.tokens,
                    self.documents[chosen, :2].astype(np.int64),
                    seq_len,
                    eos_id=self.eos_id,
                    signature=digest(identity),
                )
            )
        train, heldout = sides
        if train.num_tokens < seq_len:
            raise DataError(
                f"the training documents hold {train.num_tokens} tokens to predict, less than one "
                f"sample of seq_len={seq_len}: give more text, or lower seq_len"
            )
        return CorpusSplits(train, heldout)


def prepare_corpus(
    source: DocumentSource,
    tokenizer: CausalTokenizer,
    cache_dir: Path,
    *,
    heldout_fraction: float = 0.05,
    seed: int = 0,
    progress: Progress = ignore,
    on_note: Note = ignore,
) -> Corpus:
    """Tokenise a source once, or find that it has been done.

    Several processes may call this at once with one ``cache_dir``, for different text or the same.
    Memory holds about a mebibyte of documents at a time. A corpus that nobody has used for 30 days
    is removed from the cache when another one is made there.

    Args:
        source: Gives the documents.
        tokenizer: Turns text into ids.
        cache_dir: Folder for the result; made if missing.
        heldout_fraction: Chance of a document to be held out, between 0 and 1.
        seed: Chooses which documents are held out.
        progress: Told of the tokenising.
        on_note: Told, in a sentence, of what was left out and of a damaged cache.

    Raises:
        DataError: The source cannot be read, or holds no text or one document only; the cache
            cannot be written.
        ConfigError: ``heldout_fraction`` is out of range.
    """
    if not 0 < heldout_fraction < 1:
        raise ConfigError(f"heldout_fraction={heldout_fraction}: must be between 0 and 1")
    ids = [_FORMAT, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.vocab_size]
    folder = cache_dir / f"corpus-{digest([*ids, source.identity])}"
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"

    def load() -> Corpus:
        signature = read_file(folder / _SIGNATURE).decode()
        tokens = np.memmap(folder / _TOKENS, dtype, "r")
        documents = np.fromfile(folder / _DOCUMENTS, _ROW).reshape(-1, 3)
        if not signature or documents[-1:, 1].tolist() != [len(tokens)]:
            raise ValueError("its files do not belong together")
        return Corpus(
            folder=folder,
            signature=signature,
            tokens=tokens,
            documents=documents,
            eos_id=tokenizer.eos_id,
            heldout_fraction=heldout_fraction,
            seed=seed,
        )

    def make(fresh: Path) -> None:
        documents = source.documents(note=on_note, progress=progress)
        content = _write(fresh, _encoded(documents, tokenizer, dtype))
        (fresh / _SIGNATURE).write_text(digest([*ids, content]))

    corpus = load_or_make(folder, load, make, on_note)
    if len(corpus.documents) < 2:
        raise DataError(
            f"{source.name} makes one document only, so that none can be held out: give more "
            f"text, or several files"
        )
    return corpus


def _write(folder: Path, encoded: Iterator[tuple[Document, NDArray[Any]]]) -> str:
    """Write tokens and documents, and return the hash of both."""
    hasher, stop = blake2b(), 0
    with (folder / _TOKENS).open("xb") as tokens, (folder / _DOCUMENTS).open("xb") as rows:
        for document, ids in encoded:
            start, stop = stop, stop + len(ids)
            row = np.array([start, stop, document.hash_label()], _ROW)
            for stream, content in ((tokens, ids), (rows, row)):
                stream.write(content.data)
                hasher.update(content.data)
    return hasher.hexdigest()


def _encoded(
    documents: Iterator[Document], tokenizer: CausalTokenizer, dtype: str
) -> Iterator[tuple[Document, NDArray[Any]]]:
    """Yield the documents in their order, with their ids and end-of-text as written."""
    while batch := _next_batch(documents):
        texts = [document.text for document in batch]
        for document, ids in zip(batch, tokenizer.encode_batch(texts), strict=True):
            if ids.min(initial=0) < 0 or ids.max(initial=0) >= tokenizer.vocab_size:
                raise DataError(
                    f"the tokenizer gives ids from {ids.min()} to {ids.max()}, but its vocab_size "
                    f"is {tokenizer.vocab_size}: use the tokenizer files that belong together"
                )
            closed = np.empty(len(ids) + 1, dtype)
            closed[:-1], closed[-1] = ids, tokenizer.eos_id
            yield document, closed


def _next_batch(documents: Iterator[Document]) -> list[Document]:
    """Take documents until they have ``BATCH_CHARACTERS``; none are left when it is empty."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= BATCH_CHARACTERS:
            break
    return batch


def _choose(label_hashes: NDArray[np.uint64], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Says of each document whether it is held out: a hash below ``fraction`` of the range."""
    # splitmix64's finaliser, so that one stored hash per label serves every seed.
    mixed = label_hashes ^ np.uint64(derive_seed(seed, "heldout"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    chosen: NDArray[np.bool_] = mixed < np.uint64(int(fraction * 2**64))
    chosen[mixed.argmin()] = True
    chosen[mixed.argmax()] = False
    return chosen
