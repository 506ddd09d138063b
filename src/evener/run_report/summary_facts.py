"""Facts of a report from ``summary.json``, which may be of another version or damaged. Pure."""

import math
from dataclasses import dataclass, field
from typing import Any

from evener.parsing import Fields, short, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Counts of held-out samples by true class (row) and predicted class (column)."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryFacts:
    """The figures of a report that events lack.

    Attributes:
        speed: Units per second of the team after the warm-up.
        solo: Units per second of members alone, as far as known.
        solo_source: How those were found.
        beside_solo: Units per second of the team in the windows from which those come.
        equal_split: Units per second of the team with equal shares.
        heldout_loss: At the end.
        steps: Optimizer steps.
        elapsed_s: Seconds of training.
        machine: Facts about the machine.
        versions: By name.
        confusion: Of a classification.
    """

    speed: float | None = None
    solo: dict[str, float] = field(default_factory=dict)
    solo_source: str = ""
    beside_solo: float | None = None
    equal_split: float | None = None
    heldout_loss: float | None = None
    steps: int | None = None
    elapsed_s: float | None = None
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    confusion: Confusion | None = None


def read_facts(document: Any) -> SummaryFacts:
    """Take what a report shows from the document of a ``summary.json``.

    Raises:
        ValueError: It is not such a document; says which key has which value.
    """
    fields = Fields(document)
    return SummaryFacts(
        speed=_number(fields, "tokens_per_s", least=0.0),
        solo=_solo(fields),
        solo_source=fields.text("solo_source") if "solo_source" in fields else "",
        beside_solo=_number(fields, "beside_solo_tokens_per_s", least=0.0),
        equal_split=_number(fields, "equal_split_tokens_per_s", least=0.0),
        heldout_loss=_number(fields, "heldout_loss"),
        steps=fields.whole("steps") if "steps" in fields else None,
        elapsed_s=_number(fields, "elapsed_s", least=0.0),
        machine=_texts(fields, "machine"),
        versions=_texts(fields, "versions"),
        confusion=_confusion(fields),
    )


def _solo(fields: Fields) -> dict[str, float]:
    if "solo_tokens_per_s" not in fields or "ranks" not in fields:
        return {}
    speeds = fields.items("solo_tokens_per_s")
    found = {}
    for row in fields.tables("ranks"):
        rank = row.whole("rank")
        if rank < len(speeds) and speeds[rank] is not None:
            value = Fields({"solo_tokens_per_s": speeds[rank]})
            found[row.text("member")] = value.number("solo_tokens_per_s", least=0.0)
    return found


def _confusion(fields: Fields) -> Confusion | None:
    if "confusion" not in fields or "labels" not in fields or fields["confusion"] is None:
        return None
    labels = tuple(fields.texts("labels"))
    counts = []
    for row in fields.items("confusion"):
        if not isinstance(row, list) or len(row) != len(labels):
            raise ValueError(f"confusion holds {short(row)}, not a count for each of the labels")
        counts.append(tuple(whole(count, "a count of confusion") for count in row))
    if len(counts) != len(labels):
        raise ValueError(f"confusion has {len(counts)} rows for {len(labels)} labels")
    return Confusion(labels=labels, counts=tuple(counts))


def _number(fields: Fields, key: str, least: float = -math.inf) -> float | None:
    return fields.number(key, least=least) if fields.values.get(key) is not None else None


def _texts(fields: Fields, key: str) -> dict[str, str]:
    if key not in fields:
        return {}
    return {name: str(value) for name, value in fields.fields(key).values.items()}
