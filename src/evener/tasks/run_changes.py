"""What a language model run was made of, and what of it a resume may change."""

from collections.abc import Iterable, Mapping
from typing import Any

from evener.checkpoint import Checkpoint
from evener.config.options import Allowed
from evener.config.runs import RunConfig
from evener.engine.team import Team
from evener.errors import CheckpointError
from evener.parsing import Fields, parse_json, short
from evener.tasks.resuming import RUN
from evener.tasks.text.corpus import CorpusSplits
from evener.tasks.text.tokenizer import CausalTokenizer

CONFIG = "config.json"
"""Asset of a checkpoint: the model's configuration, as transformers writes it."""

# Where things lie decides nothing; the same text may have moved.
_OF_ITS_PREPARATION = frozenset({"data.cache", "data.on_error"})
_SAYS_NOTHING = _OF_ITS_PREPARATION | {"name", "data.path"}
_SIZE = "{num_documents} documents of {num_tokens:,} tokens in {num_samples:,} samples"
_OF_THE_DATA = ("data.", "seed")
# Earlier versions wrote numbers where this one writes that an option was left out.
_LEFT_OUT = {
    "anchor": 10,
    "overhead_target": 0.1,
    "max_anchor": 200,
    "divergence_threshold": 0.05,
    "verify_every": 0,
}
# Keys of a model's configuration that do not change what its weights mean. How long a sequence may
# be follows data.seq_len; where it decides shapes, these differ.
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "dtype", "max_position_embeddings", "torch_dtype", "transformers_version"}
)


def describe_run(
    team: Team,
    config: RunConfig,
    data: CorpusSplits,
    tokenizer: CausalTokenizer,
    *,
    precision: str,
) -> dict[str, Any]:
    """Return what a run is made of, in JSON types, for its checkpoints; all ranks call it.

    Args:
        team: The ranks.
        config: What the user asked for.
        data: What it trains on.
        tokenizer: Made the ids.
        precision: What this rank computes in.
    """
    return {
        "precisions": sorted(set(team.introduce(precision))),
        "data": data.train.signature,
        "num_documents": data.train.num_documents,
        "num_samples": len(data.train),
        "num_tokens": data.train.num_tokens,
        "tokenizer": tokenizer.fingerprint,
        "config": config.model_dump(mode="json"),
        # Windows and tokens that the run had when this data began: it may have had other before.
        "beginning": {"window": 0, "weight": 0.0},
    }


def read_run(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the run that wrote a checkpoint was made of.

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
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    model_config: bytes,
    allow: Iterable[Allowed],
) -> list[str]:
    """Refuse a checkpoint of another model, tokenizer, precision or data, but for what is allowed.

    Args:
        checkpoint: What the run resumes from.
        saved: ``describe_run`` of the run that wrote it.
        now: ``describe_run`` of the present run.
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
    if saved["tokenizer"] != now["tokenizer"]:
        of_model.append("the tokenizer, and so what the ids mean")
    if of_model:
        raise CheckpointError(
            f"{checkpoint.path} is of another model; what differs: {'; '.join(of_model)}. Put "
            "that back, or start without --resume"
        )
    changes = _changes(saved["config"], now["config"])
    other_precision = saved["precisions"] != now["precisions"]
    if "precision" in changes and other_precision and "precision" not in allow:
        raise CheckpointError(
            f"{checkpoint.path} was trained in another precision: {changes['precision']}. Put that "
            "back, or go on in the other one with --allow precision"
        )
    precision = [changes.pop("precision")] if "precision" in changes else []
    harmless = [text for key, text in changes.items() if key not in _SAYS_NOTHING] + precision
    if other_precision:  # as devices may do, where each is given what it can
        before, after = (", ".join(run["precisions"]) for run in (saved, now))
        harmless.append(f"ranks compute in {after}, not {before}")
    if saved["data"] == now["data"]:
        return harmless
    of_data = {key: text for key, text in changes.items() if key.startswith(_OF_THE_DATA)}
    others = [text for text in harmless if text not in of_data.values()]
    differences = [text for key, text in of_data.items() if key not in _OF_ITS_PREPARATION]
    if not differences:
        before, after = (_SIZE.format(**run) for run in (saved, now))
        differences.append(
            f"the files: {before} for training when the checkpoint was written, {after} now"
        )
    if "data" not in allow:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data; what differs: {'; '.join(differences)}. "
            "Put that back, start without --resume, or go on with this data from its beginning "
            "with --allow data"
        )
    return [*differences, *others]


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


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs, by key; those of a section, such as ``optimizer.lr``, first."""
    before, after = _settings(saved), _settings(now)
    return {
        key: f"{key} {before.get(key)} -> {after.get(key)}"
        for key in sorted(after | before, key=lambda key: "." not in key)
        if before.get(key) != after.get(key)
    }


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says, by key, whichever version has written it."""
    flat = _flat(config)
    if flat.get("divergence_guard", "") in (None, False):
        flat["divergence_guard"] = "none"
    return flat | {key: value for key, value in _LEFT_OUT.items() if flat.get(key) is None}


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested document as ``section.key`` -> value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
