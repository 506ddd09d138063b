"""How a prepared corpus lies on disk: written once, by one process, and then only read.

A prepared corpus is a folder of the cache, named by what it was made of::

    corpus-<signature>/
      tokens.bin      little-endian uint16 or uint32: the documents, each followed by end-of-text
      documents.bin   little-endian uint64, per document: start, stop, hash of its label
      sources.json    the files: label, size, content hash
      manifest.json   counts, and size and hash of the others; written last

The signature covers the files' labels and contents, the tokenizer and the format. So that an
unchanged corpus is recognised without reading it, ``stamps-<hash of the paths>.json`` remembers the
content hash of each file with the times at which it was last modified.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from evener.data.sources import SourceFile, read_documents
from evener.errors import DataError

Progress = Callable[[int, int], None]
Note = Callable[[str], None]

FORMAT: Final = 1
"""Raised when the same files would give other tokens or another layout."""

_MAX_UINT16_VOCABULARY: Final = 65536

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

    def encode(self, text: str, /) -> NDArray[Any]:
        """Returns the ids of ``text``, 1-d integers, without special tokens."""
        ...


def digest(value: Any) -> str:
    """Hashes what JSON can hold (BLAKE2b, 128 bits, hexadecimal)."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def read_manifest(folder: Path, note: Note) -> dict[str, Any] | None:
    """Returns the manifest of a prepared corpus if that is whole."""
    if not folder.exists():
        return None
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
        for name, expected in manifest["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != expected["bytes"]:
                raise ValueError(f"{name} has {stat.st_size} bytes instead of {expected['bytes']}")
            # Untouched since it was written and hashed; else, as after a copy, it is read.
            if stat.st_mtime_ns != expected["mtime_ns"]:
                with (folder / name).open("rb") as stream:
                    hashed = hashlib.file_digest(stream, _hasher).hexdigest()
                if hashed != expected["blake2b"]:
                    raise ValueError(f"{name} has another hash than when it was written")
        if manifest["format"] != FORMAT or not {"tokens.bin", "documents.bin"} <= set(
            manifest["files"]
        ):
            raise ValueError("manifest.json is not of this format")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        note(f"the prepared corpus {folder} is damaged ({error}); it is built again")
        return None
    return manifest


class Build:
    """Writes a prepared corpus under a temporary name and then renames it.

    A build that is killed leaves a folder that nobody uses, which a later build removes. Of two
    that make the same corpus at once, the first to finish is kept.
    """

    def __init__(
        self,
        cache_dir: Path,
        tokenizer: TextTokenizer,
        note: Note,
        progress: Progress,
        *,
        skip_binary: bool,
    ) -> None:
        self._cache_dir = cache_dir
        self._tokenizer = tokenizer
        self._note = note
        self._progress = progress
        self._skip_binary = skip_binary
        self._dtype = "<u2" if tokenizer.vocab_size <= _MAX_UINT16_VOCABULARY else "<u4"

    def run(
        self, files: Sequence[SourceFile], hashes: Sequence[str], folder: Path
    ) -> dict[str, Any]:
        """Tokenises ``files`` into ``folder`` and returns the manifest.

        Raises:
            DataError: A file is unreadable, all are empty, or the cache cannot be written.
        """
        scratch = self._cache_dir / f"building-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._cache_dir.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            scratch.mkdir()
            manifest = self._write(files, hashes, scratch)
            self._install(scratch, folder)
        except OSError as error:
            raise DataError(
                f"the tokenised text cannot be written to {self._cache_dir}: {error.strerror}. "
                f"Name another cache folder, or make room there"
            ) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return manifest

    def _write(
        self, files: Sequence[SourceFile], hashes: Sequence[str], scratch: Path
    ) -> dict[str, Any]:
        counts = {"num_documents": 0, "num_bytes": 0, "num_tokens": 0}
        rows = [[file.label, file.size, h] for file, h in zip(files, hashes, strict=True)]
        with (
            _HashedFile(scratch / "tokens.bin") as tokens,
            _HashedFile(scratch / "documents.bin") as documents,
            _HashedFile(scratch / "sources.json") as sources,
        ):
            for label, num_bytes, ids in self._documents(files, hashes):
                tokens.write(ids.tobytes())
                start, counts["num_tokens"] = counts["num_tokens"], counts["num_tokens"] + len(ids)
                name = label.encode("utf-8", "surrogateescape")
                label_hash = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
                row = np.array([start, counts["num_tokens"], label_hash], "<u8")
                documents.write(row.tobytes())
                counts["num_documents"] += 1
                counts["num_bytes"] += num_bytes
            if not counts["num_documents"]:
                raise DataError(
                    f"{files[0].path}{' and the other files' if len(files) > 1 else ''}: there is "
                    f"no text in them. Name files that hold text"
                )
            sources.write(json.dumps(rows).encode())
        manifest = {
            "format": FORMAT,
            "tokenizer": self._tokenizer.fingerprint,
            "vocab_size": self._tokenizer.vocab_size,
            "eos_id": self._tokenizer.eos_id,
            "dtype": self._dtype,
            **counts,
            "files": {file.path.name: file.description for file in (tokens, documents, sources)},
        }
        with _HashedFile(scratch / "manifest.json") as last:
            last.write(json.dumps(manifest, indent=1).encode())
        return manifest

    def _documents(
        self, files: Sequence[SourceFile], hashes: Sequence[str]
    ) -> Iterator[tuple[str, int, NDArray[Any]]]:
        """Yields (label, bytes of text, ids with end-of-text) of all that hold text."""
        total, done = sum(file.size for file in files), 0
        skipped: dict[str, list[str]] = {"empty": [], "the same as another": [], "binary": []}

        def on_binary(file: SourceFile) -> None:
            skipped["binary"].append(file.label)

        seen: set[str] = set()
        for file, hashed in zip(files, hashes, strict=True):
            if hashed in seen:
                skipped["the same as another"].append(file.label)
                done += file.size
                continue
            seen.add(hashed)
            has_text, before = False, done
            for document in read_documents(
                file,
                hashed,
                alone=len(files) == 1,
                on_binary=on_binary if self._skip_binary else None,
            ):
                if document.text and not document.text.isspace():
                    has_text = True
                    yield document.label, document.num_bytes, self._encode(document.text)
                done += document.num_bytes
                self._progress(done, total)
            if not has_text and file.label not in skipped["binary"]:
                skipped["empty"].append(file.label)
            done = before + file.size
        self._progress(total, total)
        for what, labels in skipped.items():
            if labels:
                self._note(f"left out because {what}: {len(labels)} files, {', '.join(labels[:3])}")

    def _encode(self, text: str) -> NDArray[Any]:
        ids = self._tokenizer.encode(text)
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
