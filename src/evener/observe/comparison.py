"""Compare trials of one configuration that differ in policy or backend. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from evener.observe.events import Event
from evener.observe.measuring import measure
from evener.observe.numbers import aligned, human_count, human_duration, wrapped
from evener.observe.table import Floats, RunTable

# Loss is averaged over this last part of a trial: single windows are noisy.
_TAIL = 0.2
# Losses nearer than this (relative), or than rounds of one combination differ, count as equal.
_NOISE = 0.005

_LOCAL_LOSSES = (
    "in cadence and async these are losses of each rank's own copy, and held-out ones of the mean"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The windows of one trial.

    Attributes:
        policy: Apply policy.
        backend: Averaging backend, as asked for.
        unit: What a weight counts, such as ``tokens``.
        speed: Units per second, as in its report; over the whole trial if it was too short.
        elapsed_s: Seconds from the start of the run to each committed window, without evaluations:
            a policy with longer windows has fewer of them.
        units: Weight committed up to then.
        losses: Mean training loss of each window.
        heldout_loss: The last measured one.
        completed: Whether it made all its steps in its time: then its last loss also holds for any
            later time.
    """

    policy: str
    backend: str
    unit: str
    speed: float
    elapsed_s: Floats
    units: Floats
    losses: Floats
    heldout_loss: float | None = None
    completed: bool = False

    def loss_by_time(self, seconds: float) -> float:
        """Return the mean loss of the last windows before a time."""
        return self._loss(self.elapsed_s, seconds)

    def loss_by_units(self, units: float) -> float:
        """Return the mean loss of the last windows before this number of units was committed."""
        return self._loss(self.units, units)

    def _loss(self, axis: Floats, end: float) -> float:
        last = max(0, int(np.searchsorted(axis, end, side="right")) - 1)
        first = int(np.argmax(axis >= (1 - _TAIL) * axis[last]))
        tail = slice(first, last + 1)
        amounts = np.diff(self.units, prepend=0.0)[tail]
        if not amounts.any():
            return float(self.losses[last])
        return float(np.average(self.losses[tail], weights=amounts))


def read_trial(events: Iterable[Event], policy: str, backend: str) -> Trial | None:
    """Return a trial from the events of its run; ``None`` if no window was committed."""
    table, unit, heldout, completed = RunTable(), "", None, False
    for event in events:
        table.add(event)
        if event["type"] == "run_started":
            unit = event["unit"]
        elif event["type"] == "eval" and event["loss"] is not None:
            heldout = event["loss"]
        elif event["type"] == "run_finished":
            completed = event["reason"] == "completed"
    rows = table.rows()
    known = np.isfinite(rows["loss"])
    if not known.any():
        return None
    elapsed_s = np.cumsum(rows["length_s"])[known]
    units = np.cumsum(rows["weight"] * known)[known]
    return Trial(
        policy=policy,
        backend=backend,
        unit=unit,
        speed=measure(table).speed or float(units[-1] / max(elapsed_s[-1], 1e-9)),
        elapsed_s=elapsed_s,
        units=units,
        losses=rows["loss"][known],
        heldout_loss=heldout,
        completed=completed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One combination over its rounds: medians, and how much rounds differ.

    Attributes:
        speed: Units per second.
        loss_by_time: After the seconds of the shortest trial.
        loss_by_units: After the units that every trial has processed.
        spread: Largest difference of ``loss_by_time`` between rounds.
        heldout_loss: The last one, if the configuration evaluates.
    """

    policy: str
    backend: str
    rounds: int
    speed: float
    loss_by_time: float
    loss_by_units: float
    spread: float
    heldout_loss: float | None

    @property
    def name(self) -> str:
        """Return a name such as ``sync/gloo``."""
        return f"{self.policy}/{self.backend}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Candidates measured against one another.

    Attributes:
        unit: What speeds and losses count.
        seconds: Time that every trial had.
        units: Units that every trial has processed.
        candidates: In the order in which they were requested.
        skipped: Reason by name, for those that could not run.
        recommended: Name of the recommended one; empty if none ran.
        reason: Why, in a sentence.
    """

    unit: str = "samples"
    seconds: float = 0.0
    units: float = 0.0
    candidates: Sequence[Candidate] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    recommended: str = ""
    reason: str


def compare(trials: Sequence[Trial], skipped: Mapping[str, str]) -> Comparison:
    """Compare at equal time and at equal work, and recommend.

    Args:
        trials: Rounds of all combinations.
        skipped: Reason by name, for those that could not run.
    """
    if not trials:
        return Comparison(skipped=skipped, reason="no combination could be measured")
    ends = [float(t.elapsed_s[-1]) for t in trials if not t.completed]
    seconds = min(ends) if ends else max(float(t.elapsed_s[-1]) for t in trials)
    units = min(float(t.units[-1]) for t in trials)
    rounds: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        rounds.setdefault((trial.policy, trial.backend), []).append(trial)
    candidates = [_candidate(members, seconds, units) for members in rounds.values()]
    recommended, reason = _recommend(candidates, trials[0].unit, seconds)
    return Comparison(
        unit=trials[0].unit,
        seconds=seconds,
        units=units,
        candidates=candidates,
        skipped=skipped,
        recommended=recommended.name,
        reason=reason,
    )


def table(comparison: Comparison) -> str:
    """Return the comparison as text."""
    unit = comparison.unit
    rows = [["policy/backend", f"{unit}/s", "loss by time", "by work", "held-out", "spread"]]
    rows += [
        [
            c.name,
            human_count(c.speed),
            f"{c.loss_by_time:.4f}",
            f"{c.loss_by_units:.4f}",
            "-" if c.heldout_loss is None else f"{c.heldout_loss:.4f}",
            f"{c.spread:.4f}" if c.rounds > 1 else "-",
        ]
        for c in comparison.candidates
    ]
    lines = aligned(rows)
    if comparison.candidates:
        lines.append(
            f"loss by time: after {human_duration(comparison.seconds)}; by work: after "
            f"{human_count(comparison.units)} {unit}; spread: how much rounds differ by time"
        )
    if any(c.policy != "sync" for c in comparison.candidates):
        lines.append(_LOCAL_LOSSES)
    lines += [f"{name} skipped: {why}" for name, why in comparison.skipped.items()]
    if comparison.recommended:
        lines.append(f"recommended: {comparison.recommended}, because {comparison.reason}")
    else:
        lines.append(comparison.reason)
    return "\n".join(map(wrapped, lines)) + "\n"


def _candidate(trials: Sequence[Trial], seconds: float, units: float) -> Candidate:
    by_time = [t.loss_by_time(seconds) for t in trials]
    heldout = [t.heldout_loss for t in trials if t.heldout_loss is not None]
    return Candidate(
        policy=trials[0].policy,
        backend=trials[0].backend,
        rounds=len(trials),
        speed=statistics.median(t.speed for t in trials),
        loss_by_time=statistics.median(by_time),
        loss_by_units=statistics.median(t.loss_by_units(units) for t in trials),
        spread=max(by_time) - min(by_time),
        heldout_loss=statistics.median(heldout) if heldout else None,
    )


def _recommend(candidates: Sequence[Candidate], unit: str, seconds: float) -> tuple[Candidate, str]:
    best = min(candidates, key=lambda c: c.loss_by_time)
    if len(candidates) == 1:
        return best, "nothing else could be measured"
    noise = max(_NOISE * abs(best.loss_by_time), *(c.spread for c in candidates))
    near = [c for c in candidates if c.loss_by_time - best.loss_by_time <= noise]
    # SYNC is equivalent to training on one device. Other policies must show a gain.
    exact = [c for c in near if c.policy == "sync"]
    chosen = max(exact or near, key=lambda c: c.speed)
    after = human_duration(seconds)
    fastest = max(candidates, key=lambda c: c.speed)
    speed = f"{human_count(chosen.speed)} {unit}/s"
    if chosen is not fastest:
        speed += f" against {human_count(fastest.speed)} of {fastest.name}"
    if len(near) == 1:
        second = min((c for c in candidates if c is not chosen), key=lambda c: c.loss_by_time)
        return chosen, (
            f"its loss after {after} is the lowest: {chosen.loss_by_time:.4f} against "
            f"{second.loss_by_time:.4f} of {second.name}, which is more than the noise "
            f"({noise:.4f}); {speed}"
        )
    others = ", ".join(c.name for c in near if c is not chosen)
    why = "it is exact" if exact and len(exact) < len(near) else "it is the fastest of these"
    return chosen, (
        f"its loss after {after} ({chosen.loss_by_time:.4f}) does not differ from that of {others} "
        f"by more than the noise ({noise:.4f}), and {why}; {speed}"
    )
