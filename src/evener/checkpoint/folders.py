"""How checkpoint folders appear and vanish: claimed, published, tidied, removed when old."""

import os
import secrets
import shutil
import sys
from pathlib import Path
from types import TracebackType

from evener.checkpoint.layout import (
    is_unfinished_name,
    parse_replaced_name,
    parse_step_name,
    step_name,
)
from evener.checkpoint.reader import read_manifest
from evener.errors import CheckpointError


class UnfinishedFolder:
    """A new folder for one step, locked while its owner lives, removed unless it was renamed.

    The lock is the kernel's (``flock``): it ends with the process, however that ends, so another
    process can tell a folder that is being written from one that was left behind, even from inside
    another container, where process numbers mean nothing.
    """

    def __init__(self, parent: Path, step: int) -> None:
        """Create ``step-N.tmp-<pid>-<token>`` in ``parent``.

        Raises:
            OSError: The folder cannot be created.
        """
        while True:
            self.path = parent / f"{step_name(step)}.tmp-{_unique()}"
            self.path.mkdir()
            # Between creation and lock, another process may have taken it for left behind.
            try:
                self._lock = _try_lock(self.path)
            except (BlockingIOError, FileNotFoundError):
                continue
            if self.path.exists():
                return
            _unlock(self._lock)

    def __enter__(self) -> "UnfinishedFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a failure this also frees the disk; after publishing there is nothing left.
        shutil.rmtree(self.path, ignore_errors=True)
        _unlock(self._lock)


def flush(path: Path) -> None:
    """Force a file, or the entries of a folder, onto the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(unfinished: Path, final: Path) -> None:
    """Rename a whole folder to its final name, also when there is one of that name already.

    That one is moved aside first and deleted last: at any moment one of the two is found by
    ``find_newest``.
    """
    replaced: Path | None = None
    if os.path.lexists(final):  # a link that leads nowhere is in the way, too
        replaced = final.with_name(f"{final.name}.replaced-{_unique()}")
        final.rename(replaced)
    unfinished.rename(final)
    flush(final.parent)
    if replaced is None:
        return
    if replaced.is_dir() and not replaced.is_symlink():
        shutil.rmtree(replaced, ignore_errors=True)  # what is left, the next writer tidies
    else:
        replaced.unlink(missing_ok=True)


def tidy(folder: Path) -> None:
    """Remove what dead writers left behind; touches only names that evener gives, and no links."""
    for path in list(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        step = parse_replaced_name(path.name)
        if step is not None:
            _settle_replaced(path, folder / step_name(step))
        elif is_unfinished_name(path.name):
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
        return
    try:
        read_manifest(final)
    except CheckpointError:
        return  # the one that was moved aside may be the only good one: find_newest knows it
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
        step = parse_step_name(path.name)
        if step is None or path.is_symlink():
            continue
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        whole.append((step, path))
    whole.sort(reverse=True)
    for _, path in whole[keep_last:]:
        if path != keep:
            # Renamed first, so that a deletion cut short leaves no half of a checkpoint.
            doomed = path.with_name(f"{path.name}.tmp-{_unique()}")
            path.rename(doomed)
            shutil.rmtree(doomed)


def _unique() -> str:
    return f"{os.getpid()}-{secrets.token_hex(4)}"


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
