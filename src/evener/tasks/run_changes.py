"""What a run is made of, and what of it a resume may change."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from evener.checkpoint import Checkpoint
from evener.config.keys import ALLOWED
from evener.engine.team import Team
from evener.errors import CheckpointError, DataError
from evener.parsing import short

RUN: Final = "run.json"
"""Document of a checkpoint: the user's keys (``config``), and what the run is made of."""

MADE_OF: Final = "made_of"
"""Key of ``RUN``: the parts without which the weights mean nothing, by name."""


def check_changes(
    checkpoint: Checkpoint, run: Mapping[str, Any], allow: Collection[str] | None
) -> tuple[set[str], list[str]]:
    """Refuse a checkpoint of a run that is made of something else, but for what is allowed.

    Args:
        checkpoint: What the run resumes from.
        run: The present run's ``RUN``.
        allow: Parts that may differ; ``None`` if the user cannot allow any.

    Returns:
        The parts that differ, and the keys that do, such as ``"optimizer.lr 0.001 -> 0.0003"``.

    Raises:
        CheckpointError: Says what differs, and what to do.
    """
    saved = checkpoint.document(RUN)
    keys = _differences(saved["config"], run["config"])
    changed = set()
    for name, part in run[MADE_OF].items():
        if found := _differences({name: saved[MADE_OF].get(name)}, {name: part}):
            if name not in (allow or ()):
                has_option = allow is not None and name in ALLOWED
                remedy = f", or continue with it by --allow {name}" if has_option else ""
                raise CheckpointError(
                    f"{checkpoint.path} is not of this run: different {name} "
                    f"({'; '.join(dict.fromkeys([*found, *keys]))}). Put that back, or start "
                    f"without --resume{remedy}"
                )
            changed.add(name)
    return changed, keys


def require_same_parts(team: Team, parts: Mapping[str, Any]) -> None:
    """Refuse ranks that make the run of something else than rank 0; all call it together.

    Raises:
        DataError: Names the first rank and the part, on every rank.
    """
    first, *others = team.introduce(parts)
    for rank, own in enumerate(others, start=1):
        for name, part in own.items():
            if part != first[name]:
                raise DataError(
                    f"rank {rank} sees different {name} than rank 0 ({short(part)} and "
                    f"{short(first[name])}); give every machine the same files, and the same "
                    "versions of Python and libraries"
                )


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what differs of the keys that both have; those of sections first."""
    before, after = _flat(before), _flat(after)
    return [
        f"{key} {short(before[key])} -> {short(after[key])}"
        for key in sorted(before.keys() & after.keys(), key=lambda key: ("." not in key, key))
        if before[key] != after[key]
    ]


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested document as ``section.key`` -> value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
