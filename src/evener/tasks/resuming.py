"""Going on from a checkpoint: is it of this run, what has changed since, is there anything left."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evener.checkpoint import Checkpoint, find_newest
from evener.data.corpus import CorpusSplits
from evener.errors import CheckpointError
from evener.observe.jsonl import read_events
from evener.run.config import RunConfig
from evener.run.team import Team
from evener.tasks.tokenizer import CausalTokenizer

RUN = "run.json"
"""Document of a checkpoint that says what it was trained on, and how."""

# Where things lie decides nothing; the same text may have moved.
_SAYS_NOTHING = frozenset({"name", "data.path", "data.cache"})
_OF_THE_DATA = ("data.", "seed")


def describe_run(
    config: RunConfig, data: CorpusSplits, tokenizer: CausalTokenizer
) -> dict[str, Any]:
    """What a run is made of, as plain JSON types, for its checkpoints."""
    return {
        "data": data.train.signature,
        "num_documents": data.train.num_documents,
        "num_samples": len(data.train),
        "num_tokens": data.train.num_tokens,
        "tokenizer": tokenizer.fingerprint,
        "config": config.model_dump(mode="json"),
    }


def newest_checkpoint(team: Team, folder: Path, *, say: Callable[[str], None]) -> Checkpoint:
    """Finds the newest complete checkpoint; all ranks call it together.

    Args:
        team: The ranks.
        folder: Holds the checkpoints.
        say: Told, in a sentence, of each newer one that cannot be used.

    Raises:
        CheckpointError: There is none, or ranks see different ones.
    """
    checkpoint = find_newest(folder, lambda path, why: say(f"skipped checkpoint {path}: {why}"))
    newest = None if checkpoint is None else checkpoint.path.name
    names = team.introduce({"path": newest})
    for rank, other in enumerate(names):
        if other["path"] != newest:
            raise CheckpointError(
                f"rank {rank} finds {other['path']} as newest checkpoint, rank {team.rank} "
                f"{newest}; put {folder} on storage that every rank sees"
            )
    if checkpoint is None:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint to resume from; start without --resume"
        )
    return checkpoint


def check_same_data(checkpoint: Checkpoint, now: Mapping[str, Any]) -> list[str]:
    """Refuses a checkpoint of other data, and names the settings that have changed since.

    Args:
        checkpoint: Holds ``describe_run`` of the run that wrote it.
        now: ``describe_run`` of the present run.

    Returns:
        Changed settings that do no harm, such as ``"optimizer.lr 0.001 -> 0.0003"``.

    Raises:
        CheckpointError: Its samples are not this run's; says what differs.
    """
    saved = checkpoint.document(RUN)
    changes = _changes(saved["config"], now["config"])
    if saved["data"] == now["data"]:
        return [text for key, text in changes.items() if key not in _SAYS_NOTHING]
    causes = [
        text
        for key, text in changes.items()
        if key.startswith(_OF_THE_DATA) and key != "data.cache"
    ]
    if saved["tokenizer"] != now["tokenizer"]:
        causes.append("another tokenizer")
    if not causes:
        causes.append(
            f"the files: {_size(saved)} for training when the checkpoint was written, "
            f"{_size(now)} now"
        )
    raise CheckpointError(
        f"{checkpoint.path} was trained on other data; what differs: {'; '.join(causes)}. Put that "
        "back, or start without --resume"
    )


def is_finished(team: Team, folder: Path, window: int) -> bool:
    """Whether a run has been brought to its end, which was ``window``; all ranks call it together.

    Args:
        team: The ranks.
        folder: The run folder, which rank 0 looks into.
        window: Windows that the run has.
    """
    finished = False
    if team.rank == 0:
        last = read_events(folder / "events.jsonl")[-1:]
        finished = [(e["type"], e.get("reason"), e.get("window")) for e in last] == [
            ("run_finished", "completed", window)
        ]
    return bool(team.introduce({"finished": finished})[0]["finished"])


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    before, after = _flat(saved), _flat(now)
    return {
        key: f"{key} {before.get(key)} -> {after.get(key)}"
        for key in [*after, *(key for key in before if key not in after)]
        if before.get(key) != after.get(key)
    }


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested document as ``section.key`` -> value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _size(run: Mapping[str, Any]) -> str:
    return (
        f"{run['num_documents']} documents of {run['num_tokens']:,} tokens in "
        f"{run['num_samples']:,} samples"
    )
