"""The ways of training that benchmarks compare, and how they take turns: one rank's part of each.

Every way makes a model and an optimizer of its own, of the same sizes, and trains on random tokens.

A slow rank sleeps until the compute that was just measured (in processor time, the update included)
has lasted as many times longer as the rank is slower, before the exchange that needs it. torch's
DDP exchanges inside backward, so there the delay comes before the exchange of each bucket, and
overlap with the rest stays possible.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from models import GPT, Tokens, mean_loss
from report import ratios, spread
from rounds import TIMEOUT_S, Team, shuffled
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from evener import Ddp, DdpConfig, Sink
from evener.engine.emulate import Slowdown
from evener.planning.shares import apportion

#: The event of a committed window.
Window = Mapping[str, Any]
#: Learning rate of every way; what is learnt does not matter for speed.
LR = 1e-4
POLICIES = ("sync", "cadence", "async")
#: What a way may lose of its ranks' time.
LOST_AIMS = {"evener.sync": 0.06, "evener.cadence": 0.03, "evener.async": 0.02}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all ways of one team train.

    Attributes:
        speeds: Of each rank, relative to the fastest.
        batch_size: Samples of an optimizer step over all ranks.
        micro_batch_size: Samples that are computed at once, by ways that may choose.
        windows: Global batches of a turn; those of evener that count.
        anchor: Local steps of the slowest rank in a window of evener's, at the beginning.
        max_anchor: The most that evener may make of it; ``None`` for its own limit.
        local_windows: Windows of a turn with such steps that count, about.
        width: Width of the model.
        layers: Its blocks.
        seq_len: Tokens of a sample.
    """

    speeds: tuple[float, ...]
    batch_size: int = 64
    micro_batch_size: int = 4
    windows: int = 6
    anchor: int = 8
    max_anchor: int | None = None
    local_windows: int = 4
    width: int = 128
    layers: int = 4
    seq_len: int = 128

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a global batch for each rank, by speed; one at least."""
        return tuple(max(1, share) for share in apportion(self.batch_size, self.speeds))

    @property
    def slow(self) -> dict[int, float]:
        """By how much ranks are to be slowed."""
        return {r: 1 / s for r, s in enumerate(self.speeds) if s < 1}


class Way:
    """One way of training.

    Args:
        team: This rank among the others.
        setting: What they train.

    Attributes:
        name: In tables.
        ceiling: Name of the way whose compute is the same, without an exchange.
    """

    name: str
    ceiling = "ceiling"

    def __init__(self, team: Team, setting: Setting) -> None:
        torch.manual_seed(0)
        self.team, self.setting = team, setting
        self.rank, self.world_size = team.rank, team.world_size
        self.slowdown = Slowdown(setting.slow.get(self.rank, 1.0))
        self.data = Tokens(4096, setting.seq_len)
        self.model = GPT(width=setting.width, layers=setting.layers, seq_len=setting.seq_len)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the fastest one on every device."""
        return torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def run(self, steps: int) -> float:
        """Train on ``steps`` global batches; return the team's samples per second.

        All ranks call it together. The first step is not timed: other ways have just had caches
        and cores.
        """
        done, elapsed_s = self.timed(steps)
        return done / max(s for [s] in self.team.gather([elapsed_s]))

    def timed(self, steps: int) -> tuple[int, float]:
        """Return samples and seconds of some steps on this rank, from when all ranks are there."""
        self.warm_up()
        self.team.barrier()
        started_s = time.perf_counter()
        done = sum(self.step(step) for step in range(steps))
        return done, time.perf_counter() - started_s

    def warm_up(self) -> None:
        """Train a step that is not timed."""
        self.step(0)

    def step(self, number: int) -> int:
        """Do this rank's part of a global batch; return the samples that count."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what it holds."""

    def batch(self, step: int, size: int) -> Tensor:
        """Return some samples."""
        return torch.stack([self.data[step * size + i] for i in range(size)])

    def local_step(self, number: int, size: int) -> None:
        """Make an optimizer step on samples of this rank alone, in micro-batches."""
        started = self.slowdown.start()
        micro = self.setting.micro_batch_size
        for first in range(0, size, micro):
            part = min(micro, size - first)
            loss = mean_loss(self.model, self.batch(number, part))
            (loss * (part / size)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.slowdown.after(started)


class Solo(Way):
    """One rank alone over whole global batches; the others wait without computing."""

    def __init__(self, team: Team, setting: Setting, alone: int) -> None:
        super().__init__(team, setting)
        self.name = f"solo.{alone}"
        self.alone = alone

    def run(self, steps: int) -> float:
        """See ``Way``; a slow rank gets fewer steps."""
        return super().run(max(1, round(steps * self.setting.speeds[self.alone] / 2)))

    def warm_up(self) -> None:
        """Do nothing: a global batch of a slow rank takes long, and has many micro-batches."""

    def step(self, number: int) -> int:
        """See ``Way``."""
        if self.rank == self.alone:
            self.local_step(number, self.setting.batch_size)
        return self.setting.batch_size


class Ceiling(Way):
    """All ranks side by side, each on its part of the batch with an optimizer step, no exchange.

    What the machine's shared cores, caches and memory take, every exchange of gradients loses too.
    """

    name = "ceiling"

    def run(self, steps: int) -> float:
        """See ``Way``; the sum of what each rank did in its own time."""
        done, elapsed_s = self.timed(steps)
        return sum(speed for [speed] in self.team.gather([done / elapsed_s]))

    def step(self, number: int) -> int:
        """See ``Way``; samples of this rank alone."""
        share = self.setting.shares[self.rank]
        self.local_step(number, share)
        return share


class LocalCeiling(Ceiling):
    """As ``Ceiling``, with an optimizer step for each micro-batch."""

    name = ceiling = "ceiling.local"

    def step(self, number: int) -> int:
        """See ``Ceiling``; whole micro-batches."""
        size = self.setting.micro_batch_size
        steps = max(1, round(self.setting.shares[self.rank] / size))
        for step in range(steps):
            self.local_step(number + step, size)
        return steps * size


class TorchDdp(Way):
    """torch's DDP as its tutorial has it: equal shares, the optimizer as it comes.

    Attributes:
        hook: Exchanges a bucket.
    """

    name = "torch.ddp"
    hook = staticmethod(allreduce_hook)

    def __init__(self, team: Team, setting: Setting) -> None:
        super().__init__(team, setting)
        self.share = setting.batch_size // self.world_size
        self.ddp = self.wrap()
        if self.slowdown.factor > 1 or self.hook is not allreduce_hook:
            self.ddp.register_comm_hook(None, self.before_exchange)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """See ``Way``."""
        return torch.optim.AdamW(self.model.parameters(), lr=LR)

    def wrap(self) -> DistributedDataParallel:
        """Return the model that exchanges its gradients."""
        return DistributedDataParallel(self.model)

    def step(self, number: int) -> int:
        """See ``Way``."""
        self.since = self.slowdown.start()
        mean_loss(self.ddp, self.batch(number, self.share)).backward()
        started = self.slowdown.start()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.slowdown.after(started)
        return self.share * self.world_size

    def before_exchange(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Make buckets of a slow rank ready as late as its compute so far would have been."""
        self.slowdown.after(self.since)
        self.since = self.slowdown.start()
        return self.hook(dist.group.WORLD, bucket)


class TunedDdp(TorchDdp):
    """torch's DDP as fast as its options make it here, with a fused optimizer."""

    name = "torch.ddp.tuned"

    def make_optimizer(self) -> torch.optim.Optimizer:
        """See ``Way``."""
        return Way.make_optimizer(self)

    def wrap(self) -> DistributedDataParallel:
        """See ``TorchDdp``."""
        return DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=100
        )


class Evener(Way):
    """evener, by its public interface.

    Its speed is that of the windows after the first, by their events, without the tail of an epoch,
    in which ranks that make local steps run out of samples one by one. A turn is an epoch here, and
    short; elsewhere an epoch has hundreds of windows.

    Attributes:
        turns: The events of the windows of each turn; on the rank that records them.
        num_samples: Samples of a turn.
    """

    def __init__(
        self,
        team: Team,
        setting: Setting,
        policy: str = "sync",
        *,
        equal: bool = False,
        name: str = "",
        **options: Any,
    ) -> None:
        super().__init__(team, setting)
        self.name = name or ("evener.equal_split" if equal else f"evener.{policy}")
        self.is_local = policy != "sync"
        self.ceiling = "ceiling.local" if self.is_local else "ceiling"
        self.turns: list[list[Window]] = []
        self.windows = Windows()
        self.ddp = Ddp.setup(
            self.model,
            self.optimizer,
            policy=policy,
            devices="cpu",
            precision="fp32",
            sinks=[self.windows],
            config=DdpConfig(
                emulate_slow=setting.slow,
                partition_ratios=[1.0] * team.world_size if equal else None,
                anchor=setting.anchor if self.is_local else None,
                max_anchor=setting.max_anchor if self.is_local else None,
                timeout_s=TIMEOUT_S,
                quiet=True,
                **options,
            ),
            environment=team.environment(),
        )
        # A local step takes a micro-batch: what a rank computes at once is the same everywhere.
        steps = round(sum(setting.anchor * s / min(setting.speeds) for s in setting.speeds))
        local_turn = (setting.local_windows + 2) * steps * setting.micro_batch_size
        turn = (setting.windows + 1) * setting.batch_size
        self.num_samples = local_turn if self.is_local else turn
        self.loader = self.ddp.loader(
            Tokens(self.num_samples, setting.seq_len),
            batch_size=setting.micro_batch_size if self.is_local else setting.batch_size,
            micro_batch_size=setting.micro_batch_size,
        )

    def run(self, steps: int) -> float:
        """Train for an epoch, however many steps that has."""
        self.windows.taken = []
        self.team.barrier()
        for ids in self.loader.epoch(len(self.turns)):
            self.ddp.backward(mean_loss(self.model, ids))
            self.ddp.step()
        self.turns.append(self.windows.taken)
        # Events are on one rank, the lowest that takes part.
        [speed] = max(self.team.gather([speed_of(self.inner(self.windows.taken))]))
        return speed

    def inner(self, windows: Sequence[Window]) -> Sequence[Window]:
        """Return the windows of a turn that count, if there are others than at its edges."""
        full = [w for w in windows if not self.is_tail(w, windows)]
        return full[1:] or full or windows

    def is_tail(self, window: Window, windows: Sequence[Window]) -> bool:
        """Return whether ranks ran out of samples in a window of local steps."""
        if not self.is_local:
            return False
        samples = [sum(row["samples"] for row in w["ranks"]) for w in windows]
        return window is windows[-1] or (
            window is windows[-2] and samples[-2] < 0.75 * max(samples[:-2], default=0)
        )

    def close(self) -> None:
        """Leave the team."""
        self.ddp.close()


class Windows(Sink):
    """Keeps the events of committed windows."""

    def __init__(self) -> None:
        self.taken: list[Window] = []

    def emit(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        if event["type"] == "window":
            self.taken.append(event)

    def close(self) -> None:
        """Hold nothing back."""


def speed_of(windows: Sequence[Window]) -> float:
    """Return the samples per second of some windows in a row; 0 if there are none."""
    times_s: dict[int, float] = {}
    for window in windows:
        for row in window["ranks"]:
            times_s[row["rank"]] = times_s.get(row["rank"], 0.0) + row["elapsed_s"]
    samples = sum(row["samples"] for window in windows for row in window["ranks"])
    # A rank that was parked was not there for all of it.
    return samples / max(times_s.values()) if times_s else 0.0


def lost_time(windows: Sequence[Window]) -> dict[str, float]:
    """Return the parts of ranks' time that were not compute, from 0 to 1: the mean over ranks.

    What is neither compute nor waiting nor exchange is bookkeeping: fetching data, copying and
    checking gradients, planning, events, the loop.
    """
    keys = ("elapsed_s", "compute_s", "wait_s", "sync_s")
    rows = [(row["rank"], [row[key] for key in keys]) for w in windows for row in w["ranks"]]
    ranks = {rank for rank, times in rows if times[0]}  # others were parked throughout
    sums = np.array([np.sum([t for rank, t in rows if rank == one], axis=0) for one in ranks])
    _, compute, wait, exchange = (sums / sums[:, :1]).mean(axis=0).tolist()
    return {"wait": wait, "exchange": exchange, "bookkeeping": 1.0 - compute - wait - exchange}


class Comparison:
    """All ways of one team, interleaved; one rank's part.

    Args:
        team: This rank among the others.
        ways: What takes turns: each rank alone, ceilings, the rest.
        windows: Global batches of a turn.
    """

    def __init__(self, team: Team, ways: Sequence[Way], windows: int) -> None:
        self._team, self._windows = team, windows
        self._ways = {way.name: way for way in ways}
        self._figures: dict[str, list[float]] = {name: [] for name in self._ways}

    def run(self, rounds: int) -> None:
        """Take a warm-up and so many rounds, in an order that changes."""
        for number, names in enumerate(shuffled(list(self._ways), rounds + 1)):
            for name in names:
                self._figures[name].append(self._ways[name].run(self._windows if number else 1))
            shown = ", ".join(f"{n} {v[-1]:.1f}" for n, v in self._figures.items())
            self._team.tell(f"{f'round {number}' if number else 'warm-up'}: samples/s {shown}")

    def rows(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row for each way, which begins with its name and the facts."""
        figures = {name: values[1:] for name, values in self._figures.items()}
        alone = [figures[way.name] for way in self._ways.values() if isinstance(way, Solo)]
        ideal = [sum(speeds) for speeds in zip(*alone, strict=True)]
        rows = []
        for name, way in self._ways.items():
            beside = {
                "of_ideal": ideal,
                "of_ceiling": figures.get(way.ceiling, figures["ceiling"]),
                "of_tuned_ddp": figures.get(TunedDdp.name),
            }
            row: dict[str, Any] = {"name": name, **facts, **spread("samples_per_s", figures[name])}
            for key, others in beside.items():
                row |= spread(key, ratios(figures[name], others)) if others else {}
            if isinstance(way, Evener) and way.turns[-1]:  # only one rank has the events
                row |= _describe(way)
            rows.append(row)
        return rows

    def close(self) -> None:
        """Give back what ways hold."""
        for way in self._ways.values():
            way.close()


def _describe(way: Evener) -> dict[str, Any]:
    """Return what a way of evener lost, and what its windows were."""
    # Of a turn in which this rank was parked, another one has the events.
    lost = [lost_time(way.inner(turn)) for turn in way.turns[1:] if turn]
    windows = [window for turn in way.turns[1:] for window in turn]
    anchors = [window["anchor"] for window in windows if "anchor" in window]
    return {
        **spread("lost", [sum(parts.values()) for parts in lost]),
        "lost_aim": LOST_AIMS.get(way.name),
        **{f"lost_{p}": round(float(np.median([one[p] for one in lost])), 4) for p in lost[0]},
        "shares": [row["samples"] for row in windows[-1]["ranks"]],
        "anchor": max(anchors, default=None),
        "parked": round(sum(bool(w["parked"]) for w in windows) / len(windows), 3),
    }
