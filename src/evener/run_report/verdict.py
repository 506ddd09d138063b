"""The verdict on a run: is each device worth it, who waits for whom, what to change. Pure."""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from evener.observe.estimate import SPEEDS_CHANGED, Estimate, contribution
from evener.observe.events import SPANS
from evener.observe.measuring import measure, parts_of_time
from evener.observe.table import Columns, RunTable, ratio
from evener.observe.waiting import Waits, describe_waits
from evener.planning.policies import ApplyPolicy
from evener.run_report.advice import (
    Advice,
    RankFacts,
    RunFacts,
    advise_run,
    has_changed,
)
from evener.run_report.curves import number
from evener.run_report.history import RunHistory
from evener.simulation.changes import Predictor

_MOST_NAMED: Final = 3
"""Most ranks whose contribution the verdict names; in a larger team it names only the slowest."""

_LEAST_ROWS: Final = 4
"""Least windows in a third of a run to decide whether speeds have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunVerdict:
    """The answers to the three questions about a run.

    Attributes:
        estimate: Speeds of the team and of its ranks alone.
        names: Names of the present ranks.
        lost_waiting: Fraction of the ranks' time in which they waited for one another.
        waits: Who waits for whom, as text.
        advice: What to change.
        speeds_changed: Whether a rank became slower or faster during the run.
        basis: Whether the figures were measured in a run, or predicted.
    """

    estimate: Estimate
    names: dict[int, str]
    lost_waiting: float | None
    waits: str
    advice: tuple[Advice, ...] = ()
    speeds_changed: bool = False
    basis: Literal["measured", "predicted"] = "measured"

    @property
    def remark(self) -> str | None:
        """Return a remark that the reader needs for the multiple; ``None`` without one."""
        return SPEEDS_CHANGED if self.speeds_changed or self.estimate.speeds_changed else None

    @property
    def text(self) -> str:
        """Return the verdict in one line."""
        multiple, fastest = self.estimate.of_fastest, self.estimate.fastest
        parts = []
        if len(self.names) > 1 and multiple is not None:
            parts += [f"{multiple:.2f}× rank {fastest} alone", *self._contributions()]
        if self.remark:
            parts.append(self.remark)
        if self.lost_waiting is not None and len(self.names) > 1:
            parts.append(f"{self.lost_waiting:.1%} of the time lost waiting")
        parts += [one.brief for one in self.advice[:1]]
        return " · ".join(parts)

    @property
    def worth(self) -> str:
        """Return whether the slow devices are worth it, in a sentence."""
        estimate = self.estimate
        if estimate.speed is None:
            return "The run was too short, or its team changed too late, to measure its speed."
        if len(self.names) < 2:
            return "A single rank cannot be compared with others."
        if estimate.speeds_changed:
            return f"The team is not compared with its ranks alone: {SPEEDS_CHANGED}."
        if estimate.unknown:
            ranks = " and ".join(f"rank {rank}" for rank in sorted(estimate.unknown))
            return f"The speed of {ranks} alone is not known, so no multiple is given."
        if estimate.of_fastest is None or estimate.of_ideal is None:
            return "The speed of each rank alone is not known, so no multiple is given."
        contributions = ", ".join(self._contributions())
        changed = f"; {SPEEDS_CHANGED}" if self.speeds_changed else ""
        return (
            f"The team does {estimate.of_fastest:.2f}× rank {estimate.fastest} alone, "
            f"{estimate.of_ideal:.0%} of all ranks together{changed}: {contributions}."
        )

    @property
    def change(self) -> str:
        """Return what to change first, in a sentence or two."""
        if not self.advice and self.estimate.speed is None:
            return "The run is too short for advice: let it run for longer."
        if not self.advice:
            return "No change is expected to make it noticeably faster."
        first = self.advice[0]
        gain = "" if first.gain is None else f" Expected: {first.gain:+.0%}."
        key = f" Set {first.key}." if first.key else ""
        return f"{first.text}{key}{gain}"

    @property
    def lines(self) -> list[str]:
        """Return the three answers."""
        return [self.worth, self.waits, self.change]

    def document(self) -> dict[str, Any]:
        """Return the verdict as JSON."""
        fastest = self.estimate.fastest
        multiple = self.estimate.of_fastest if len(self.names) > 1 else None
        named = multiple is not None and fastest in self.names
        return {
            "basis": self.basis,
            "multiple": number(multiple),
            "fastest": {"rank": fastest, "name": self.names[fastest]} if named else None,  # type: ignore[index]
            "of_ideal": number(self.estimate.of_ideal),
            "lost_waiting": number(self.lost_waiting),
            "remark": self.remark,
            "text": self.text,
            "answers": {"worth": self.worth, "waits": self.waits, "change": self.change},
        }

    def _contributions(self) -> list[str]:
        others = sorted(self.names.keys() - {self.estimate.fastest})
        if len(others) > _MOST_NAMED:
            alone = self.estimate.alone
            others = [min(others, key=lambda rank: alone.get(rank, 0.0))]
        return [f"rank {rank} {contribution(self.estimate, rank, be='is ')}" for rank in others]


def judge(history: RunHistory, waits: Waits, predict: Predictor | None = None) -> RunVerdict:
    """Judge a run.

    Args:
        history: Its events.
        waits: Who waits for whom, by lane.
        predict: See ``advise_run``.
    """
    table = history.table
    names = {table.ranks[lane]: name_rank(history, lane) for lane in table.present}
    rows, parts = table.rows(), parts_of_time(table)
    estimate = measure(table)
    ranks = _ranks(history, table.lane_sums())
    facts = RunFacts(
        policy=ApplyPolicy(history.facts.get("policy", ApplyPolicy.SYNC)),
        estimate=estimate,
        ranks=ranks,
        unit=history.facts.get("unit") or "samples",
        batch_size=int(_usual(rows["samples"] / rows["windows"])),
        window_s=_usual(rows["length_s"] / rows["windows"]),
        wait=parts.get("wait", 0.0),
        exchange=parts.get("sync", 0.0),
        data=parts.get("data", 0.0),
    )
    every = [name_rank(history, lane) for lane in range(len(table.members))]
    return RunVerdict(
        estimate=estimate,
        names=names,
        lost_waiting=parts.get("wait"),
        waits=describe_waits(
            waits, every, float(rows["length_s"].sum()), waiting=parts.get("wait", 0.0)
        ),
        advice=tuple(advise_run(facts, predict)),
        speeds_changed=any(has_changed(one.changed) for one in ranks),
    )


def name_rank(history: RunHistory, lane: int) -> str:
    """Return a rank and its device as text."""
    rank, member = history.table.ranks[lane], history.table.members[lane]
    worker = history.workers.get(member, {})
    slowed = history.slowed(lane)
    about = [
        worker.get("device", "").replace(" (", ", ").rstrip(")") or member,
        *([] if slowed is None else [f"emulated {slowed:g}× slower"]),
    ]
    return f"rank {rank} ({', '.join(about)})"


def _ranks(history: RunHistory, sums: Columns) -> tuple[RankFacts, ...]:
    table = history.table
    total_s = sum(sums[f"{span}_s"] for span in SPANS)
    data = np.nan_to_num(ratio(sums["data_s"], np.asarray(total_s)))
    samples, passes = table.cells("samples"), table.cells("micro_batches")
    sizes = np.nan_to_num(ratio(samples, passes))
    factors = _factors(table)
    return tuple(
        RankFacts(
            rank=table.ranks[lane],
            name=name_rank(history, lane),
            data=float(data[lane]),
            joined=history.joined.get(table.members[lane]),
            changed=factors[lane],
            at_once=float(sizes[:, lane].max(initial=0.0)),
            passes=_usual(passes[passes[:, lane] > 0, lane]),
        )
        for lane in table.present
    )


def _factors(table: RunTable) -> list[float]:
    """Return by lane the time of a sample in the last third of measured rows over the first."""
    counted = table.measured()
    samples = table.cells("samples")[counted]
    compute_s = (table.cells("compute_s") - table.cells("update_s"))[counted]
    factors = []
    for lane in range(len(table.members)):
        worked = (samples[:, lane] > 0) & (compute_s[:, lane] > 0)
        each_s = compute_s[worked, lane] / samples[worked, lane]
        third = len(each_s) // 3
        is_known = third >= _LEAST_ROWS
        factors.append(_usual(each_s[-third:]) / _usual(each_s[:third]) if is_known else 1.0)
    return factors


def _usual(values: Any) -> float:
    return float(np.median(values)) if len(values) else 0.0
