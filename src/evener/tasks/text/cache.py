"""The cache of tokenised data: a folder for each result, written whole or not at all.

Several processes may use one cache at once. Of two that make the same, the first to finish is kept.
One that is killed leaves a folder that nobody uses, which a later one removes.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from evener.errors import DataError
from evener.files import blake2b, explaining, flush, publish_folder, remove, unique_suffix
from evener.tasks.text.documents import Note, ignore

_Content = TypeVar("_Content")

UNUSED_DAYS: Final = 30
"""What has not been used for so long is removed when something new is made."""

_ABANDONED_S: Final = 3600.0
"""An unfinished folder in which nothing was written for so long belongs to a killed process."""


def digest(value: Any) -> str:
    """Hash what JSON can hold (BLAKE2b, 128 bits, hexadecimal)."""
    return blake2b(json.dumps(value).encode()).hexdigest()


def load_or_make(
    folder: Path, load: Callable[[], _Content], make: Callable[[Path], None], on_note: Note
) -> _Content:
    """Load what a folder of the cache holds; make that first if it is missing or damaged.

    Args:
        folder: Where it lies in the cache, which is made if missing.
        load: Loads it; raises ``OSError`` or ``ValueError`` if it is damaged.
        make: Writes its files into the folder that it is given.
        on_note: Told, in a sentence, what is damaged, and what was removed from the cache.

    Raises:
        DataError: The cache cannot be read or written.
    """
    if (found := _load_whole(folder, load, on_note)) is not None:
        return found
    scratch = folder.with_name(f"{folder.name}.tmp-{unique_suffix()}")
    try:
        scratch.mkdir(parents=True)
        _remove_unused(folder.parent, on_note)
        make(scratch)
        for path in (*scratch.iterdir(), scratch):
            flush(path)
        # Not replaced if another process was first: it may be in use.
        if _load_whole(folder, load, ignore) is None:
            publish_folder(scratch, folder)
    except OSError as error:
        # Unless another process has published at this very moment.
        if _load_whole(folder, load, ignore) is None:
            raise DataError(
                f"tokenised data cannot be written to {folder.parent}: {error.strerror}. Name "
                "another cache folder, or make room there"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return load()


def _load_whole(folder: Path, load: Callable[[], _Content], note: Note) -> _Content | None:
    remedy = "give this user access to it, or name another folder with data.cache"
    with explaining(f"the cache of tokenised data {folder.parent}", remedy, DataError):
        is_there = folder.exists()
    if not is_there:
        return None
    try:
        content = load()
    except (OSError, ValueError) as error:
        note(f"{folder} is damaged ({error}); it is made again")
        return None
    with suppress(OSError):  # a read-only cache may be used as well
        os.utime(folder)
    return content


def _remove_unused(cache_dir: Path, note: Note) -> None:
    """Remove what is abandoned, and what nobody has used for ``UNUSED_DAYS``; links never are."""
    removed = []
    for path in (*cache_dir.glob("corpus-*"), *cache_dir.glob("tokenizer-*")):
        is_unfinished = ".tmp-" in path.name
        with suppress(OSError):  # another process may be removing it
            newest_s = max(part.stat().st_mtime for part in (path, *path.iterdir()))
            age_s = time.time() - newest_s
            if age_s > (_ABANDONED_S if is_unfinished else UNUSED_DAYS * 86_400):
                if path.is_symlink():
                    continue
                remove(path)
                removed += [] if is_unfinished else [path.name]
    if removed:
        note(
            f"removed from {cache_dir}, where nobody has used it for {UNUSED_DAYS} days: "
            f"{', '.join(sorted(removed))}"
        )
