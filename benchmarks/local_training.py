"""Training by local steps, with all ranks in one process: exact, and without a network.

``train`` makes the windows of CADENCE and ASYNC one after another, with the outer optimizer and the
rounding of evener itself. The time is emulated: how long a step of a rank takes is given, and so is
when an average lands. ``tests/numerics/test_convergence.py`` holds it to the real engine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.averaging.outer import OuterSGD
from evener.comm.rounding import BLOCK, pack_sum, packed_bytes, unpack

#: The batch of a rank's local step with this number: window, rank, step of the rank in the window.
Batches = Callable[[int, int, int], Any]


@dataclass(frozen=True, kw_only=True)
class Local:
    """How ranks train between averages, and what is done with the average.

    Attributes:
        ranks: Ranks; one rank with ``steps=1`` is SYNC.
        steps: Local steps of the fastest rank in a window.
        speeds: Speed of each rank relative to the fastest one; all equal by default.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum; 0 and a rate of 1 average.
        late: ASYNC: part of the next window's steps after which an average lands; 0 for CADENCE.
        base: ASYNC: what a rank continues from until the average lands: ``"own"`` parameters,
            those that the outer optimizer makes of its own difference (``"eager"``), of its own
            and what the others had the last time (``"mixed"``), or the last consensus (``"late"``).
        power: A rank's weight is its number of steps to this power.
        bits: Bits of a number on its way between ranks, with error feedback.
        warmup: Part of the run in which ranks average after every step.
        shrink: Make windows shorter as the learning rate falls.
        moments: Average the moments of Adam, too.
        pull: Part of the way to the consensus that working copies move.
    """

    ranks: int = 2
    steps: int = 16
    speeds: tuple[float, ...] = ()
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    late: float = 0.0
    base: str = "own"
    power: float = 1.0
    bits: int = 32
    warmup: float = 0.0
    shrink: bool = False
    moments: bool = False
    pull: float = 1.0

    def steps_of(self, rank: int, steps: int) -> int:
        """Return how many steps a rank makes while the fastest one makes ``steps``."""
        return max(1, round(steps * self.speeds[rank])) if self.speeds else steps


class Outcome(NamedTuple):
    """What came of a training.

    Attributes:
        losses: Training loss of every local step: window by window, rank by rank.
        consensus: The parameters in the end, as one vector.
        windows: Averages.
        sent_bytes: Bytes that a rank has sent, as a ring moves them.
        divergence: The largest divergence of a window.
    """

    losses: list[float]
    consensus: Tensor
    windows: int
    sent_bytes: int
    divergence: float


class _Rank:
    """A rank's working copy, its optimizer, and what rounding took from its differences."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.parameters = list(model.parameters())
        self.lost = torch.zeros(0)
        self.base = torch.zeros(0)

    @property
    def vector(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.parameters).detach()

    @torch.no_grad()
    def add(self, difference: Tensor) -> None:
        nn.utils.vector_to_parameters(self.vector + difference, self.parameters)


def train(
    how: Local,
    make: Callable[[], tuple[nn.Module, Optimizer]],
    batches: Batches,
    loss_of: Callable[[nn.Module, Any], Tensor],
    total: int,
    rate: Callable[[float], float] = lambda _: 1.0,
    max_norm: float | None = None,
) -> Outcome:
    """Train for so many local steps of all ranks together.

    Args:
        how: The way of training.
        make: Makes a rank's model and its optimizer, alike at every call.
        batches: The batch of a local step.
        loss_of: The loss of a model on a batch.
        total: Local steps of all ranks.
        rate: Factor of the learning rate, by the part of the run that is done.
        max_norm: Gradients are clipped to this norm.
    """
    ranks = [_Rank(*make()) for _ in range(how.ranks)]
    base_rates = [group["lr"] for group in ranks[0].optimizer.param_groups]
    consensus = nn.Parameter(ranks[0].vector.clone())
    outer = OuterSGD([consensus], lr=how.outer_lr, momentum=how.outer_momentum)
    wire = _Wire(how.bits, consensus.numel(), how.ranks)
    losses: list[float] = []
    done = windows = 0
    divergence = 0.0
    others = [torch.zeros_like(consensus.data) for _ in ranks]
    has_landed = True
    while done < total:
        full = how.steps
        if how.warmup and done < how.warmup * total:
            full = 1
        elif how.shrink:
            full = max(1, round(full * rate(done / total)))
        counts = [how.steps_of(rank, full) for rank in range(how.ranks)]
        planned = sum(counts)
        if planned > total - done:
            counts = _cut(counts, total - done)
        for number, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
            lands_after = math.ceil(how.late * count) if not has_landed else -1
            for step in range(count):
                if step == lands_after:
                    rank.add(consensus.data - rank.base)
                factor = rate((done + planned * step / max(1, counts[number])) / total)
                for group, base in zip(rank.optimizer.param_groups, base_rates, strict=True):
                    group["lr"] = base * factor
                loss = loss_of(rank.model, batches(windows, number, step))
                loss.backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(rank.parameters, max_norm)
                rank.optimizer.step()
                rank.optimizer.zero_grad()
                losses.append(float(loss.detach()))
            if lands_after >= count:
                rank.add(consensus.data - rank.base)
        done += sum(counts)
        windows += 1
        weights = _weights(counts, how.power)
        own = [consensus.data - rank.vector for rank in ranks]
        average = wire.sum([w * d for w, d in zip(weights, own, strict=True)])
        size = float(consensus.data.norm())
        gaps = [float((d - average).norm()) / size for d in own]
        divergence = max(divergence, *gaps)
        # As evener's own first window, in which it learns the speeds.
        has_landed = how.late == 0 or windows == 1 or done >= total
        if not has_landed:
            for rank, weight, mine, theirs in zip(ranks, weights, own, others, strict=True):
                rank.base = _base(how.base, rank, consensus, outer, weight, mine, theirs)
                rank.add(rank.base - rank.vector)
                theirs.copy_((average - weight * mine) / max(1e-9, 1 - weight))
        consensus.grad = average
        outer.step()
        if has_landed:
            for rank in ranks:
                rank.add(how.pull * (consensus.data - rank.vector))
        if how.moments:
            _average_moments([rank.optimizer for rank in ranks], weights)
    return Outcome(losses, consensus.data, windows, wire.sent_bytes, divergence)


def _cut(counts: Sequence[int], total: int) -> list[int]:
    """Return counts that sum to less, in the same proportions."""
    left, cut = total, []
    for number, count in enumerate(counts):
        own = round(left * count / sum(counts[number:]))
        cut.append(own)
        left -= own
    return cut


def _weights(counts: Sequence[int], power: float) -> list[float]:
    parts = [float(count) ** power if count else 0.0 for count in counts]
    return [part / math.fsum(parts) for part in parts]


def _base(
    base: str,
    rank: _Rank,
    consensus: Tensor,
    outer: OuterSGD,
    weight: float,
    mine: Tensor,
    theirs: Tensor,
) -> Tensor:
    """Return what a rank continues from while the average is under way; see ``Local``."""
    if base == "own":
        return rank.vector
    if base == "late":
        return consensus.data.clone()
    expected = mine if base == "eager" else weight * mine + (1 - weight) * theirs
    trial = nn.Parameter(consensus.data.clone())
    trial.grad = expected
    (group,) = outer.param_groups
    step = OuterSGD([trial], lr=group["lr"], momentum=group["momentum"])
    if consensus in outer.state:
        step.state[trial] = {"momentum_buffer": outer.state[consensus]["momentum_buffer"].clone()}
    step.step()
    return trial.data


class _Wire:
    """Sums what travels in few bits, with error feedback, as ``GroupTransport`` does."""

    def __init__(self, bits: int, numel: int, ranks: int) -> None:
        self._bits, self._numel, self._ranks = bits, numel, ranks
        self._padded = -(-numel // (BLOCK * ranks)) * BLOCK * ranks
        self._lost = [torch.zeros(self._padded) for _ in range(ranks)]
        self.sent_bytes = 0

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        if self._ranks == 1:
            return parts[0]
        size = 4 * self._numel if self._bits == 32 else self._packed_bytes()
        self.sent_bytes += 2 * size * (self._ranks - 1) // self._ranks
        if self._bits == 32:
            return torch.stack(list(parts)).sum(0)
        total = torch.zeros(self._padded)
        wide = [nn.functional.pad(part, (0, self._padded - self._numel)) for part in parts]
        rounded = [
            self._round(part.add_(lost)) for part, lost in zip(wide, self._lost, strict=True)
        ]
        size = self._padded // self._ranks
        for rank in range(self._ranks):
            own = slice(rank * size, (rank + 1) * size)
            for other in range(self._ranks):
                total[own] += wide[other][own] if other == rank else rounded[other][own]
        sent = self._round(total)
        for rank in range(self._ranks):
            own = slice(rank * size, (rank + 1) * size)
            torch.sub(wide[rank], rounded[rank], out=self._lost[rank])
            self._lost[rank][own] = total[own] - sent[own]
        return sent[: self._numel]

    def _round(self, values: Tensor) -> Tensor:
        if self._bits == 2:  # -1, 0 and 1, which evener does not offer
            blocks = values.view(-1, BLOCK)
            scales = 1.5 * blocks.abs().mean(dim=1, keepdim=True)
            return ((blocks / scales.clamp(min=1e-30)).round().clamp(-1, 1) * scales).view(-1)
        packed = torch.empty(packed_bytes(values.numel(), self._bits), dtype=torch.uint8)
        pack_sum(values, torch.zeros_like(values), [], self._bits, packed)
        found = torch.empty_like(values)
        unpack(packed, self._bits, found)
        return found

    def _packed_bytes(self) -> int:
        if self._bits == 2:
            return self._padded // 4 + 4 * self._padded // BLOCK
        return packed_bytes(self._padded, self._bits)


def _average_moments(optimizers: Sequence[Optimizer], weights: Sequence[float]) -> None:
    for places in zip(*(o.state.values() for o in optimizers), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            mean = sum(w * place[key] for w, place in zip(weights, places, strict=True))
            for place in places:
                place[key].copy_(mean)
