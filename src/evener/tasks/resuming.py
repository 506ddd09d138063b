"""Which checkpoint a run resumes from, and whether anything of the run is left to do."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from evener.checkpoint import Checkpoint, find_newest, open_checkpoint
from evener.config.folders import CHECKPOINTS, EVENTS, runs_of
from evener.engine.team import Team
from evener.errors import CheckpointError
from evener.observe.jsonl import read_events

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
    found = {"folder": str(own[0]), "path": own[1].path.name} if own else None
    theirs = team.introduce({"found": found})[0]["found"]
    if theirs is None:
        raise CheckpointError(
            f"no run {name!r} in {parent.absolute()} holds a complete checkpoint to resume from; "
            "start without --resume"
        )
    folder = Path(theirs["folder"])
    checkpoint, refused = own[1] if own else None, ""
    if checkpoint is None:
        try:
            checkpoint = open_checkpoint(folder / CHECKPOINTS / theirs["path"])
        except CheckpointError as error:
            refused = str(error)
    content = ""
    if checkpoint is not None:
        content = hashlib.sha256(checkpoint.manifest.to_bytes()).hexdigest()
    answers = team.introduce({"refused": refused, "content": content})
    for rank, other in enumerate(answers):
        if other["refused"] or other["content"] != answers[0]["content"]:
            raise CheckpointError(
                f"rank {rank} does not see the {theirs['path']} that rank 0 has chosen "
                f"({other['refused'] or 'its content differs'}); put {folder / CHECKPOINTS} on "
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
    if team.rank == 0 and (events := read_events(folder / EVENTS)):
        last = [events[-1].get(key) for key in ("type", "reason", "window")]
        is_written = all((folder / name).exists() for name in results)
        finished = is_written and last == ["run_finished", "completed", window]
    return bool(team.introduce({"finished": finished})[0]["finished"])
