"""List the runs that a dashboard shows, and find the folder of a run by its name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evener.config.folders import EVENTS
from evener.errors import ConfigError

MOST_RUNS: Final = 500
"""The most runs in the list: the newest."""


@dataclass(frozen=True, slots=True)
class RunIndex:
    """A folder of runs, or one run in it.

    Attributes:
        root: The folder.
        only: Name of the one run; ``None`` for all.
    """

    root: Path
    only: str | None = None

    @classmethod
    def at(cls, path: Path) -> "RunIndex":
        """Return the index for a user's path: a run folder, its event file, or a folder of runs.

        Raises:
            ConfigError: The folder does not exist.
        """
        folder = path.parent if path.name == EVENTS else path
        if not folder.is_dir():
            raise ConfigError(f"{path} is not a folder; give one such as runs, or runs/NAME")
        folder = folder.resolve()
        if (folder / EVENTS).exists():
            return cls(folder.parent, folder.name)
        return cls(folder)

    def names(self) -> list[str]:
        """Return the names of the runs, the most recently written first."""
        found = sorted(self._found(), reverse=True)
        return [name for _, name in found[:MOST_RUNS]]

    def find(self, name: str) -> Path | None:
        """Return the folder of a run; ``None`` if no run here has that name.

        A name is one component of a path. Symbolic links that lead out of the root are not
        followed, nor are links to files.
        """
        if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            return None
        if self.only is not None and name != self.only:
            return None
        try:
            folder = (self.root / name).resolve(strict=True)
            return folder if folder.parent == self.root and _is_run(folder) else None
        except (OSError, ValueError, RuntimeError):
            return None

    def _found(self) -> Iterator[tuple[float, str]]:
        try:
            names = [self.only] if self.only else [path.name for path in self.root.iterdir()]
        except OSError:
            return
        for name in names:
            if folder := self.find(name):
                try:
                    yield (folder / EVENTS).stat().st_mtime, name
                except OSError:  # removed meanwhile
                    continue


def _is_run(folder: Path) -> bool:
    events = folder / EVENTS
    return events.is_file() and not events.is_symlink()
