"""Files as the source of a corpus: hashed once, then recognised by size and times."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from evener.data.corpus_cache import digest, mark_used
from evener.data.documents import Document, DocumentSource, Note, Progress, Rejects, ignore
from evener.data.record_files import holds_records, read_records
from evener.data.sources import SourceFile, content_hash, find_files
from evener.data.text_files import read_text
from evener.files import read_json
from evener.parsing import Fields, short

_SETTLED_S: Final = 2.0
"""A file modified less than this before it was hashed may change again with the same time."""


@final
class FileSource(DocumentSource):
    """Text files, JSON Lines and parquet.

    A text file is one document; one that stands alone or is larger than 4 MiB is cut into documents
    at paragraph boundaries. JSON Lines and parquet hold a document per line or row. Files whose
    content was met before give no document. Text is UTF-8; a binary file is skipped if every file
    was asked for (suffix ``""``) and else an error.

    Args:
        paths: Files and folders; ``find_files`` says which files of a folder are taken.
        cache_dir: Where the hashes of files are remembered.
        suffixes: File endings to take from folders; None is ``DEFAULT_SUFFIXES``.
        exclude: Globs of what to leave out, see ``find_files``.
        text_key: Key or column of the text in files of records.
        progress: Told how much has been hashed of what is new.

    Raises:
        DataError: A path is missing or unreadable, or nothing matches.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        cache_dir: Path,
        *,
        suffixes: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        text_key: str = "text",
        progress: Progress = ignore,
    ) -> None:
        self._files = find_files(paths, suffixes, exclude)
        self._text_key = text_key
        self._skips_binary = suffixes is not None and "" in suffixes
        self._hashes = _hash_files(self._files, cache_dir, progress)
        self._has_records = any(map(holds_records, self._files))

    @property
    def name(self) -> str:
        """The first file, and whether there are others."""
        others = len(self._files) - 1
        more = f" and {others} other file{'s' if others > 1 else ''}" if others else ""
        return f"{self._files[0].path}{more}"

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self._files)

    @property
    def identity(self) -> list[Any]:
        """Label, size and content hash of each file, and where records have their text."""
        rows: list[Any] = [
            [file.label, file.size, hashed]
            for file, hashed in zip(self._files, self._hashes, strict=True)
        ]
        return [*rows, ["text_key", self._text_key]] if self._has_records else rows

    def documents(self, rejects: Rejects, *, note: Note, progress: Progress) -> Iterator[Document]:
        """Yields the documents of one file after another."""
        total, done = self.num_bytes, 0
        skipped: dict[str, list[str]] = {"empty": [], "the same as another": [], "binary": []}
        seen: set[str] = set()
        for file, hashed in zip(self._files, self._hashes, strict=True):
            if hashed in seen:
                skipped["the same as another"].append(file.label)
                done += file.size
                continue
            seen.add(hashed)
            has_text, before, rejected = False, done, rejects.count
            for document in self._read(file, hashed, rejects, skipped["binary"]):
                if document.text and not document.text.isspace():
                    has_text = True
                    yield document
                done += document.read_bytes
                progress(done, total)
            if not (has_text or file.label in skipped["binary"] or rejects.count > rejected):
                skipped["empty"].append(file.label)
            done = before + file.size
        progress(total, total)
        for what, labels in skipped.items():
            if labels:
                note(f"left out because {what}: {len(labels)} files, {', '.join(labels[:3])}")

    def _read(
        self, file: SourceFile, hashed: str, rejects: Rejects, binary: list[str]
    ) -> Iterator[Document]:
        if holds_records(file):
            return read_records(file, hashed, text_key=self._text_key, rejects=rejects)
        return read_text(
            file,
            hashed,
            alone=len(self._files) == 1,
            on_binary=(lambda f: binary.append(f.label)) if self._skips_binary else None,
        )


def _stamp(row: Any) -> list[Any]:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], str):
        raise ValueError(f"{short(row)} is not size, times and hash of a file")
    return row


def _hash_files(files: Sequence[SourceFile], cache_dir: Path, progress: Progress) -> list[str]:
    """Hashes the contents, those that look untouched from the stamps of last time."""
    key = digest([str(file.path.absolute()) for file in files])
    stamps_path = cache_dir / f"stamps-{key}.json"
    # label -> size, modification time, change time, content hash
    try:
        stamps = {
            label: _stamp(row) for label, row in Fields(read_json(stamps_path)).values.items()
        }
    except (OSError, ValueError):
        stamps = {}
    mark_used(stamps_path)
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
