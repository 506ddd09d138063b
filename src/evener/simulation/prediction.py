"""Predictions for a team under each policy: throughput, lost time, bytes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from evener.observe.estimate import Estimate
from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ANCHOR, MAX_ANCHOR, ElChe
from evener.planning.guard import NoGuard
from evener.planning.policies import ApplyPolicy
from evener.planning.sync import SyncPolicy
from evener.simulation.simulated_local import SimulatedLocal
from evener.simulation.simulated_rank import Link, SimulatedRank, SimulatedWindow
from evener.simulation.simulated_sync import SimulatedSync

_SYNC_WINDOWS: Final = 160
_LOCAL_WINDOWS: Final = 36
"""Simulated windows, fewer with local steps, since their windows have more steps."""

_SETTLING: Final = 1 / 3
"""Fraction of them in which the planner settles; the others count."""

_MOST_STEPS: Final = 6000
_LEAST_WINDOWS: Final = 6
"""Limits for very unequal ranks, which have thousands of local steps in a window: the simulation
ends after this number of steps, but not before this number of windows."""

_MOST_APART: Final = 20_000
"""Most local steps of a rank beyond those of the slowest one. Beside a rank of a hundredth of the
speed the anchor still grows to its limit; beside slower ones it grows less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured run, by the figures of its report.

    Attributes:
        policy: Its policy.
        estimate: Samples per second of the team and of its ranks alone.
        parts: Fractions of the ranks' time, by span.
        window_s: Usual seconds of a window.
    """

    policy: ApplyPolicy
    estimate: Estimate
    parts: Mapping[str, float]
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamSpec:
    """A team that may be simulated.

    Attributes:
        ranks: By rank.
        link: The link between them.
        batch_size: Samples of an optimizer step: of the team in SYNC.
        local_batch_size: The same of a local step in CADENCE and ASYNC; if ``None``, the ranks
            divide ``batch_size``, as they should.
        anchor: Local steps of the slowest rank in a window, to begin with.
        max_anchor: Largest anchor.
        divides_updates: Whether in SYNC each rank makes its part of the optimizer's update.
        source: Origin of its speeds, as text.
        notes: Notes about unknown figures.
        measured: The run that has measured it; ``None`` without one.
    """

    ranks: tuple[SimulatedRank, ...]
    link: Link
    batch_size: int
    local_batch_size: int | None = None
    anchor: int = ANCHOR
    max_anchor: int = MAX_ANCHOR
    divides_updates: bool = False
    source: str = ""
    notes: tuple[str, ...] = ()
    measured: MeasuredRun | None = None

    def without(self, rank: int) -> "TeamSpec":
        """Return the team of the other ranks."""
        return replace(self, ranks=(*self.ranks[:rank], *self.ranks[rank + 1 :]))

    def batch_of(self, policy: ApplyPolicy) -> int:
        """Return the samples of an optimizer step under a policy."""
        if policy is ApplyPolicy.SYNC:
            return self.batch_size
        return self.local_batch_size or -(-self.batch_size // len(self.ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPrediction:
    """The prediction for a team under a policy, in the middle of an epoch.

    Attributes:
        policy: The policy.
        batch_size: Samples of an optimizer step.
        sync_batch_size: Those of a step of the team in SYNC.
        samples_per_s: Throughput of the team.
        of_ideal: That over the sum of all ranks' speeds alone; ``None`` if speeds changed, as in a
            measured run.
        wait: Fraction of the time of ranks at work in which they wait for others, from 0 to 1.
        exchange: Fraction in which they exchange gradients, or average.
        bookkeeping: Fraction that is none of these and not compute.
        lost: Fraction that is not compute.
        window_s: Seconds of a window.
        samples_per_window: Of all ranks.
        shares: Fraction of the samples by rank.
        waits: Fraction of each rank's time in which it waits; 0 for a parked one.
        parked: Ranks that the planner parks.
        sent_bytes: Bytes that each rank at work sends in a window; ``None`` if the size of an
            exchange is not known.
        sent_bytes_per_s: The same per second.
    """

    policy: ApplyPolicy
    batch_size: int
    sync_batch_size: int
    samples_per_s: float
    of_ideal: float | None
    wait: float
    exchange: float
    bookkeeping: float
    lost: float
    window_s: float
    samples_per_window: float
    shares: tuple[float, ...]
    waits: tuple[float, ...]
    parked: tuple[int, ...]
    sent_bytes: float | None
    sent_bytes_per_s: float | None


def predict(team: TeamSpec, policy: ApplyPolicy) -> TeamPrediction:
    """Simulate a team and sum up its windows once the planner has settled."""
    windows: list[SimulatedWindow] = []
    simulated, steps = simulate(team, policy), 0
    most = _SYNC_WINDOWS if policy is ApplyPolicy.SYNC else _LOCAL_WINDOWS
    while len(windows) < most:
        windows.append(simulated.window())
        steps += sum(report.steps for report in windows[-1].reports)
        if steps > _MOST_STEPS and len(windows) >= _LEAST_WINDOWS:
            break
    return _sum_up(team, policy, windows[round(_SETTLING * len(windows)) :])


def simulate(team: TeamSpec, policy: ApplyPolicy) -> SimulatedSync | SimulatedLocal:
    """Return a team in the middle of an epoch, with the planner that a run would have."""
    ranks = team.ranks
    members = [str(rank) for rank in range(len(ranks))]
    size = team.batch_of(policy)
    if policy is ApplyPolicy.SYNC:
        planner = SyncPolicy(members, [rank.micro_batch_size for rank in ranks])
        if len(ranks) > 1:
            planner.calibrate([rank.alone(size) for rank in ranks])
        return SimulatedSync(
            ranks,
            team.link,
            planner,
            batch_size=size,
            divides_updates=team.divides_updates,
        )
    alone = [rank.alone(size) for rank in ranks]
    affordable = int(_MOST_APART * min(alone) / max(alone))
    max_anchor = max(team.anchor, min(team.max_anchor, affordable))
    cadence = CadencePolicy(
        members,
        ElChe(len(ranks), team.anchor).with_max_anchor(max_anchor),
        NoGuard(),
        max_batch_diff=_MOST_APART,
        way=policy,
    )
    return SimulatedLocal(ranks, team.link, cadence, batch_size=size)


def _sum_up(
    team: TeamSpec, policy: ApplyPolicy, windows: Sequence[SimulatedWindow]
) -> TeamPrediction:
    ranks = range(len(team.ranks))
    samples = [sum(w.reports[rank].samples for w in windows) for rank in ranks]
    spent_s = [sum(w.elapsed_s[rank] for w in windows) for rank in ranks]
    waits_s = [sum(w.waits_s[rank] for w in windows) for rank in ranks]
    exchanges_s = [sum(w.exchanges_s[rank] for w in windows) for rank in ranks]
    computes_s = [sum(w.reports[rank].compute_s for w in windows) for rank in ranks]
    present = windows[-1].present
    # Parked ranks are not at work; see "present".
    wait = fmean(waits_s[rank] / spent_s[rank] for rank in present)
    exchange = fmean(exchanges_s[rank] / spent_s[rank] for rank in present)
    compute = fmean(computes_s[rank] / spent_s[rank] for rank in present)
    bookkeeping = max(0.0, 1.0 - compute - wait - exchange)
    size = team.batch_of(policy)
    speed = sum(samples) / max(spent_s)
    window_s = max(spent_s) / len(windows)
    alone = {rank: team.ranks[rank].alone(size) for rank in ranks}
    sent_bytes = team.link.sent_bytes(len(present)) if team.link.num_bytes else None
    return TeamPrediction(
        policy=policy,
        batch_size=size,
        sync_batch_size=team.batch_size,
        samples_per_s=speed,
        of_ideal=Estimate(speed=speed, alone=alone).of_ideal,
        wait=wait,
        exchange=exchange,
        bookkeeping=bookkeeping,
        lost=wait + exchange + bookkeeping,
        window_s=window_s,
        samples_per_window=sum(samples) / len(windows),
        shares=tuple(own / sum(samples) for own in samples),
        waits=tuple(waits_s[rank] / spent_s[rank] if rank in present else 0.0 for rank in ranks),
        parked=tuple(rank for rank in ranks if rank not in present),
        sent_bytes=sent_bytes,
        sent_bytes_per_s=None if sent_bytes is None else sent_bytes / window_s,
    )
