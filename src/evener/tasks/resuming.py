"""Find the checkpoint that a run resumes from, and whether the run is finished."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from evener.checkpoint import Checkpoint, find_newest, open_checkpoint
from evener.config.folders import CHECKPOINTS, EVENTS, FolderLock, claim_folder, runs_of
from evener.config.options import TaskOptions
from evener.config.runs import JobConfig
from evener.engine.team import Team
from evener.errors import CheckpointError, ConfigError
from evener.observe.following import newest_event
from evener.tasks.run_changes import RUN

RUN_FOLDER: Final = "run folder"
"""Name of the fact by which workers that join an elastic team learn the run's folder."""


def find_run(
    team: Team,
    options: TaskOptions,
    config: JobConfig,
    *,
    say: Callable[[str], None],
) -> tuple[Path, Checkpoint | None]:
    """Return the run's folder, and the checkpoint that it resumes from, if any.

    All ranks call it together; a rank that joins a team calls it alone. If the team has no member
    left, the first rank that joins chooses, and the others receive its choice.

    Args:
        team: The ranks.
        options: How the run was started.
        config: What the user asked for.
        say: See ``choose_checkpoint``.

    Raises:
        CheckpointError: There is nothing to resume from, or ranks see different checkpoints.
        ConfigError: The folder cannot be created, or is missing on this machine.
    """
    parent, name = options.out, str(config.name)
    if team.membership.is_joining and (folder := _hear_folder(team)) is not None:
        return folder, None
    if options.resume:
        found = choose_checkpoint(team, runs_of(parent, name), say=say)
        if found is None:
            raise CheckpointError(
                f"no run {name!r} in {parent.absolute()} holds a complete checkpoint to resume "
                "from; start without --resume"
            )
        return found
    if team.is_elastic:
        asked = config.model_dump(mode="json")
        unfinished = find_unfinished(parent, name, asked) if team.is_first else []
        found = choose_checkpoint(team, unfinished, say=say)
        if found is not None:
            say(
                f"{found[0]} was started in the same way and has not been completed: it continues "
                f"from {found[1].path.name}; to begin another run, give another --name"
            )
            return found
    made = str(claim_folder(parent, name)) if team.is_first else ""
    return Path(team.introduce(made)[0]), None


def _hear_folder(team: Team) -> Path | None:
    """Return the folder of the run that this rank joins; ``None`` if no member knows it."""
    folder = team.membership.described(RUN_FOLDER, team.comm.timeout_s)
    if folder is None:
        return None
    if not Path(folder).is_dir():
        raise ConfigError(
            f"the run's folder {folder} is not on this machine; put --out on storage that every "
            "worker sees"
        )
    return Path(folder)


def choose_checkpoint(
    team: Team,
    folders: Iterable[Path],
    *,
    say: Callable[[str], None],
) -> tuple[Path, Checkpoint] | None:
    """Find the newest run that has a complete checkpoint; all ranks call it together.

    Args:
        team: The ranks.
        folders: Folders of the runs, the newest first; only the first rank's list counts.
        say: Called with a sentence for each newer run or checkpoint that cannot be used.

    Returns:
        The run's folder, and its newest complete checkpoint; ``None`` if there is none.

    Raises:
        CheckpointError: Ranks see different checkpoints.
    """
    own = _newest_of_any(folders, say) if team.is_first else None
    found = team.introduce(own and [str(own[0]), own[1].path.name])[0]
    if found is None:
        return None
    folder, step = Path(found[0]), found[1]
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = own[1] if own else open_checkpoint(folder / CHECKPOINTS / step)
        outcome = ["", hashlib.sha256(checkpoint.manifest.to_bytes()).hexdigest()]
    except CheckpointError as error:
        outcome = [str(error), ""]
    answers = team.introduce(outcome)
    for rank, (refused, content) in enumerate(answers):
        if refused or content != answers[0][1]:
            raise CheckpointError(
                f"rank {rank} does not see the {step} that rank 0 has chosen "
                f"({refused or 'its content differs'}); put {folder / CHECKPOINTS} on "
                "storage that every rank sees"
            )
    assert checkpoint is not None
    return folder, checkpoint


def find_unfinished(parent: Path, name: str, config: Mapping[str, Any]) -> list[Path]:
    """Return the folder of the newest run of a name, if an elastic team has to continue it.

    Such a run was started with the same configuration, has a complete checkpoint, was not
    completed, and is not locked by another process.

    Args:
        parent: Folder of runs.
        name: The run's name.
        config: The user's configuration, in JSON.
    """
    for folder in runs_of(parent, name)[:1]:
        with FolderLock(folder) as lock, suppress(CheckpointError):
            if lock.take() and not _was_completed(folder):
                checkpoint = find_newest(folder / CHECKPOINTS)
                saved = checkpoint.document(RUN) if checkpoint is not None else None
                if isinstance(saved, dict) and saved.get("config") == config:
                    return [folder]
    return []


def _newest_of_any(
    folders: Iterable[Path], say: Callable[[str], None]
) -> tuple[Path, Checkpoint] | None:
    passed_over: list[str] = []
    for folder in folders:
        checkpoint = find_newest(
            folder / CHECKPOINTS,
            lambda path, why: say(f"skipped checkpoint {path}: {why}"),
        )
        if checkpoint is not None:
            if passed_over:
                say(
                    f"continuing with {folder}: no complete checkpoint was found in "
                    f"{', '.join(passed_over)}"
                )
            return folder, checkpoint
        passed_over.append(folder.name)
    return None


def is_finished(team: Team, folder: Path, window: int, results: Sequence[str] = ()) -> bool:
    """Return whether a run was completed, at ``window``; all ranks call it together.

    Args:
        team: The ranks.
        folder: The run folder, which the first rank reads.
        window: Number of windows of the run.
        results: Its result files; a full disk may have prevented them.
    """
    finished = False
    if team.is_first:
        is_written = all((folder / name).exists() for name in results)
        finished = is_written and _was_completed(folder, window)
    return bool(team.introduce(finished)[0])


def _was_completed(folder: Path, window: int | None = None) -> bool:
    """Return whether the last event of a run is its end, at ``window`` if that is given."""
    last = newest_event(folder / EVENTS) or {}
    is_end = [last.get("type"), last.get("reason")] == ["run_finished", "completed"]
    return is_end and window in (None, last["window"])
