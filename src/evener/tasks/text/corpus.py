"""Text tokenised once into a memory-mapped file, and split by document."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evener.data.cursor import derive_seed
from evener.errors import ConfigError, DataError
from evener.tasks.text.corpus_cache import (
    COUNTS,
    FORMAT,
    TextTokenizer,
    build_corpus,
    corpus_folder,
    digest,
    mark_used,
    read_manifest,
)
from evener.tasks.text.documents import (
    DocumentSource,
    Note,
    OnError,
    Progress,
    Rejects,
    ignore,
    rejected,
)
from evener.tasks.text.packing import PackedDocuments


class CorpusSplits(NamedTuple):
    """The two sides of a corpus; no document is on both."""

    train: PackedDocuments
    heldout: PackedDocuments


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A prepared corpus.

    Attributes:
        folder: Where it lies in the cache.
        signature: Identifies contents, labels, tokenizer and format.
        num_documents: Documents of both sides.
        num_bytes: Size of their text.
        num_tokens: Tokens, one end-of-text per document included.
        num_rejected: Records that held no text and were left out.
        first_rejected: Where the first of them is, and what is wrong with it.
        dtype: Of the token file, ``"<u2"`` or ``"<u4"``.
        eos_id: End-of-text token.
        heldout_fraction: Chance of a document to be held out.
        seed: Chooses which documents are.
    """

    folder: Path
    signature: str
    num_documents: int
    num_bytes: int
    num_tokens: int
    num_rejected: int
    first_rejected: str
    dtype: str
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
        rows = np.fromfile(self.folder / "documents.bin", "<u8").reshape(-1, 3)
        tokens = np.memmap(self.folder / "tokens.bin", self.dtype, "r")
        is_heldout = _choose(rows[:, 2], self.heldout_fraction, self.seed)
        sides = []
        for name, chosen in (("train", ~is_heldout), ("heldout", is_heldout)):
            identity = [self.signature, name, self.heldout_fraction, self.seed, seq_len]
            sides.append(
                PackedDocuments(
                    tokens,
                    rows[chosen, :2].astype(np.int64),
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
    tokenizer: TextTokenizer,
    cache_dir: Path,
    *,
    heldout_fraction: float = 0.05,
    seed: int = 0,
    on_error: OnError = "stop",
    progress: Progress = ignore,
    on_note: Note = ignore,
) -> Corpus:
    """Tokenise a source once, or find that it has been done.

    Several processes may call this at once with one ``cache_dir``, for different text or the same.
    Memory holds a mebibyte of documents at a time. A corpus that nobody has used for 30 days is
    removed from the cache when another one is made there.

    Args:
        source: Gives the documents.
        tokenizer: Turns text into ids.
        cache_dir: Folder for the result; made if missing.
        heldout_fraction: Chance of a document to be held out, between 0 and 1.
        seed: Chooses which documents are held out.
        on_error: What a record without a text is: ``"stop"`` an error, ``"skip"`` counted.
        progress: Told of the tokenising.
        on_note: Told, in a sentence, of what was skipped and of a damaged cache that is rebuilt.

    Raises:
        DataError: The source cannot be read, or holds no text or one document only; the cache
            cannot be written.
        ConfigError: ``heldout_fraction`` is out of range.
    """
    if not 0 < heldout_fraction < 1:
        raise ConfigError(f"heldout_fraction={heldout_fraction}: must be between 0 and 1")
    identity = [FORMAT, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.vocab_size]
    signature = digest([*identity, source.identity])
    folder = corpus_folder(cache_dir, signature)
    manifest = read_manifest(folder, on_note)
    if manifest is None:
        rejects = Rejects(on_error)
        manifest = build_corpus(folder, source, tokenizer, rejects, note=on_note, progress=progress)
    if manifest["num_rejected"] and on_error == "stop":
        raise rejected(manifest["first_rejected"])
    if manifest["num_documents"] < 2:
        raise DataError(
            f"{source.name} makes one document only, so that none can be held out: give more "
            f"text, or several files"
        )
    return _corpus(folder, signature, manifest, heldout_fraction, seed)


def open_corpus(
    cache_dir: Path, signature: str, *, heldout_fraction: float, seed: int
) -> Corpus | None:
    """Open a corpus that another process has just prepared.

    Returns:
        ``None`` when it is not in this cache, or damaged.
    """
    folder = corpus_folder(cache_dir, signature)
    manifest = read_manifest(folder, ignore)
    if manifest is None:
        return None
    return _corpus(folder, signature, manifest, heldout_fraction, seed)


def _corpus(
    folder: Path, signature: str, manifest: Mapping[str, Any], heldout_fraction: float, seed: int
) -> Corpus:
    mark_used(folder)
    known = {name: manifest[name] for name in (*COUNTS, "first_rejected", "dtype", "eos_id")}
    return Corpus(
        folder=folder, signature=signature, heldout_fraction=heldout_fraction, seed=seed, **known
    )


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
