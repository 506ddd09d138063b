"""The ways of training that benchmarks compare: one model, one rank's part of each.

Every way makes a model and an optimizer of its own, of the same sizes, and trains on random tokens.
``run`` trains some global batches and returns the team's samples per second; all ranks call it
together.

A rank is slow by sleeping (``Setting.sleeps``), or by what the process is under, such as a quota of
processor time. Who sleeps does so until the compute that was just measured (in processor time, the
update included) has lasted as many times longer as the rank is slower, before the exchange that
needs it. torch's DDP exchanges inside backward, so there the delay comes before the exchange of
each bucket, and overlap with the rest stays possible.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import GPT, Tokens, mean_loss
from rounds import TIMEOUT_S, Team
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from evener import Ddp, DdpConfig, Sink
from evener.engine.emulate import Slowdown
from evener.planning.shares import apportion

#: The event of a committed window.
Window = Mapping[str, Any]
#: Learning rate of every way; what is learnt does not matter for speed.
LR = 1e-4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all ways of one team train.

    Attributes:
        speeds: Of each rank, relative to the fastest.
        batch_size: Samples of an optimizer step over all ranks.
        micro_batch_size: Samples that are computed at once, by ways that may choose.
        windows: Global batches of a turn of evener's; an epoch.
        anchor: Local steps of the slowest rank in a window of evener's, at the beginning.
        max_anchor: The most that evener may make of it; ``None`` for its own limit.
        local_windows: Windows of a turn with such steps, about.
        sleeps: Whether slow ranks sleep; else something outside of them makes them slow.
        width: Width of the model.
        layers: Its blocks.
        seq_len: Tokens of a sample.
        sample_sleep_s: How long a rank sleeps for each sample, as it would wait for a device.
    """

    speeds: tuple[float, ...]
    batch_size: int = 64
    micro_batch_size: int = 4
    windows: int = 8
    anchor: int = 8
    max_anchor: int | None = None
    local_windows: int = 6
    sleeps: bool = True
    width: int = 128
    layers: int = 4
    seq_len: int = 128
    sample_sleep_s: float = 0.0

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of a global batch for each rank, by speed; one at least."""
        return tuple(max(1, share) for share in apportion(self.batch_size, self.speeds))

    @property
    def slow(self) -> dict[int, float]:
        """By how much ranks are to be slowed by sleeping."""
        return {r: 1 / s for r, s in enumerate(self.speeds) if self.sleeps and s < 1}

    @property
    def local_turn(self) -> int:
        """Samples of some windows in which the slowest rank makes ``anchor`` local steps."""
        steps = sum(self.anchor * s / min(self.speeds) for s in self.speeds)
        return self.local_windows * round(steps) * self.micro_batch_size


class SleepingGPT(GPT):
    """The model, which waits for each sample as long as the setting says."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(width=setting.width, layers=setting.layers, seq_len=setting.seq_len)
        self.sample_sleep_s = setting.sample_sleep_s

    def forward(self, ids_BT: Tensor) -> Tensor:
        """See ``GPT``."""
        if self.sample_sleep_s:
            time.sleep(self.sample_sleep_s * len(ids_BT))
        return super().forward(ids_BT)


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
        self.model: nn.Module = SleepingGPT(setting)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The fastest one on every device."""
        return torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)

    def run(self, steps: int) -> float:
        """Trains on ``steps`` global batches; the team's samples per second."""
        self.warm_up()
        with self.clock() as clock:
            for step in range(steps):
                self.step(step)
        return (
            steps * self.samples_of_step() / max(s for [s] in self.team.gather([clock.elapsed_s]))
        )

    def warm_up(self) -> None:
        """Trains a step that is not timed: other ways have just had caches and cores."""
        self.step(0)

    def step(self, number: int) -> None:
        """This rank's part of a global batch."""
        raise NotImplementedError

    def samples_of_step(self) -> int:
        """Samples of ``step`` over all ranks."""
        return self.setting.batch_size

    def close(self) -> None:
        """Gives back what it holds."""

    @contextmanager
    def clock(self) -> "Iterator[Clock]":
        """Measures what follows, from when all ranks are there."""
        self.team.barrier()
        clock, started_s = Clock(), time.perf_counter()
        yield clock
        clock.elapsed_s = time.perf_counter() - started_s

    def batch(self, step: int, size: int) -> Tensor:
        """Some samples."""
        return torch.stack([self.data[step * size + i] for i in range(size)])

    def accumulate(self, step: int, size: int) -> None:
        """Computes the gradient of ``size`` samples, in micro-batches."""
        micro = self.setting.micro_batch_size
        for first in range(0, size, micro):
            part = min(micro, size - first)
            loss = mean_loss(self.model, self.batch(step, part))
            (loss * (part / size)).backward()

    def update(self) -> None:
        """Steps the optimizer on the gradients that are there."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Clock:
    """The seconds of a turn on this rank, when it is over."""

    elapsed_s: float = 0.0


class Solo(Way):
    """One rank alone over whole global batches; the others wait without computing."""

    def __init__(self, team: Team, setting: Setting, alone: int) -> None:
        super().__init__(team, setting)
        self.name = f"solo.{alone}"
        self.alone = alone

    def warm_up(self) -> None:
        """Does nothing: a global batch of a slow rank takes long, and has many micro-batches."""

    def step(self, number: int) -> None:
        """See ``Way``."""
        if self.rank == self.alone:
            started = self.slowdown.start()
            self.accumulate(number, self.setting.batch_size)
            self.update()
            self.slowdown.after(started)


class Ceiling(Way):
    """All ranks side by side, each on its part of the batch with an optimizer step, no exchange.

    What the machine's shared cores, caches and memory take, every exchange of gradients loses too.
    """

    name = "ceiling"

    def run(self, steps: int) -> float:
        """See ``Way``; the sum of what each rank did in its own time."""
        self.warm_up()
        with self.clock() as clock:
            done = sum(self.own_part(step) for step in range(steps))
        return sum(speed for [speed] in self.team.gather([done / clock.elapsed_s]))

    def step(self, number: int) -> None:
        """See ``Way``."""
        self.own_part(number)

    def own_part(self, number: int) -> int:
        """Samples of this rank's part of a global batch, which it has trained on."""
        share = self.setting.shares[self.rank]
        self.local_step(number, share)
        return share

    def local_step(self, number: int, size: int) -> None:
        """An optimizer step on samples of this rank alone."""
        started = self.slowdown.start()
        self.accumulate(number, size)
        self.update()
        self.slowdown.after(started)


class LocalCeiling(Ceiling):
    """As ``Ceiling``, with an optimizer step for each micro-batch."""

    name = ceiling = "ceiling.local"

    def own_part(self, number: int) -> int:
        """See ``Ceiling``; whole micro-batches."""
        size = self.setting.micro_batch_size
        steps = max(1, round(self.setting.shares[self.rank] / size))
        for step in range(steps):
            self.local_step(number + step, size)
        return steps * size


class TorchDdp(Way):
    """torch's DDP as its tutorial has it: equal shares, the optimizer as it comes."""

    name = "torch.ddp"

    def __init__(self, team: Team, setting: Setting) -> None:
        super().__init__(team, setting)
        self.share = setting.batch_size // self.world_size
        self.ddp = self.wrap(self.model)
        self.delay = Delay(self.slowdown)
        if self.slowdown.factor > 1:
            # Libraries wrap the model that is wrapped in DDP.
            [ddp] = [m for m in self.ddp.modules() if isinstance(m, DistributedDataParallel)]
            ddp.register_comm_hook(None, self.delay.before_exchange)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """See ``Way``."""
        return torch.optim.AdamW(self.model.parameters(), lr=LR)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model that exchanges its gradients; may replace ``optimizer``."""
        return DistributedDataParallel(model)

    def samples_of_step(self) -> int:
        """See ``Way``."""
        return self.share * self.world_size

    def step(self, number: int) -> None:
        """See ``Way``."""
        self.delay.start()
        self.backward(mean_loss(self.ddp, self.batch(number, self.share)))
        started = self.slowdown.start()
        self.update()
        self.slowdown.after(started)

    def backward(self, loss: Tensor) -> None:
        """Computes gradients and exchanges them."""
        loss.backward()


class TunedDdp(TorchDdp):
    """torch's DDP as fast as its options make it here, with a fused optimizer."""

    name = "torch.ddp.tuned"

    def make_optimizer(self) -> torch.optim.Optimizer:
        """See ``Way``."""
        return Way.make_optimizer(self)

    def wrap(self, model: nn.Module) -> nn.Module:
        """See ``TorchDdp``."""
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=100
        )


class Delay:
    """Makes buckets of a slow rank ready as late as its compute so far would have been."""

    def __init__(self, slowdown: Slowdown) -> None:
        self.slowdown = slowdown
        self.since = slowdown.start()

    def start(self) -> None:
        """Compute begins."""
        self.since = self.slowdown.start()

    def before_exchange(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook of DDP."""
        self.slowdown.after(self.since)
        self.since = self.slowdown.start()
        return allreduce_hook(dist.group.WORLD, bucket)


class Evener(Way):
    """evener, by its public interface.

    Its speed is that of the windows after the first, by their events, without the tail of an epoch,
    in which ranks that make local steps run out of samples one by one. A turn is an epoch here, and
    short; elsewhere an epoch has hundreds of windows. (A loop cannot be left after some windows
    instead: a rank without a share does not come out of the loader for them.)

    Attributes:
        turns: The events of the windows of each turn; on the rank that records them.
        walls_s: How long each turn took this rank, by its own clock around the loop.
    """

    def __init__(
        self, team: Team, setting: Setting, policy: str = "sync", *, equal: bool = False
    ) -> None:
        super().__init__(team, setting)
        self.name = "evener.equal_split" if equal else f"evener.{policy}"
        self.is_local = policy != "sync"
        self.ceiling = "ceiling.local" if self.is_local else "ceiling"
        self.turns: list[list[Window]] = []
        self.walls_s: list[float] = []
        self.windows = Windows()
        ranks = len(setting.speeds)
        self.ddp = Ddp.setup(
            self.model,
            self.optimizer,
            policy=policy,
            devices="cpu",
            precision="fp32",
            sinks=[self.windows],
            config=DdpConfig(
                emulate_slow=setting.slow,
                partition_ratios=[1.0] * ranks if equal else None,
                anchor=setting.anchor if self.is_local else None,
                max_anchor=setting.max_anchor if self.is_local else None,
                timeout_s=TIMEOUT_S,
                quiet=True,
            ),
            environment=team.environment(),
        )
        samples = setting.windows * setting.batch_size
        self.loader = self.ddp.loader(
            Tokens(setting.local_turn if self.is_local else samples, setting.seq_len),
            # A local step takes a micro-batch: what a rank computes at once is the same everywhere.
            batch_size=setting.micro_batch_size if self.is_local else setting.batch_size,
            micro_batch_size=setting.micro_batch_size,
        )

    def run(self, steps: int) -> float:
        """Trains for an epoch, however many steps that has."""
        self.windows.taken = []
        with self.clock() as clock:
            for ids in self.loader.epoch(len(self.walls_s)):
                self.ddp.backward(mean_loss(self.model, ids))
                self.ddp.step()
        self.walls_s.append(clock.elapsed_s)
        self.turns.append(self.windows.taken)
        # Events are on one rank, the lowest that takes part.
        [speed] = max(self.team.gather([speed_of(self.inner(self.windows.taken))]))
        return speed

    def inner(self, windows: Sequence[Window]) -> Sequence[Window]:
        """The windows of a turn that count, as far as there are others than at its edges."""
        full = [w for w in windows if not self.is_tail(w, windows)]
        return full[1:] or full or windows

    def is_tail(self, window: Window, windows: Sequence[Window]) -> bool:
        """Whether ranks ran out of samples in a window of local steps."""
        if not self.is_local:
            return False
        samples = [sum(row["samples"] for row in w["ranks"]) for w in windows]
        return window is windows[-1] or (
            window is windows[-2] and samples[-2] < 0.75 * max(samples[:-2], default=0)
        )

    def close(self) -> None:
        """Leaves the team."""
        self.ddp.close()


class Windows(Sink):
    """Keeps the events of committed windows."""

    def __init__(self) -> None:
        self.taken: list[Window] = []

    def emit(self, event: Mapping[str, Any]) -> None:
        """Takes an event."""
        if event["type"] == "window":
            self.taken.append(event)

    def close(self) -> None:
        """Holds nothing back."""


def speed_of(windows: Sequence[Window]) -> float:
    """Samples per second of some windows in a row; 0 where none is given."""
    times_s: dict[int, float] = {}
    for window in windows:
        for row in window["ranks"]:
            times_s[row["rank"]] = times_s.get(row["rank"], 0.0) + row["elapsed_s"]
    samples = sum(row["samples"] for window in windows for row in window["ranks"])
    # A rank that was parked was not there for all of it.
    return samples / max(times_s.values()) if times_s else 0.0
