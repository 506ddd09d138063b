"""Measures what ranks do alone, side by side, and with an equal split; then forgets it."""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from evener.averaging.gradients import GradientAverager
from evener.averaging.norms import Reading
from evener.comm.base import Communicator
from evener.engine.loaders.training import split
from evener.engine.share import Stopwatch
from evener.engine.sync import SyncEngine
from evener.loop.assembly import Assembly
from evener.planning.shares import apportion

#: Runs one micro-batch of the given samples forward and backward: calls ``Ddp.backward``.
TrainMicroBatch = Callable[[Sequence[int]], None]
#: How often each way is run, after a short first time; the median counts.
ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Weight units per second; medians over rounds.

    Attributes:
        solo: Each rank alone, with an optimizer step for each global batch, others idle.
        side_by_side: The sum of what ranks do when all work at the same time, on shares by speed,
            each stepping its optimizer by itself, without any exchange; ``None`` for one rank.
        team: All ranks on shares by speed, which exchange gradients and update as the team does;
            ``None`` for one rank, and where the team's policy exchanges none.
        equal_split: All ranks with equal shares, in the same way; ``None`` where the team's policy
            exchanges no gradients.
    """

    solo: tuple[float, ...]
    side_by_side: float | None
    team: float | None
    equal_split: float | None


class Rehearsal:
    """Runs windows that count for nothing: the training state is put back afterwards.

    Ways of running are interleaved over the rounds, so that a machine whose speed drifts does not
    favour one of them. Speeds of emulated ranks include the emulation.
    """

    def __init__(
        self,
        assembly: Assembly,
        train_micro_batch: TrainMicroBatch,
        *,
        batch_size: int,
        micro_batch_size: int,
    ) -> None:
        self._assembly = assembly
        self._engine = assembly.engine
        self._team = assembly.team
        self._train = train_micro_batch
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._sharded = assembly.state.sharded
        self._alone = GradientAverager(assembly.flat, Communicator())
        self._together = GradientAverager(assembly.flat, assembly.comm)

    def measure(self) -> Speeds | None:
        """Measure all ways; all ranks call it together, before or between epochs.

        Returns:
            The speeds, the same on every rank; ``None`` when a rank was told to stop.
        """
        world_size, ranks = self._team.world_size, range(self._team.world_size)
        ways = [[self._batch_size * (rank == one) for rank in ranks] for one in ranks]
        if world_size > 1:
            ways.append(self._shares_by_speed())
        num_alone = len(ways)
        if isinstance(self._engine, SyncEngine):
            if world_size > 1:
                ways.append(ways[-1])
            ways.append([*apportion(self._batch_size, [1.0] * world_size)])
        speeds: list[list[float]] = [[] for _ in ways]
        is_divided = self._sharded.is_on
        self._sharded.join()
        state = self._remember()
        try:
            for number in range(ROUNDS + 1):
                for place, shares in enumerate(ways):
                    alone = place < num_alone
                    self._use(is_divided=is_divided and not alone)
                    speeds[place].append(self._run(shares, alone=alone, short=number == 0))
                if self._engine.rounds.stopping:
                    return None
        finally:
            self._restore(state)
            self._use(is_divided=is_divided)
        # The first round, a short one, pays for caches and allocations.
        medians = [median(of_way[1:]) for of_way in speeds]
        together = medians[num_alone:]
        return Speeds(
            solo=tuple(medians[:world_size]),
            side_by_side=medians[world_size] if world_size > 1 else None,
            team=together[0] if len(together) > 1 else None,
            equal_split=together[-1] if together else None,
        )

    def _use(self, *, is_divided: bool) -> None:
        """Divide the update among ranks, or give each rank the whole; all call it together."""
        if not is_divided:
            self._sharded.join()
        elif not self._sharded.is_on:
            self._sharded.divide(self._team.comm)

    def _shares_by_speed(self) -> list[int]:
        """Return a global batch's shares as ranks were measured; alike where nothing is known."""
        speeds = self._engine.policy.solo_speeds(self._batch_size)
        known = speeds if any(speeds) else [1.0] * self._team.world_size
        return [*self._team.introduce([*apportion(self._batch_size, known)])[0]]

    def _run(self, shares: Sequence[int], *, alone: bool, short: bool) -> float:
        """Run a window in one way; return weight units per second.

        They count by the slowest rank's clock, and where ranks do not wait for one another, each
        by its own.
        """
        engine, team = self._engine, self._team
        self._meet([0.0, 0.0])
        started_s = time.perf_counter()
        start, count = sum(shares[: team.rank]), shares[team.rank]
        count = min(count, self._micro_batch_size) if short else count
        samples = range(start, start + count)
        avoid_ones = engine.options.avoid_ones
        parts = split(samples, self._micro_batch_size, avoid_ones=avoid_ones)
        weight = 0.0
        if parts or not alone:
            share = engine.open_share(len(parts))
            for part in parts:
                share.start_micro_batch(len(part))
                self._train(part)
                share.end_micro_batch()
            weight = share.weight
            self._update(weight, alone=alone)
        elapsed_s = time.perf_counter() - started_s
        worked = [pair for pair in self._meet([weight, elapsed_s]) if pair[0]]
        if alone:
            return math.fsum(weight / own_s for weight, own_s in worked)
        return math.fsum(weight for weight, _ in worked) / max(own_s for _, own_s in worked)

    def _update(self, weight: float, *, alone: bool) -> None:
        engine = self._engine
        total = weight if alone else math.fsum(row[0] for row in self._meet([weight]))
        scale = engine.share.scale_of()
        own = self._alone if alone else self._together
        averager = self._sharded if self._sharded.is_on else own
        watch = Stopwatch(engine.options.slowdown)
        own.judge(Reading(own.gather()).read())
        averager.average(scale, total, what="a rehearsal", max_norm=engine.options.max_grad_norm)
        if not alone:  # an exchange takes no longer on a slow device
            watch = Stopwatch(engine.options.slowdown)
        flat = self._assembly.flat
        if self._sharded.is_on:
            engine.options.guards.step(engine.optimizers, self._sharded.stepping(engine.optimizers))
        else:
            flat.mask_untouched()
            engine.options.guards.step(engine.optimizers)
        flat.attach_data()
        flat.zero_()
        watch.stop()
        if not alone and (self._sharded.is_on or engine.options.unlike_devices):
            own.unify(None, what="parameters of a rehearsal")

    def _meet(self, payload: Sequence[float]) -> list[Sequence[float]]:
        return [*self._engine.collectives.ask("measuring speeds", payload).values()]

    def _remember(self) -> dict[str, Any]:
        return {
            "data": [group.data.clone() for group in self._assembly.flat.groups],
            "optimizers": [copy.deepcopy(o.state_dict()) for o in self._assembly.optimizers],
        }

    @torch.no_grad()
    def _restore(self, state: dict[str, Any]) -> None:
        for group, data in zip(self._assembly.flat.groups, state["data"], strict=True):
            group.data.copy_(data)
        for optimizer, saved in zip(self._assembly.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._assembly.flat.zero_()
        self._assembly.buffers.restore()
