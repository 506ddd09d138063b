"""Which checkpoint a run resumes from, and whether anything of the run is left to do."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from evener.checkpoint import Checkpoint, find_newest, open_checkpoint
from evener.config.folders import CHECKPOINTS, EVENTS, runs_of
from evener.engine.team import Team
from evener.errors import CheckpointError
from evener.observe.following import newest_event

RUN = "run.json"
"""Document of a checkpoint in which a task says what it trained on, and how."""


def choose_checkpoint(
    team: Team,
    parent: Path,
    name: str,
    *,
    say: Callable[[str], None],
    check: Callable[[Checkpoint], None],
) -> tuple[Path, Checkpoint]:
    """Find the newest run that has a complete checkpoint; all ranks call it together.

    Args:
        team: The ranks.
        parent: Folder of runs.
        name: The run's name.
        say: Told, in a sentence, of each newer run or checkpoint that cannot be used.
        check: Asked on rank 0; raises a ``CheckpointError`` where what a checkpoint holds is
            damaged, so that the one before it is taken.

    Returns:
        The run's folder, and its newest complete checkpoint.

    Raises:
        CheckpointError: There is none, or ranks see different ones.
    """
    own = _newest_of_any(runs_of(parent, name), say, check) if team.rank == 0 else None
    found = team.introduce(own and [str(own[0]), own[1].path.name])[0]
    if found is None:
        raise CheckpointError(
            f"no run {name!r} in {parent.absolute()} holds a complete checkpoint to resume from; "
            "start without --resume"
        )
    folder, step = Path(found[0]), found[1]
    checkpoint: Checkpoint | None = None
    try:
        checkpoint = own[1] if own else open_checkpoint(folder / CHECKPOINTS / step)
        said = ["", hashlib.sha256(checkpoint.manifest.to_bytes()).hexdigest()]
    except CheckpointError as error:
        said = [str(error), ""]
    answers = team.introduce(said)
    for rank, (refused, content) in enumerate(answers):
        if refused or content != answers[0][1]:
            raise CheckpointError(
                f"rank {rank} does not see the {step} that rank 0 has chosen "
                f"({refused or 'its content differs'}); put {folder / CHECKPOINTS} on "
                "storage that every rank sees"
            )
    assert checkpoint is not None
    return folder, checkpoint


def _newest_of_any(
    folders: Iterable[Path], say: Callable[[str], None], check: Callable[[Checkpoint], None]
) -> tuple[Path, Checkpoint] | None:
    passed_over: list[str] = []
    for folder in folders:
        checkpoint = find_newest(
            folder / CHECKPOINTS,
            lambda path, why: say(f"skipped checkpoint {path}: {why}"),
            check,
        )
        if checkpoint is not None:
            if passed_over:
                say(
                    f"going on with {folder}: there is no complete checkpoint in "
                    f"{', '.join(passed_over)}"
                )
            return folder, checkpoint
        passed_over.append(folder.name)
    return None


def is_finished(team: Team, folder: Path, window: int, results: Sequence[str] = ()) -> bool:
    """Return whether a run has come to its end, at ``window``; all ranks call it together.

    Args:
        team: The ranks.
        folder: The run folder, which rank 0 looks into.
        window: Windows that the run has.
        results: What it leaves in the folder; a full disk may have kept it from that.
    """
    finished = False
    if team.rank == 0 and (event := newest_event(folder / EVENTS)):
        last = [event.get(key) for key in ("type", "reason", "window")]
        is_written = all((folder / name).exists() for name in results)
        finished = is_written and last == ["run_finished", "completed", window]
    return bool(team.introduce(finished)[0])
