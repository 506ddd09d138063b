"""Where a run's files go: one folder, the same for all ranks. No torch here."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import final

from evener.closing import Closing
from evener.errors import CheckpointError, ConfigError
from evener.files import explaining, lock, open_regular

EVENTS = "events.jsonl"
SUMMARY = "summary.json"
CHECKPOINTS = "checkpoints"


def check_name(name: str) -> None:
    """Refuse a run's name that is not a plain folder name.

    Raises:
        ConfigError: It is empty, a path, or begins with a dot.
    """
    if not name or name.startswith(".") or Path(name).name != name or "\0" in name:
        raise ConfigError(
            f"the run's name is {name!r}; give a plain folder name, and choose where it lies with "
            "--out"
        )


def runs_of(parent: Path, name: str) -> list[Path]:
    """Return the folders of all runs of a name, the newest first.

    Raises:
        ConfigError: The folder of runs, or one of these, cannot be read.
    """
    parent = parent.absolute()
    numbered = re.compile(rf"{re.escape(name)}(?:-([2-9]|[1-9][0-9]+))?")
    remedy = "give this user access to it, or choose another folder with --out"
    with explaining(f"folder of runs {parent}", remedy, ConfigError):
        runs = [
            (int(match[1] or 1), folder)
            for folder in (parent.iterdir() if parent.is_dir() else ())
            if (match := numbered.fullmatch(folder.name)) and _holds_run(folder)
        ]
    return [folder for _, folder in sorted(runs, reverse=True)]


def find_events(run: Path) -> Path:
    """Return the first file of a run's events, from its folder or that file.

    Raises:
        ConfigError: The run does not exist.
    """
    path = (run if run.name == EVENTS else run / EVENTS).absolute()
    try:
        if path.exists():
            return path
    except OSError:
        return path  # reading it raises an error that names the cause
    inside = sorted(other.parent.name for other in path.parent.glob(f"*/{EVENTS}"))
    remedy = f"; the runs in it are {', '.join(inside[:5])}" if inside else ""
    raise ConfigError(
        f"{run} is not the folder of a run: it has no {EVENTS}{remedy}; give a folder such as "
        "runs/NAME"
    )


def claim_folder(parent: Path, name: str) -> Path:
    """Create the folder of a new run; a number is appended to a name that is in use.

    Its event file is created exclusively, so two runs that start at the same time get different
    folders.

    Raises:
        ConfigError: The folder cannot be created.
    """
    folder, number = parent.absolute() / name, 2
    while True:
        try:
            if not _holds_run(folder):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / EVENTS).touch(exist_ok=False)
                return folder
        except OSError as error:
            if not isinstance(error, FileExistsError) or not folder.is_dir():
                raise ConfigError(
                    f"the run folder {folder} cannot be made: {error}; choose another with --out "
                    "or --name"
                ) from None
        folder = folder.with_name(f"{name}-{number}")
        number += 1


@final
class FolderLock(Closing):
    """Prevents processes of other runs from writing to a run's folder.

    The main process of the run holds it. It is a kernel lock on the event file, so it ends with the
    process, and the next main process can take it. Workers of an elastic team share a lock on the
    folder itself, so that no other run takes it meanwhile. File systems without locks give no
    protection.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor: int | None = None
        self._shared: int | None = None

    def share(self) -> None:
        """Lock out other runs while this worker lives; idempotent."""
        if self._shared is None and sys.platform != "win32":
            with suppress(OSError):  # a worker on another machine may not see the folder
                descriptor = os.open(self._folder, os.O_RDONLY)
                if lock(descriptor, is_shared=True):
                    self._shared = descriptor
                else:  # another run is testing the lock at this moment
                    os.close(descriptor)

    def take(self) -> bool:
        """Take the lock unless another process or run has it; return whether it is held now.

        Raises:
            CheckpointError: The event file cannot be written.
        """
        if self._descriptor is not None or sys.platform == "win32":
            return True
        path = self._folder / EVENTS
        try:
            descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error}; remove it, or choose another folder"
            ) from None
        if not (lock(descriptor) and (self._shared is not None or self._has_no_workers())):
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def _has_no_workers(self) -> bool:
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            return lock(descriptor)
        finally:
            os.close(descriptor)

    def require(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: Another process holds it, or the event file cannot be written.
        """
        if not self.take():
            raise CheckpointError(
                f"{self._folder} is in use: its run has not ended; wait for its end, or stop it"
            )

    def close(self) -> None:
        """Release the locks of this process; idempotent."""
        for descriptor in (self._descriptor, self._shared):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._shared = None


def release_folder(folder: Path) -> None:
    """Remove a folder in which no run has begun, unless it holds other files."""
    with suppress(OSError):
        if (folder / EVENTS).stat().st_size == 0 and not (folder / CHECKPOINTS).exists():
            (folder / EVENTS).unlink()
            folder.rmdir()


def _holds_run(folder: Path) -> bool:
    return (folder / EVENTS).exists() or (folder / CHECKPOINTS).exists()
