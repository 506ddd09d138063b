"""What a run depends on, and what of it may differ in a resume."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from evener.checkpoint import Checkpoint
from evener.config.keys import ALLOWED
from evener.engine.team import Team
from evener.errors import CheckpointError, DataError
from evener.parsing import short

RUN: Final = "run.json"
"""Document of a checkpoint: the user's keys (``config``), and ``Task.made_of``."""

MADE_OF: Final = "made_of"
"""Key of ``RUN``: see ``Task.made_of``."""

Sources = Mapping[str, Sequence[str]]
"""Keys that determine parts, by part; see ``Task.made_from``."""


def check_changes(
    checkpoint: Checkpoint,
    run: Mapping[str, Any],
    sources: Sources,
    allow: Collection[str] | None,
) -> tuple[set[str], list[str]]:
    """Refuse a checkpoint of a run with other parts, except for those that may differ.

    Args:
        checkpoint: The checkpoint that the run resumes from.
        run: The present run's ``RUN``.
        sources: Keys that determine parts; see ``Task.made_from``.
        allow: Parts that may differ; ``None`` if the user cannot allow any.

    Returns:
        The parts that differ, and the keys that differ, as ``"optimizer.lr 0.001 -> 0.0003"``.

    Raises:
        CheckpointError: Names the difference and the remedy.
    """
    saved = checkpoint.document(RUN)
    keys = _differences(saved["config"], run["config"])
    changed = set()
    for name in {**saved[MADE_OF], **run[MADE_OF]}:
        before, after = (_flat({name: made.get(name)}) for made in (saved[MADE_OF], run[MADE_OF]))
        if name == "model":  # another version of transformers writes other keys
            both = before.keys() & after.keys()
            before, after = ({key: part[key] for key in both} for part in (before, after))
        if found := _differences(before, after):
            if name not in (allow or ()):
                own = tuple(f"{key}." for key in sources.get(name, (name,)))
                causes = (text for key, text in keys.items() if f"{key}.".startswith(own))
                has_option = allow is not None and name in ALLOWED
                remedy = f", or continue with it by --allow {name}" if has_option else ""
                raise CheckpointError(
                    f"{checkpoint.path} is not of this run: different {name} "
                    f"({'; '.join(dict.fromkeys([*found.values(), *causes]))}). Put "
                    f"{_in_words(name, sources)} back, or start without --resume{remedy}"
                )
            changed.add(name)
    return changed, list(keys.values())


def require_same_parts(team: Team, parts: Mapping[str, Any], sources: Sources) -> None:
    """Refuse ranks whose parts differ from those of rank 0; all call it together.

    Raises:
        DataError: Names the first rank and the part, on every rank.
    """
    first, *others = team.introduce(parts)
    for rank, own in enumerate(others, start=1):
        for name in {**first, **own}:
            if own.get(name) != first.get(name):
                raise DataError(
                    f"rank {rank} sees different {name} than rank 0 ({short(own.get(name))} and "
                    f"{short(first.get(name))}); give every rank the same "
                    f"{_in_words(name, sources)}, and the same versions of Python and libraries"
                )


def _in_words(name: str, sources: Sources) -> str:
    """Return the keys that the user changes in order to change a part."""
    keys = sources.get(name)
    return f"{', '.join(keys)} and the files that they name" if keys else name


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return the differences by key, those in sections first."""
    before, after = _flat(before), _flat(after)
    return {
        key: f"{key} {short(before.get(key))} -> {short(after.get(key))}"
        for key in sorted(before.keys() | after.keys(), key=lambda key: ("." not in key, key))
        if before.get(key) != after.get(key)
    }


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested document as ``section.key`` -> value."""
    flat: dict[str, Any] = {}
    for key, value in document.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
