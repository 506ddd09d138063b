"""The cache of tokenised data: a folder for each result, written atomically.

Several processes may use one cache at once. If two make the same result, the last one is kept, and
processes that have opened the other one can still read its files.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from evener.errors import DataError
from evener.files import blake2b, flush, new_folder, remove
from evener.team.terminal import warn

_Content = TypeVar("_Content")

UNUSED_DAYS: Final = 30
"""Results that were not used for this time are removed when a new one is made."""


def digest(value: Any) -> str:
    """Hash a JSON value (BLAKE2b, 128 bits, hexadecimal)."""
    return blake2b(json.dumps(value).encode()).hexdigest()


def load_or_make(
    folder: Path, load: Callable[[], _Content], make: Callable[[Path], None]
) -> _Content:
    """Load a result from the cache; make it first if it is missing or damaged.

    Args:
        folder: The result's folder in the cache, which is created if missing.
        load: Loads it; raises ``ValueError`` or ``DataError`` if it is damaged.
        make: Writes its files into the given folder.

    Raises:
        DataError: The cache cannot be read or written.
    """
    try:
        content = load()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise DataError(
            f"the cache of tokenised data {folder.parent} cannot be read: {error}; give this user "
            "access to it, or name another folder with data.cache"
        ) from error
    except (ValueError, DataError) as error:
        warn(f"{folder} is damaged ({error}); it is made again")
    else:
        with suppress(OSError):  # the cache may be read-only
            os.utime(folder)
        return content
    try:
        with new_folder(folder) as fresh:
            _remove_unused(folder.parent)
            make(fresh)
            for path in (*fresh.iterdir(), fresh):
                flush(path)
    except OSError as error:
        raise DataError(
            f"tokenised data cannot be written to {folder.parent}: {error.strerror}. Name another "
            "folder with data.cache, or free disk space there"
        ) from error
    return load()


def _remove_unused(cache_dir: Path) -> None:
    """Remove results that were unused for ``UNUSED_DAYS``, or unfinished ones; never links."""
    for path in (*cache_dir.glob("corpus-*"), *cache_dir.glob("tokenizer-*")):
        with suppress(OSError):  # another process may be removing it
            age_s = time.time() - path.stat().st_mtime
            if age_s > UNUSED_DAYS * 86_400 and not path.is_symlink():
                remove(path)
