"""Going on from a checkpoint: which one, is it of this run, what has changed, is anything left."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.checkpoint import Checkpoint, find_newest, open_checkpoint
from evener.config.folders import CHECKPOINTS, runs_of
from evener.config.options import Allowed
from evener.config.pretrain import RunConfig
from evener.data.corpus import CorpusSplits
from evener.engine.team import Team
from evener.errors import CheckpointError
from evener.observe.jsonl import read_events
from evener.parsing import Fields, parse_json, short
from evener.tasks.tokenizer import CausalTokenizer

RUN = "run.json"
"""Document of a checkpoint that says what it was trained on, and how."""

CONFIG = "config.json"
"""Asset of a checkpoint: the model's configuration, as transformers writes it."""

# Where things lie decides nothing; the same text may have moved.
_SAYS_NOTHING = frozenset({"name", "data.path", "data.cache", "data.on_error"})
_OF_THE_DATA = ("data.", "seed")
# Keys of a model's configuration that do not change what its weights mean. How long a sequence may
# be follows data.seq_len; where it decides shapes, these differ.
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "dtype", "max_position_embeddings", "torch_dtype", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where the present data began, in a run that may have had other data before.

    Attributes:
        window: Windows that the run had then.
        weight: Tokens that it had committed then.
    """

    window: int = 0
    weight: float = 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """How a run differs from the one that wrote a checkpoint.

    Attributes:
        harmless: Settings that may change, such as ``"optimizer.lr 0.001 -> 0.0003"``.
        beginning: Where the data began; ``None`` for other data, which was allowed.
    """

    harmless: list[str]
    beginning: Beginning | None


def describe_run(
    team: Team,
    config: RunConfig,
    data: CorpusSplits,
    tokenizer: CausalTokenizer,
    *,
    precision: str,
) -> dict[str, Any]:
    """What a run is made of, as plain JSON types, for its checkpoints; all ranks call it together.

    Args:
        team: The ranks.
        config: What the user asked for.
        data: What it trains on.
        tokenizer: Made the ids.
        precision: What this rank computes in.
    """
    answers = team.introduce({"precision": precision})
    return {
        "precisions": sorted({answer["precision"] for answer in answers}),
        "data": data.train.signature,
        "num_documents": data.train.num_documents,
        "num_samples": len(data.train),
        "num_tokens": data.train.num_tokens,
        "tokenizer": tokenizer.fingerprint,
        "config": config.model_dump(mode="json"),
    }


def choose_checkpoint(
    team: Team,
    parent: Path,
    name: str,
    *,
    say: Callable[[str], None],
    check: Callable[[Checkpoint], None],
) -> tuple[Path, Checkpoint]:
    """Finds the newest run that has a complete checkpoint; all ranks call it together.

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
    content = "" if checkpoint is None else _digest(checkpoint)
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


def _digest(checkpoint: Checkpoint) -> str:
    return hashlib.sha256(checkpoint.manifest.to_bytes()).hexdigest()


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


def read_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the run that wrote a checkpoint was made of.

    Raises:
        CheckpointError: It is damaged; names file and value.
    """
    try:
        run = Fields(checkpoint.document(RUN))
        run.texts("precisions")
        for key in ("data", "tokenizer"):
            run.text(key)
        for key in ("num_documents", "num_samples", "num_tokens"):
            run.whole(key)
        run.fields("config")
        if "beginning" in run:
            run.fields("beginning").whole("window")
            run.fields("beginning").number("weight", least=0.0)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path / RUN} is damaged: {error}") from error
    return run.values


def check_changes(
    checkpoint: Checkpoint,
    now: Mapping[str, Any],
    *,
    model_config: bytes,
    allow: Iterable[Allowed],
) -> Changes:
    """Refuses a checkpoint of another model, tokenizer, precision or data, but for what is allowed.

    Args:
        checkpoint: Holds ``describe_run`` of the run that wrote it.
        now: ``describe_run`` of the present run.
        model_config: The present model's ``config.json``.
        allow: ``data``: go on with other data, from its first epoch on. ``precision``: go on in
            another precision. Another model or tokenizer is never allowed: the weights would mean
            nothing in it.

    Raises:
        CheckpointError: Says what differs, and what to do.
    """
    saved = read_run(checkpoint)
    changes = _changes(saved["config"], now["config"])
    _check_model(checkpoint, saved, now, model_config)
    allowed = set(allow)
    other_precision = saved["precisions"] != now["precisions"]
    if "precision" in changes and other_precision and "precision" not in allowed:
        raise CheckpointError(
            f"{checkpoint.path} was trained in another precision: {changes['precision']}. Put that "
            "back, or go on in the other one with --allow precision"
        )
    new_data = saved["data"] != now["data"]
    if new_data and "data" not in allowed:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data; what differs: "
            f"{'; '.join(_differences_of_data(saved, now, changes))}. Put that back, start without "
            "--resume, or go on with this data from its beginning with --allow data"
        )
    harmless = [text for key, text in changes.items() if key not in _SAYS_NOTHING]
    if other_precision:  # as devices may do, where each is given what it can
        before, after = (", ".join(run["precisions"]) for run in (saved, now))
        harmless.append(f"ranks compute in {after}, not {before}")
    if new_data:
        of_data = [text for key, text in changes.items() if key.startswith(_OF_THE_DATA)]
        others = [text for text in harmless if text not in of_data]
        harmless = [*_differences_of_data(saved, now, changes), *others]
        return Changes(harmless, None)
    began = saved.get("beginning")
    return Changes(harmless, Beginning(began["window"], began["weight"]) if began else Beginning())


def _check_model(
    checkpoint: Checkpoint, saved: Mapping[str, Any], now: Mapping[str, Any], model_config: bytes
) -> None:
    differences = differences_of_model(checkpoint, model_config)
    if saved["tokenizer"] != now["tokenizer"]:
        differences.append("the tokenizer, and so what the ids mean")
    if differences:
        raise CheckpointError(
            f"{checkpoint.path} is of another model; what differs: {'; '.join(differences)}. Put "
            "that back, or start without --resume"
        )


def differences_of_model(checkpoint: Checkpoint, model_config: bytes) -> list[str]:
    """Return how a checkpoint's model differs from the present one, by its ``config.json``.

    Raises:
        CheckpointError: That is damaged.
    """
    try:
        before = _flat(Fields(parse_json(checkpoint.asset(CONFIG))).values)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path / CONFIG} is damaged: {error}") from error
    after = _flat(parse_json(model_config))
    # Another version of transformers may know other keys; what both know must be the same.
    return [
        f"{key} {short(before[key])} -> {short(after[key])}"
        for key in after
        if key in before and key not in _NOT_OF_THE_MODEL and before[key] != after[key]
    ]


def _differences_of_data(
    saved: Mapping[str, Any], now: Mapping[str, Any], changes: Mapping[str, str]
) -> list[str]:
    differences = [
        text
        for key, text in changes.items()
        if key.startswith(_OF_THE_DATA) and key not in ("data.cache", "data.on_error")
    ]
    if not differences:
        differences.append(
            f"the files: {_size(saved)} for training when the checkpoint was written, "
            f"{_size(now)} now"
        )
    return differences


def is_finished(team: Team, folder: Path, window: int, results: Sequence[str] = ()) -> bool:
    """Whether a run has been brought to its end, which was ``window``; all ranks call it together.

    Args:
        team: The ranks.
        folder: The run folder, which rank 0 looks into.
        window: Windows that the run has.
        results: What it leaves in the folder; a full disk may have kept it from that.
    """
    finished = False
    if team.rank == 0:
        last = read_events(folder / "events.jsonl")[-1:]
        finished = [(e["type"], e.get("reason"), e.get("window")) for e in last] == [
            ("run_finished", "completed", window)
        ] and all((folder / name).exists() for name in results)
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
