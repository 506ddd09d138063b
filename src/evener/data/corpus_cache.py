"""How a prepared corpus lies on disk: written once, by one process, and then only read.

A prepared corpus is a folder of the cache, named by what it was made of::

    corpus-<signature>/
      tokens.bin      little-endian uint16 or uint32: the documents, each followed by end-of-text
      documents.bin   little-endian uint64, per document: start, stop, hash of its label
      sources.json    what the source is: files with label, size, content hash
      manifest.json   counts, and size and hash of the others; written last

The signature covers the documents' labels and contents, the tokenizer and the format. The manifest
says how many records held no document. So that an unchanged corpus is recognised without reading
it, ``stamps-<hash of the paths>.json`` remembers the content hash of each file with the times at
which it was last modified.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from evener.data.documents import Document, DocumentSource, Note, Progress, Rejects
from evener.errors import DataError
from evener.files import open_for_reading, read_json
from evener.parsing import Fields, short

FORMAT: Final = 2
"""Raised when the same files would give other tokens or another layout."""

_MAX_UINT16_VOCABULARY: Final = 65536
_DTYPES: Final = ("<u2", "<u4")

UNUSED_DAYS: Final = 30
"""What has not been used for so long is removed when something new is made."""

BATCH_BYTES: Final = 1024 * 1024
"""So much text, or one document more, is tokenised at once."""

_ABANDONED_S: Final = 3600.0
"""A build that has written nothing for so long was killed."""


class TextTokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        ...

    @property
    def eos_id(self) -> int:
        """Id of the end-of-text token."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same text may get other ids."""
        ...

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        """Returns the ids of each text, 1-d integers, without special tokens."""
        ...


def digest(value: Any) -> str:
    """Hashes what JSON can hold (BLAKE2b, 128 bits, hexadecimal)."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def corpus_folder(cache_dir: Path, signature: str) -> Path:
    """Where a prepared corpus lies."""
    return cache_dir / f"corpus-{signature}"


def mark_used(folder: Path) -> None:
    """Notes in a folder's time that it is in use; a read-only cache may be used as well."""
    with suppress(OSError):
        os.utime(folder)


def remove_unused(cache_dir: Path, patterns: Sequence[str], note: Note) -> None:
    """Removes what nobody has marked as used for ``UNUSED_DAYS``.

    Args:
        cache_dir: The cache.
        patterns: Globs of what is looked at; links never are.
        note: Told what was removed.
    """
    removed = []
    for path in [path for pattern in patterns for path in cache_dir.glob(pattern)]:
        with suppress(OSError):  # another process may be removing it
            if path.is_symlink() or time.time() - path.stat().st_mtime < UNUSED_DAYS * 86_400:
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            removed.append(path.name)
    if removed:
        note(
            f"removed from {cache_dir}, where nobody has used it for {UNUSED_DAYS} days: "
            f"{', '.join(sorted(removed))}"
        )


def read_manifest(folder: Path, note: Note) -> dict[str, Any] | None:
    """Returns the manifest of a prepared corpus if that is whole."""
    if not folder.exists():
        return None
    try:
        manifest = Fields(read_json(folder / "manifest.json"))
        if manifest["format"] != FORMAT:
            raise ValueError("manifest.json is not of this format")
        _check_counts(manifest)
        files = manifest.fields("files")
        for name in files.values:
            expected = files.fields(name)
            stat = (folder / name).stat()
            if stat.st_size != expected["bytes"]:
                raise ValueError(f"{name} has {stat.st_size} bytes instead of {expected['bytes']}")
            # Untouched since it was written and hashed; else, as after a copy, it is read.
            if stat.st_mtime_ns != expected["mtime_ns"]:
                with open_for_reading(folder / name) as stream:
                    hashed = hashlib.file_digest(stream, _hasher).hexdigest()
                if hashed != expected["blake2b"]:
                    raise ValueError(f"{name} has another hash than when it was written")
    except (OSError, ValueError) as error:
        note(f"the prepared corpus {folder} is damaged ({error}); it is built again")
        return None
    return manifest.values


def _check_counts(manifest: Fields) -> None:
    """Check what the corpus is opened by: numbers that do not belong together would read beyond."""
    for key in ("num_bytes", "num_rejected", "eos_id"):
        manifest.whole(key)
    manifest.text("first_rejected")
    if manifest["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {short(manifest['dtype'])}, not one of {', '.join(_DTYPES)}")
    files = manifest.fields("files")
    row, token = 24, np.dtype(manifest["dtype"]).itemsize
    for name, size in (
        ("documents.bin", row * manifest.whole("num_documents")),
        ("tokens.bin", token * manifest.whole("num_tokens")),
    ):
        if files.fields(name).whole("bytes") != size:
            raise ValueError(f"{name} does not have the {size} bytes that its counts make")


class Build:
    """Writes a prepared corpus under a temporary name and then renames it.

    A build that is killed leaves a folder that nobody uses, which a later build removes. Of two
    that make the same corpus at once, the first to finish is kept.
    """

    def __init__(
        self, cache_dir: Path, tokenizer: TextTokenizer, note: Note, progress: Progress
    ) -> None:
        self._cache_dir = cache_dir
        self._tokenizer = tokenizer
        self._note = note
        self._progress = progress
        self._dtype = _DTYPES[tokenizer.vocab_size > _MAX_UINT16_VOCABULARY]

    def run(self, source: DocumentSource, rejects: Rejects, folder: Path) -> dict[str, Any]:
        """Tokenises ``source`` into ``folder`` and returns the manifest.

        Raises:
            DataError: The source is unreadable, it holds no text, or the cache cannot be written.
        """
        scratch = self._cache_dir / f"building-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            remove_unused(self._cache_dir, ("corpus-*", "stamps-*.json"), self._note)
            scratch.mkdir()
            manifest = self._write(source, rejects, scratch)
            self._install(scratch, folder)
        except OSError as error:
            raise DataError(
                f"the tokenised text cannot be written to {self._cache_dir}: {error.strerror}. "
                f"Name another cache folder, or make room there"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return manifest

    def _write(self, source: DocumentSource, rejects: Rejects, scratch: Path) -> dict[str, Any]:
        counts = {"num_documents": 0, "num_bytes": 0, "num_tokens": 0}
        with (
            _HashedFile(scratch / "tokens.bin") as tokens,
            _HashedFile(scratch / "documents.bin") as documents,
            _HashedFile(scratch / "sources.json") as sources,
        ):
            for document, ids in self._encoded(source, rejects):
                tokens.write(ids.tobytes())
                start, counts["num_tokens"] = counts["num_tokens"], counts["num_tokens"] + len(ids)
                row = np.array([start, counts["num_tokens"], _label_hash(document)], "<u8")
                documents.write(row.tobytes())
                counts["num_documents"] += 1
                counts["num_bytes"] += document.text_bytes
            if not counts["num_documents"]:
                what = f" (the first of {rejects.count}: {rejects.first})" if rejects.count else ""
                raise DataError(f"{source.name}: there is no text in it{what}. Give some text")
            sources.write(json.dumps(source.identity).encode())
        manifest = {
            "format": FORMAT,
            "tokenizer": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "dtype": self._dtype,
            **counts,
            "num_rejected": rejects.count,
            "first_rejected": rejects.first,
            "files": {file.path.name: file.description for file in (tokens, documents, sources)},
        }
        with _HashedFile(scratch / "manifest.json") as last:
            last.write(json.dumps(manifest, indent=1).encode())
        return manifest

    def _encoded(
        self, source: DocumentSource, rejects: Rejects
    ) -> Iterator[tuple[Document, NDArray[Any]]]:
        """Yields the documents in their order; ``BATCH_BYTES`` of them go to the tokenizer."""
        batch: list[Document] = []
        num_bytes = 0
        for document in source.documents(rejects, note=self._note, progress=self._progress):
            batch.append(document)
            num_bytes += document.text_bytes
            if num_bytes >= BATCH_BYTES:
                yield from self._encode(batch)
                batch, num_bytes = [], 0
        yield from self._encode(batch)

    def _encode(self, batch: Sequence[Document]) -> Iterator[tuple[Document, NDArray[Any]]]:
        texts = [document.text for document in batch]
        for document, ids in zip(batch, self._tokenizer.encode_batch(texts), strict=True):
            yield document, self._closed(ids)

    def _closed(self, ids: NDArray[Any]) -> NDArray[Any]:
        """The ids with end-of-text, as they are written."""
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= self._tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gives ids from {ids.min()} to {ids.max()}, but its vocab_size is "
                f"{self._tokenizer.vocab_size}: use the tokenizer files that belong together"
            )
        document = np.empty(len(ids) + 1, self._dtype)
        document[:-1] = ids
        document[-1] = self._tokenizer.eos_id
        return document

    def _install(self, scratch: Path, folder: Path) -> None:
        _sync_folder(scratch)
        for _ in range(3):
            try:
                scratch.rename(folder)
            except OSError as error:
                if not folder.exists():
                    raise
                # Another process was first, or what is there is damaged.
                if read_manifest(folder, lambda _: None) is not None:
                    return
                failure = error
                aside = scratch.with_name(f"{scratch.name}-replaced")
                with suppress(FileNotFoundError):
                    folder.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                _sync_folder(folder.parent)
                return
        raise failure

    def _remove_abandoned(self) -> None:
        for path in self._cache_dir.glob("building-*"):
            with suppress(OSError):  # its owner may be removing it
                newest = max(part.stat().st_mtime for part in (path, *path.iterdir()))
                if time.time() - newest > _ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)


def _label_hash(document: Document) -> int:
    name = document.label.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _hasher() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=16)


class _HashedFile:
    """A file that is hashed as it is written, and on disk when its block has been left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.description: dict[str, int | str] = {}
        self._hasher = _hasher()

    def __enter__(self) -> Self:
        self._stream = self.path.open("xb")
        return self

    def write(self, content: bytes) -> None:
        self._hasher.update(content)
        self._stream.write(content)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stream:
            if kind is not None:
                return
            self._stream.flush()
            os.fsync(self._stream.fileno())
            stat = os.fstat(self._stream.fileno())
        self.description = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "blake2b": self._hasher.hexdigest(),
        }


def _sync_folder(folder: Path) -> None:
    """Makes a rename or new names in ``folder`` survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
