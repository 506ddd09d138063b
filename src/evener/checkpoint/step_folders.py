"""How checkpoint folders appear and vanish: claimed, published, tidied, removed when old."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evener.checkpoint.manifest import parse_name, step_name
from evener.checkpoint.reader import read_manifest
from evener.errors import CheckpointError
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


def tidy(folder: Path) -> None:
    """Remove what dead writers left behind; touches only names that evener gives, and no links."""
    for path in list(folder.iterdir()):
        step, kind = parse_name(path.name) or (0, "")
        if path.is_symlink() or not path.is_dir():
            continue
        if kind == "replaced":
            _settle_replaced(path, folder / step_name(step))
        elif kind == "tmp":
            try:
                lock = _try_lock(path)
            except (BlockingIOError, FileNotFoundError):
                continue  # it is being written, or somebody else tidies
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                _unlock(lock)


def _settle_replaced(replaced: Path, final: Path) -> None:
    """Finish a replacement that was cut short, in whichever direction it can be finished."""
    if not final.exists():
        replaced.rename(final)
    elif _is_whole(final):
        # Else the one that was moved aside may be the only good one: find_newest knows it.
        shutil.rmtree(replaced, ignore_errors=True)


def remove_old(folder: Path, keep_last: int, *, keep: Path) -> None:
    """Delete all but the newest ``keep_last`` checkpoints, never ``keep``.

    Folders that are not whole (judged by manifest and sizes) neither count nor are deleted: they
    may be somebody else's.

    Raises:
        OSError: A folder cannot be deleted.
    """
    whole: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        step, kind = parse_name(path.name) or (0, "other")
        if not kind and not path.is_symlink() and _is_whole(path):
            whole.append((step, path))
    whole.sort(reverse=True)
    for _, path in whole[keep_last:]:
        if path != keep:
            # Renamed first, so that a deletion cut short leaves no half of a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{unique_suffix()}")
            path.rename(doomed)
            shutil.rmtree(doomed)


def _is_whole(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


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
