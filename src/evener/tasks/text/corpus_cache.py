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
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from evener.errors import DataError
from evener.files import (
    blake2b,
    explaining,
    flush,
    hash_file,
    publish_folder,
    read_json,
    remove,
    unique_suffix,
    write_file,
)
from evener.parsing import Fields, short
from evener.tasks.text.documents import Document, DocumentSource, Note, Progress, Rejects, ignore

FORMAT: Final = 2
"""Raised when the same files would give other tokens or another layout."""

_MAX_UINT16_VOCABULARY: Final = 65536
_DTYPES: Final = ("<u2", "<u4")
_TOKENS: Final = "tokens.bin"
_DOCUMENTS: Final = "documents.bin"

COUNTS: Final = ("num_documents", "num_bytes", "num_tokens", "num_rejected")
"""Whole numbers of a manifest that describe a corpus."""

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
        """Return the ids of each text, 1-d integers, without special tokens."""
        ...


def digest(value: Any) -> str:
    """Hash what JSON can hold (BLAKE2b, 128 bits, hexadecimal)."""
    return blake2b(json.dumps(value).encode()).hexdigest()


def corpus_folder(cache_dir: Path, signature: str) -> Path:
    """Where a prepared corpus lies."""
    return cache_dir / f"corpus-{signature}"


def is_cached(path: Path) -> bool:
    """Return whether something is in the cache.

    Raises:
        DataError: The cache cannot be read.
    """
    remedy = "give this user access to it, or name another folder with data.cache"
    with explaining(f"the cache of tokenised data {path.parent}", remedy, DataError):
        return path.exists()


def mark_used(folder: Path) -> None:
    """Note in a folder's time that it is in use; a read-only cache may be used as well."""
    with suppress(OSError):
        os.utime(folder)


def remove_unused(cache_dir: Path, patterns: Sequence[str], note: Note) -> None:
    """Remove what nobody has marked as used for ``UNUSED_DAYS``.

    Args:
        cache_dir: The cache.
        patterns: Globs of what is looked at; links never are.
        note: Told what was removed.
    """
    removed = _remove_older(cache_dir, patterns, UNUSED_DAYS * 86_400)
    if removed:
        note(
            f"removed from {cache_dir}, where nobody has used it for {UNUSED_DAYS} days: "
            f"{', '.join(sorted(removed))}"
        )


def _remove_older(cache_dir: Path, patterns: Sequence[str], seconds: float) -> list[str]:
    """Remove what has not been touched for so long, and return the names."""
    removed = []
    for path in [path for pattern in patterns for path in cache_dir.glob(pattern)]:
        with suppress(OSError):  # another process may be removing it
            parts = [path, *(path.iterdir() if path.is_dir() else ())]
            newest = max(part.stat().st_mtime for part in parts)
            if not path.is_symlink() and time.time() - newest > seconds:
                remove(path)
                removed.append(path.name)
    return removed


def read_manifest(folder: Path, note: Note) -> dict[str, Any] | None:
    """Return the manifest of a prepared corpus if that is whole."""
    if not is_cached(folder):
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
            untouched = stat.st_mtime_ns == expected["mtime_ns"]
            if not untouched and hash_file(folder / name, blake2b) != expected["blake2b"]:
                raise ValueError(f"{name} has another hash than when it was written")
    except (OSError, ValueError) as error:
        note(f"the prepared corpus {folder} is damaged ({error}); it is built again")
        return None
    return manifest.values


def _check_counts(manifest: Fields) -> None:
    """Check what the corpus is opened by: numbers that do not belong together would read beyond."""
    counts = {key: manifest.whole(key) for key in (*COUNTS, "eos_id")}
    manifest.text("first_rejected")
    if manifest["dtype"] not in _DTYPES:
        raise ValueError(f"dtype is {short(manifest['dtype'])}, not one of {', '.join(_DTYPES)}")
    files = manifest.fields("files")
    row, token = 24, np.dtype(manifest["dtype"]).itemsize
    for name, size in (
        (_DOCUMENTS, row * counts["num_documents"]),
        (_TOKENS, token * counts["num_tokens"]),
    ):
        if files.fields(name).whole("bytes") != size:
            raise ValueError(f"{name} does not have the {size} bytes that its counts make")


def build_corpus(
    folder: Path,
    source: DocumentSource,
    tokenizer: TextTokenizer,
    rejects: Rejects,
    *,
    note: Note,
    progress: Progress,
) -> dict[str, Any]:
    """Tokenise ``source`` under a temporary name, rename that, and return the manifest.

    A build that is killed leaves a folder that nobody uses, which a later build removes. Of two
    that make the same corpus at once, the first to finish is kept.

    Args:
        folder: Where the corpus is to lie, in the cache.
        source: Gives the documents.
        tokenizer: Turns text into ids.
        rejects: Told of records that hold no document.
        note: Told what was removed from the cache or left out.
        progress: Told how much has been read.

    Raises:
        DataError: The source is unreadable, it holds no text, or the cache cannot be written.
    """
    cache_dir = folder.parent
    scratch = cache_dir / f"building-{unique_suffix()}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_older(cache_dir, ("building-*",), _ABANDONED_S)
        remove_unused(cache_dir, ("corpus-*", "stamps-*.json"), note)
        scratch.mkdir()
        documents = source.documents(rejects, note=note, progress=progress)
        dtype = _DTYPES[tokenizer.vocab_size > _MAX_UINT16_VOCABULARY]
        counts = _write_documents(scratch, _encoded(documents, tokenizer, dtype))
        if not counts["num_documents"]:
            what = f" (the first of {rejects.count}: {rejects.first})" if rejects.count else ""
            raise DataError(f"{source.name}: there is no text in it{what}. Give some text")
        (scratch / "sources.json").write_text(json.dumps(source.identity))
        manifest = {
            "format": FORMAT,
            "tokenizer": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "dtype": dtype,
            **counts,
            "num_rejected": rejects.count,
            "first_rejected": rejects.first,
            "files": {path.name: _flushed_record(path) for path in scratch.iterdir()},
        }
        write_file(scratch / "manifest.json", json.dumps(manifest, indent=1).encode())
        _install(scratch, folder)
    except OSError as error:
        raise DataError(
            f"the tokenised text cannot be written to {cache_dir}: {error.strerror}. "
            f"Name another cache folder, or make room there"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _write_documents(
    scratch: Path, encoded: Iterator[tuple[Document, NDArray[Any]]]
) -> dict[str, int]:
    num_documents = num_bytes = num_tokens = 0
    with (scratch / _TOKENS).open("xb") as tokens, (scratch / _DOCUMENTS).open("xb") as rows:
        for document, ids in encoded:
            tokens.write(ids.tobytes())
            start, num_tokens = num_tokens, num_tokens + len(ids)
            rows.write(np.array([start, num_tokens, _label_hash(document)], "<u8").tobytes())
            num_documents += 1
            num_bytes += document.text_bytes
    return {"num_documents": num_documents, "num_bytes": num_bytes, "num_tokens": num_tokens}


def _encoded(
    documents: Iterator[Document], tokenizer: TextTokenizer, dtype: str
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
    """Take documents until they have ``BATCH_BYTES``; none are left when it is empty."""
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        batch.append(document)
        num_bytes += document.text_bytes
        if num_bytes >= BATCH_BYTES:
            break
    return batch


def _flushed_record(path: Path) -> dict[str, int | str]:
    """Force a file onto the disk, and return what the manifest says of it."""
    flush(path)
    stat = path.stat()
    return {
        "bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "blake2b": hash_file(path, blake2b),
    }


def _install(scratch: Path, folder: Path) -> None:
    flush(scratch)
    for is_last in (False, False, True):
        if read_manifest(folder, ignore) is not None:
            return  # another process was first
        try:
            publish_folder(scratch, folder)
        except OSError:  # perhaps another process publishes at this moment
            if is_last or not scratch.exists():
                raise
        else:
            return


def _label_hash(document: Document) -> int:
    name = document.label.encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
