"""Where a run's files go: one folder, the same for all ranks. No torch here."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from evener.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from evener.run.team import Team

EVENTS = "events.jsonl"
CHECKPOINTS = "checkpoints"


def check_name(name: str) -> None:
    """Refuses a run's name that is no plain folder name.

    Raises:
        ConfigError: It is empty, a path, or begins with a dot.
    """
    if not name or name.startswith(".") or Path(name).name != name or "\0" in name:
        raise ConfigError(
            f"the run's name is {name!r}; give a plain folder name, and choose where it lies with "
            "--out"
        )


def new_run(parent: Path, name: str) -> Path:
    """The folder of a new run: its name, with a number behind it where that is taken."""
    folder, number = parent.absolute() / name, 2
    while _holds_run(folder):
        folder = folder.with_name(f"{name}-{number}")
        number += 1
    return folder


def newest_run(parent: Path, name: str) -> Path:
    """The folder of the run that ``--resume`` goes on with: the last one of that name.

    Raises:
        CheckpointError: There is no run, or it has no checkpoint.
    """
    parent = parent.absolute()
    numbered = re.compile(rf"{re.escape(name)}(?:-([2-9]|[1-9][0-9]+))?")
    runs = [
        (int(match[1] or 1), folder)
        for folder in (parent.iterdir() if parent.is_dir() else ())
        if (match := numbered.fullmatch(folder.name)) and _holds_run(folder)
    ]
    folder = max(runs)[1] if runs else parent / name
    if not (folder / CHECKPOINTS).is_dir():
        raise CheckpointError(
            f"{folder} is no run to resume: it has no checkpoints; check --out and --name, or "
            "start without --resume"
        )
    return folder


def agree_on_folder(team: "Team", parent: Path, name: str, *, resume: bool) -> Path:
    """Chooses the run folder; all ranks call it together.

    Args:
        team: The ranks.
        parent: Folder of runs.
        name: The run's name.
        resume: Take the newest run of that name instead of a new one.

    Returns:
        Rank 0's choice, made if missing.

    Raises:
        CheckpointError: There is no run to resume.
        ConfigError: The folder cannot be made.
    """
    folder = newest_run(parent, name) if resume else new_run(parent, name)
    if team.rank == 0 and not resume:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder {folder} cannot be made: {error}; choose another with --out"
            ) from None
    return Path(team.introduce({"folder": str(folder)})[0]["folder"])


def _holds_run(folder: Path) -> bool:
    return (folder / EVENTS).exists() or (folder / CHECKPOINTS).exists()
