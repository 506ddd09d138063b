"""Where a run's files go: one folder, the same for all ranks."""

from pathlib import Path

from evener.errors import CheckpointError, ConfigError
from evener.run.team import Team


def agree_on_folder(team: Team, parent: Path, name: str, *, resume: bool) -> Path:
    """Chooses the run folder; all ranks call it together.

    Args:
        team: The ranks.
        parent: Folder of runs.
        name: The run's name; a new run gets a number behind it where it is taken.
        resume: Take the folder as it is; it must hold a run.

    Returns:
        Rank 0's choice, made if missing.

    Raises:
        CheckpointError: There is no run to resume.
        ConfigError: The folder cannot be made.
    """
    folder = parent.absolute() / name
    if resume and not (folder / "checkpoints").is_dir():
        raise CheckpointError(
            f"{folder} is no run to resume: it has no checkpoints; check --out and --name, or "
            "start without --resume"
        )
    if team.rank == 0 and not resume:
        number = 2
        while (folder / "events.jsonl").exists() or (folder / "checkpoints").exists():
            folder = parent.absolute() / f"{name}-{number}"
            number += 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder {folder} cannot be made: {error}; choose another with --out"
            ) from None
    return Path(team.introduce({"folder": str(folder)})[0]["folder"])
