"""How checkpoint folders appear and vanish: claimed, cleaned up, removed when old."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.checkpoint.manifest import MANIFEST_NAME, parse_name, step_name
from evener.files import unique_suffix


@contextmanager
def unfinished_folder(parent: Path, step: int) -> Iterator[Path]:
    """Make ``step-N.tmp-<pid>-<token>``, locked while its owner lives, removed unless renamed.

    The lock is the kernel's (``flock``): it ends with the process, however that ends, so another
    process can tell a folder that is being written from one that was left behind, even from inside
    another container, where process numbers mean nothing.

    Raises:
        OSError: The folder cannot be created.
    """
    while True:
        path = parent / f"{step_name(step)}.tmp-{unique_suffix()}"
        path.mkdir()
        # Between creation and lock, another process may have taken it for left behind.
        try:
            lock = _try_lock(path)
        except (BlockingIOError, FileNotFoundError):
            continue
        if path.exists():
            break
        _unlock(lock)
    try:
        yield path
    finally:
        # After a failure this also frees the disk; after publishing there is nothing left.
        shutil.rmtree(path, ignore_errors=True)
        _unlock(lock)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead writers left behind; touches only names that evener gives, and no links."""
    for path in list(folder.iterdir()):
        step, kind = parse_name(path.name) or (0, "")
        if path.is_symlink() or not path.is_dir():
            continue
        final = folder / step_name(step)
        if kind == "replaced" and not final.exists():
            path.rename(final)  # the writer was killed between its two renames
        elif kind == "replaced" and _has_manifest(final):
            shutil.rmtree(path, ignore_errors=True)
        elif kind == "tmp":
            try:
                lock = _try_lock(path)
            except (BlockingIOError, FileNotFoundError):
                continue  # it is being written, or another process cleans up
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                _unlock(lock)


def remove_old(folder: Path, keep_last: int, *, keep: Path) -> None:
    """Delete all but the newest ``keep_last`` checkpoints, never ``keep``.

    Folders without a manifest neither count nor are deleted: evener has not written them.

    Raises:
        OSError: A folder cannot be deleted.
    """
    found: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        step, kind = parse_name(path.name) or (0, "other")
        if not kind and not path.is_symlink() and _has_manifest(path):
            found.append((step, path))
    found.sort(reverse=True)
    for _, path in found[keep_last:]:
        if path != keep:
            # Renamed first, so that a deletion cut short leaves no half of a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{unique_suffix()}")
            path.rename(doomed)
            shutil.rmtree(doomed)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def _try_lock(folder: Path) -> int | None:
    """Lock a folder and return what holds the lock; ``None`` where folders cannot be locked.

    Without locks nothing is ever taken for left behind: garbage is better than a lost checkpoint.

    Raises:
        BlockingIOError: A live process has the lock.
        FileNotFoundError: The folder is gone.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # such as network file systems
        os.close(descriptor)
        return None
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
