"""What a language model run was made of, and what of it a resume may change."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt, ValidationError

from evener.checkpoint import Checkpoint
from evener.config.keys import Allowed
from evener.config.runs import RunConfig
from evener.engine.team import Team
from evener.errors import CheckpointError
from evener.parsing import Fields, parse_json, short
from evener.tasks.resuming import RUN
from evener.tasks.text.corpus import CorpusSplits
from evener.tasks.text.tokenizer import CausalTokenizer

CONFIG = "config.json"
"""Asset of a checkpoint: the model's configuration, as transformers writes it."""

# Keys that decide nothing.
_SAYS_NOTHING = frozenset({"data.cache", "data.on_error", "name"})
# Keys of a model's configuration that do not change what its weights mean. How long a sequence may
# be follows data.seq_len; where it decides shapes, these differ.
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "dtype", "max_position_embeddings", "torch_dtype", "transformers_version"}
)


class Beginning(BaseModel, frozen=True):
    """Windows and tokens that a run had when its present data began."""

    window: NonNegativeInt = 0
    weight: NonNegativeFloat = 0.0


class RunDescription(BaseModel, frozen=True, extra="ignore"):
    """What a language model run is made of, as its checkpoints hold it.

    Attributes:
        precisions: What its ranks compute in.
        data: Signature of the training data.
        num_documents: Of the training data.
        num_samples: Of the training data.
        num_tokens: Of the training data.
        tokenizer: Fingerprint of the tokenizer.
        config: What the user asked for.
        beginning: When its present data began; it may have had other data before.
    """

    precisions: list[str]
    data: str
    num_documents: NonNegativeInt
    num_samples: NonNegativeInt
    num_tokens: NonNegativeInt
    tokenizer: str
    config: dict[str, Any]
    beginning: Beginning = Beginning()

    @property
    def size(self) -> str:
        """The training data in numbers, for people."""
        return (
            f"{self.num_documents} documents of {self.num_tokens:,} tokens in {self.num_samples:,} "
            "samples"
        )


def describe_run(
    team: Team,
    config: RunConfig,
    data: CorpusSplits,
    tokenizer: CausalTokenizer,
    *,
    precision: str,
) -> RunDescription:
    """Return what a run is made of; all ranks call it together.

    Args:
        team: The ranks.
        config: What the user asked for.
        data: What it trains on.
        tokenizer: Made the ids.
        precision: What this rank computes in.
    """
    return RunDescription(
        precisions=sorted(set(team.introduce(precision))),
        data=data.train.signature,
        num_documents=data.train.num_documents,
        num_samples=len(data.train),
        num_tokens=data.train.num_tokens,
        tokenizer=tokenizer.fingerprint,
        config=config.model_dump(mode="json"),
    )


def read_run(checkpoint: Checkpoint) -> RunDescription:
    """Return what the run that wrote a checkpoint was made of.

    Raises:
        CheckpointError: It is damaged; names file and value.
    """
    try:
        return RunDescription.model_validate(checkpoint.document(RUN), strict=True)
    except ValidationError as error:
        raise CheckpointError(f"{checkpoint.path / RUN} is damaged: {error}") from error


def check_changes(
    checkpoint: Checkpoint,
    saved: RunDescription,
    now: RunDescription,
    *,
    model_config: bytes,
    allow: Iterable[Allowed],
) -> list[str]:
    """Refuse a checkpoint of another model, tokenizer, precision or data, but for what is allowed.

    Args:
        checkpoint: What the run resumes from.
        saved: The run that wrote it.
        now: The present run.
        model_config: The present model's ``config.json``.
        allow: ``data``: continue with other data, from its first epoch on. ``precision``: continue
            in another precision. Another model or tokenizer is never allowed: the weights would
            mean nothing in it.

    Returns:
        Settings that have changed and may, such as ``"optimizer.lr 0.001 -> 0.0003"``.

    Raises:
        CheckpointError: Says what differs, and what to do.
    """
    of_model = differences_of_model(checkpoint, model_config)
    if saved.tokenizer != now.tokenizer:
        of_model.append("the tokenizer, and so what the ids mean")
    if of_model:
        raise CheckpointError(
            f"{checkpoint.path} is of another model; what differs: {'; '.join(of_model)}. Put "
            "that back, or start without --resume"
        )
    changes = _changes(_flat(saved.config), _flat(now.config))
    if saved.precisions != now.precisions:  # as devices may do, where each is given what it can
        if "precision" in changes and "precision" not in allow:
            raise CheckpointError(
                f"{checkpoint.path} was trained in another precision: {changes['precision']}. Put "
                "that back, or continue in the other one with --allow precision"
            )
        before, after = (", ".join(run.precisions) for run in (saved, now))
        changes["precisions"] = f"ranks compute in {after}, not {before}"
    if saved.data == now.data:
        changes.pop("data.path", None)  # the same text may have moved
    else:
        of_data = [changes[key] for key in changes if key == "seed" or key.startswith("data.")]
        if not of_data:
            of_data = [
                f"the files: {saved.size} for training when the checkpoint was written, {now.size} "
                "now"
            ]
            changes = {"files": of_data[0], **changes}
        if "data" not in allow:
            raise CheckpointError(
                f"{checkpoint.path} was trained on other data; what differs: {'; '.join(of_data)}. "
                "Put that back, start without --resume, or begin with this data with --allow data"
            )
    return list(changes.values())


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


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs, by key; those of a section, such as ``optimizer.lr``, first."""
    return {
        key: f"{key} {before.get(key)} -> {after.get(key)}"
        for key in sorted({**before, **after}, key=lambda key: "." not in key)
        if before.get(key) != after.get(key) and key not in _SAYS_NOTHING
    }


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested document as ``section.key`` -> value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
