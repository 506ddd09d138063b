"""Files as the source of a corpus: hashed once, then recognised by size and times."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

from evener.files import read_json, write_file
from evener.parsing import Fields, short
from evener.tasks.text.corpus_cache import digest, mark_used
from evener.tasks.text.documents import Document, DocumentSource, Note, Progress, Rejects, ignore
from evener.tasks.text.record_files import holds_records, read_records
from evener.tasks.text.sources import SourceFile, content_hash, find_files
from evener.tasks.text.text_files import read_text

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
        others = len(self._files) - 1
        more = f" and {others} other file{'s' if others > 1 else ''}" if others else ""
        self.name = f"{self._files[0].path}{more}"
        self.num_bytes = sum(file.size for file in self._files)
        hashed = zip(self._files, self._hashes, strict=True)
        self.identity = [[file.label, file.size, content] for file, content in hashed]
        if any(map(holds_records, self._files)):
            self.identity.append(["text_key", text_key])

    def documents(self, rejects: Rejects, *, note: Note, progress: Progress) -> Iterator[Document]:
        """Yield the documents of one file after another."""
        done = 0
        empty: list[SourceFile] = []
        twice: list[SourceFile] = []
        binary: list[SourceFile] = []
        seen: set[str] = set()
        for file, hashed in zip(self._files, self._hashes, strict=True):
            if hashed in seen:
                twice.append(file)
                done += file.size
                continue
            seen.add(hashed)
            has_text, before, others = False, done, (len(binary), rejects.count)
            for document in self._read(file, hashed, rejects, binary):
                if document.text and not document.text.isspace():
                    has_text = True
                    yield document
                done += document.read_bytes
                progress(done, self.num_bytes)
            if not has_text and others == (len(binary), rejects.count):
                empty.append(file)
            done = before + file.size
        progress(self.num_bytes, self.num_bytes)
        skipped = {"empty": empty, "the same as another": twice, "binary": binary}
        for what, files in skipped.items():
            if files:
                labels = ", ".join(file.label for file in files[:3])
                note(f"left out because {what}: {len(files)} files, {labels}")

    def _read(
        self, file: SourceFile, hashed: str, rejects: Rejects, binary: list[SourceFile]
    ) -> Iterator[Document]:
        if holds_records(file):
            return read_records(file, hashed, text_key=self._text_key, rejects=rejects)
        skipped = binary if self._skips_binary else None
        return read_text(file, hashed, alone=len(self._files) == 1, binary=skipped)


def _stamp(row: Any) -> list[Any]:
    if not isinstance(row, list) or len(row) != 4 or not isinstance(row[3], str):
        raise ValueError(f"{short(row)} is not size, times and hash of a file")
    return row


def _hash_files(files: Sequence[SourceFile], cache_dir: Path, progress: Progress) -> list[str]:
    """Hash the contents; those of files that look untouched are known from last time."""
    path = cache_dir / f"stamps-{digest([str(file.path.absolute()) for file in files])}.json"
    # label -> size, modification time, change time, content hash
    try:
        known = {label: _stamp(row) for label, row in Fields(read_json(path)).values.items()}
    except (OSError, ValueError):
        known = {}
    mark_used(path)
    started_ns = time.time_ns()
    rows = {f.label: known.get(f.label, []) for f in files}
    stale = [f for f in files if rows[f.label][:3] != [f.size, *f.stamp]]
    todo, done = sum(file.size for file in stale), 0
    for file in stale:
        rows[file.label] = [file.size, *file.stamp, content_hash(file)]
        done += file.size
        progress(done, todo)
    settled = [f.label for f in files if started_ns - max(f.stamp) > _SETTLED_S * 1e9]
    fresh = {label: rows[label] for label in settled}
    if fresh != known:
        # Without them the next look takes longer, and no more: a read-only cache may be used.
        with suppress(OSError):
            cache_dir.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(fresh).encode())
    return [rows[file.label][3] for file in files]
