"""Text tokenised once into a memory-mapped file, and split by document."""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evener.data.corpus_cache import (
    FORMAT,
    Build,
    Note,
    Progress,
    TextTokenizer,
    digest,
    read_manifest,
)
from evener.data.cursor import derive_seed
from evener.data.packing import PackedDocuments
from evener.data.sources import (
    DEFAULT_SUFFIXES,
    SourceFile,
    content_hash,
    find_files,
    stdlib_sources,
)
from evener.errors import ConfigError, DataError

__all__ = [
    "DEFAULT_SUFFIXES",
    "Corpus",
    "CorpusSplits",
    "TextTokenizer",
    "prepare_corpus",
    "stdlib_sources",
]

_SETTLED_S: Final = 2.0
"""A file modified less than this before it was hashed may change again with the same time."""


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
    dtype: str
    eos_id: int
    heldout_fraction: float
    seed: int

    def split(self, seq_len: int) -> CorpusSplits:
        """Opens both sides as samples of ``seq_len`` tokens.

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
    sources: Sequence[Path],
    tokenizer: TextTokenizer,
    cache_dir: Path,
    *,
    suffixes: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    heldout_fraction: float = 0.05,
    seed: int = 0,
    progress: Progress | None = None,
    on_note: Note | None = None,
) -> Corpus:
    """Tokenises text files once, or finds that it has been done.

    One file is one document; a file that stands alone or is larger than 4 MiB is cut into
    documents at paragraph boundaries. ``find_files`` says which files are taken. Files that hold
    nothing but white space, and files whose content was met before, give no document. Text is
    UTF-8; a binary file is skipped if every file was asked for (suffix ``""``) and else an error.

    Several processes may call this at once with one ``cache_dir``, for different text or the same.
    Memory holds one document at a time. Old corpora stay in the cache until they are removed.

    Args:
        sources: Files and folders.
        tokenizer: Turns text into ids.
        cache_dir: Folder for the result; made if missing.
        suffixes: File endings to take from folders; None is ``DEFAULT_SUFFIXES``.
        exclude: Globs of what to leave out, see ``find_files``.
        heldout_fraction: Chance of a document to be held out, between 0 and 1.
        seed: Chooses which documents are held out.
        progress: Told (bytes done, bytes in all), from 0 again for each of two passes: hashing
            what is new, then tokenising.
        on_note: Told, in a sentence, of what was skipped and of a damaged cache that is rebuilt.

    Raises:
        DataError: A source is missing, unreadable or not text; nothing matches or all is empty;
            there is one document only; or the cache cannot be written.
        ConfigError: ``heldout_fraction`` is out of range.
    """
    if not 0 < heldout_fraction < 1:
        raise ConfigError(f"heldout_fraction={heldout_fraction}: must be between 0 and 1")
    files = find_files(sources, suffixes, exclude)
    hashes = _hash_files(files, cache_dir, progress or _ignore)
    identity = [FORMAT, tokenizer.fingerprint, tokenizer.eos_id, tokenizer.vocab_size]
    rows = [[file.label, file.size, hashed] for file, hashed in zip(files, hashes, strict=True)]
    signature = digest([*identity, rows])
    folder = cache_dir / f"corpus-{signature}"
    note = on_note or _ignore
    manifest = read_manifest(folder, note)
    if manifest is None:
        skip_binary = suffixes is not None and "" in suffixes
        build = Build(cache_dir, tokenizer, note, progress or _ignore, skip_binary=skip_binary)
        manifest = build.run(files, hashes, folder)
    if manifest["num_documents"] < 2:
        raise DataError(
            f"{files[0].path} makes one document only, so that none can be held out: give more "
            f"text, or several files"
        )
    return Corpus(
        folder=folder,
        signature=signature,
        num_documents=manifest["num_documents"],
        num_bytes=manifest["num_bytes"],
        num_tokens=manifest["num_tokens"],
        dtype=manifest["dtype"],
        eos_id=tokenizer.eos_id,
        heldout_fraction=heldout_fraction,
        seed=seed,
    )


def _ignore(*_: object) -> None:
    pass


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


# ── recognising what is there ────────────────────────────────────────────────────────────────────


def _hash_files(files: Sequence[SourceFile], cache_dir: Path, progress: Progress) -> list[str]:
    """Hashes the contents, those that look untouched from the stamps of last time."""
    key = digest([str(file.path.absolute()) for file in files])
    stamps_path = cache_dir / f"stamps-{key}.json"
    # label -> size, modification time, change time, content hash
    try:
        stamps = {str(k): [*row] for k, row in json.loads(stamps_path.read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        stamps = {}
    started_ns = time.time_ns()
    fresh: dict[str, list[Any]] = {}
    hashes = []
    known = [stamps.get(f.label, [])[:3] == [f.size, *f.stamp] for f in files]
    todo, done = sum(f.size for f, is_known in zip(files, known, strict=True) if not is_known), 0
    for file, is_known in zip(files, known, strict=True):
        row = stamps.get(file.label, [])
        if not is_known:
            row = [file.size, *file.stamp, content_hash(file)]
            done += file.size
            progress(done, todo)
        hashes.append(row[3])
        if started_ns - max(file.stamp) > _SETTLED_S * 1e9:
            fresh[file.label] = row
    if fresh != stamps:
        # Without them the next look takes longer, and no more: a read-only cache may be used.
        with suppress(OSError):
            cache_dir.mkdir(parents=True, exist_ok=True)
            scratch = cache_dir / f".{stamps_path.name}-{os.getpid()}-{time.monotonic_ns()}"
            scratch.write_text(json.dumps(fresh))
            scratch.replace(stamps_path)
    return hashes
