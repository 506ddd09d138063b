"""The cache of tokenised data: a folder for each result, written whole or not at all.

Several processes may use one cache at once. Of two that make the same, the last to finish is kept:
whoever has opened the other one keeps its files.
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
"""What has not been used for so long is removed when something new is made."""


def digest(value: Any) -> str:
    """Hash what JSON can hold (BLAKE2b, 128 bits, hexadecimal)."""
    return blake2b(json.dumps(value).encode()).hexdigest()


def load_or_make(
    folder: Path, load: Callable[[], _Content], make: Callable[[Path], None]
) -> _Content:
    """Load what a folder of the cache holds; make that first if it is missing or damaged.

    Args:
        folder: Where it is in the cache, which is made if missing.
        load: Loads it; raises ``ValueError`` or ``DataError`` if it is damaged.
        make: Writes its files into the folder that it is given.

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
        with suppress(OSError):  # a read-only cache may be used as well
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
            "folder with data.cache, or make room there"
        ) from error
    return load()


def _remove_unused(cache_dir: Path) -> None:
    """Remove what nobody has used for ``UNUSED_DAYS``, or has left unfinished; never links."""
    for path in (*cache_dir.glob("corpus-*"), *cache_dir.glob("tokenizer-*")):
        with suppress(OSError):  # another process may be removing it
            age_s = time.time() - path.stat().st_mtime
            if age_s > UNUSED_DAYS * 86_400 and not path.is_symlink():
                remove(path)
