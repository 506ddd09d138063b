"""Training by local steps, with all ranks in one process: exact, and without a network.

``train`` makes the windows of CADENCE and ASYNC one after another, with the outer optimizer and the
rounding of evener itself. When an average lands is given. ``tests/numerics/test_convergence.py``
holds it to the real engine. Several trainings run side by side, so that one call of
the model computes the gradients of all their ranks: small models cost mostly the call.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim import Optimizer

from evener.averaging.outer import Averaged, OuterStep, make_outer
from evener.comm.rounding import BLOCK, pack_sum, packed_bytes, unpack

#: The batch of a rank's local step with this number: window, rank, step of the rank in the window.
Batches = Callable[[int, int, int], Any]
#: The loss at a vector of parameters on a batch.
LossAt = Callable[[Tensor, Any], Tensor]
#: What ranks compute at the same time: the gradient at a vector of parameters on a batch.
Work = list[tuple[Tensor, Any]]
#: What comes of it: the loss and the gradient.
Found = list[tuple[float, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Local:
    """How ranks train between averages.

    Attributes:
        ranks: Ranks; one rank with ``steps=1`` is SYNC.
        steps: Local steps of the fastest rank in a window.
        speeds: Speed of each rank relative to the fastest one; all equal by default.
        outer_lr: Learning rate of the outer optimizer; or ``"auto"``.
        outer_momentum: Its Nesterov momentum; 0 and a rate of 1 average.
        late: ASYNC: part of the next window's steps after which an average lands; 0 for CADENCE.
        bits: Bits of a number on its way between ranks, with error feedback.
    """

    ranks: int = 2
    steps: int = 16
    speeds: tuple[float, ...] = ()
    outer_lr: float | Literal["auto"] = 1.0
    outer_momentum: float = 0.0
    late: float = 0.0
    bits: int = 32

    @property
    def every_speed(self) -> tuple[float, ...]:
        """Return the speed of each rank."""
        return self.speeds or (1.0,) * self.ranks

    @property
    def counts(self) -> list[int]:
        """Return how many steps each rank makes in a window."""
        return [max(1, round(self.steps * speed)) for speed in self.every_speed]


class Outcome(NamedTuple):
    """The result of a training.

    Attributes:
        losses: Training loss of every local step: in each window step by step, rank by rank.
        consensus: The parameters in the end, as one vector.
        windows: Averages.
        fast_steps: Time of computing, in steps of the fastest rank.
        sent_bytes: Bytes that a rank has sent, as a ring moves them.
        divergence: The largest divergence of a window.
    """

    losses: list[float]
    consensus: Tensor
    windows: int
    fast_steps: float
    sent_bytes: int
    divergence: float


class FlatModel:
    """A model as a function of one vector; what has weight decay comes first in it.

    Attributes:
        vector: The parameters of the model.
        num_decayed: Numbers in the vector that belong to matrices.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        named = sorted(model.named_parameters(), key=lambda pair: pair[1].dim() < 2)
        self._shapes = {name: parameter.shape for name, parameter in named}
        self.vector = torch.cat([parameter.detach().flatten() for _, parameter in named])
        self.num_decayed = sum(one.numel() for _, one in named if one.dim() >= 2)

    def __call__(self, vector: Tensor, *inputs: Any) -> Any:
        """Return the model's output with the parameters of a vector."""
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        pairs = zip(self._shapes.items(), parts, strict=True)
        parameters = {name: part.view(shape) for (name, shape), part in pairs}
        return functional_call(self._model, parameters, inputs)


class _Rank:
    """A rank's working copy, its optimizer, and what it continued from after the last window."""

    def __init__(self, start: Tensor, make_optimizer: Callable[[Tensor], Optimizer]) -> None:
        self.vector = start.clone()
        self.optimizer = make_optimizer(self.vector)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.base = self.vector

    def step(self, gradient: Tensor, factor: float) -> None:
        offset = 0
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
            for part in group["params"]:
                part.grad = gradient[offset : offset + part.numel()].view_as(part)
                offset += part.numel()
        self.optimizer.step()


def train(
    how: Local,
    start: Tensor,
    make_optimizer: Callable[[Tensor], Optimizer],
    batches: Batches,
    total: int,
    rate: Callable[[float], float] = lambda _: 1.0,
    max_norm: float = math.inf,
) -> Generator[Work, Found, Outcome]:
    """Train for so many local steps of all ranks together, with gradients that are sent in.

    Args:
        how: The way of training.
        start: The parameters in the beginning.
        make_optimizer: Makes a rank's optimizer of its vector: its parameters are parts of the
            vector, in that order.
        batches: The batch of a local step.
        total: Local steps of all ranks.
        rate: Factor of the learning rate, by the part of the run that is done.
        max_norm: Gradients are clipped to this norm.
    """
    ranks = [_Rank(start, make_optimizer) for _ in range(how.ranks)]
    consensus = start.clone()
    make = make_outer("nesterov", how.outer_lr, how.outer_momentum)
    assert make is not None
    outer = OuterStep(make)
    outer.add(["all"], [consensus])
    averaged = Averaged(how.ranks, min(how.counts))
    wire = _Wire(how.bits, consensus.numel(), how.ranks)
    losses: list[float] = []
    done = windows = 0
    fast_steps = divergence = 0.0
    has_landed = True
    while done < total:
        counts = how.counts
        planned = sum(counts)
        if planned > total - done:
            counts = _cut(counts, total - done)
        lands_after = [-1 if has_landed else math.ceil(how.late * count) for count in counts]
        for step in range(max(counts) + 1):
            for rank, landing in zip(ranks, lands_after, strict=True):
                if landing == step:
                    rank.vector.add_(consensus - rank.base)
            active = [number for number, count in enumerate(counts) if step < count]
            if not active:
                continue
            found = yield [(ranks[n].vector, batches(windows, n, step)) for n in active]
            for number, (loss, gradient) in zip(active, found, strict=True):
                gradient.mul_(min(1.0, max_norm / (float(gradient.norm()) + 1e-6)))
                progress = done + planned * step / counts[number]
                ranks[number].step(gradient, rate(progress / total))
                losses.append(loss)
        done += sum(counts)
        windows += 1
        fast_steps += max(map(truediv, counts, how.every_speed))
        own = [consensus - rank.vector for rank in ranks]
        average = wire.sum([count / sum(counts) * d for count, d in zip(counts, own, strict=True)])
        size = float(consensus.norm())
        divergence = max(divergence, *(float((d - average).norm()) / size for d in own))
        # As evener's own first window, in which it learns the speeds.
        has_landed = how.late == 0 or windows == 1 or done >= total
        if not has_landed:
            for rank, mine in zip(ranks, own, strict=True):
                (rank.base,) = outer.ahead([mine], averaged)
                rank.vector.copy_(rank.base)
        if 2 * min(counts) >= min(how.counts):
            outer.step([average], averaged)
        else:
            consensus.sub_(average)  # evener steps after no short window
        if has_landed:
            for rank in ranks:
                rank.vector.copy_(consensus)
    return Outcome(losses, consensus, windows, fast_steps, wire.sent_bytes, divergence)


def train_together(
    trainings: Sequence[Generator[Work, Found, Outcome]], gradients: Callable[[Work], Found]
) -> list[Outcome]:
    """Run trainings side by side; return the result of each.

    Args:
        trainings: Of ``train``; with ``stacked``, their batches have one shape.
        gradients: Computes the gradients: of ``one_by_one`` or ``stacked``.
    """
    outcomes: dict[int, Outcome] = {}
    waiting = {number: next(training) for number, training in enumerate(trainings)}
    while waiting:
        found = iter(gradients([one for work in waiting.values() for one in work]))
        for number, work in list(waiting.items()):
            try:
                waiting[number] = trainings[number].send([next(found) for _ in work])
            except StopIteration as end:
                outcomes[number] = end.value
                del waiting[number]
    return [outcomes[number] for number in range(len(trainings))]


def one_by_one(loss_at: LossAt) -> Callable[[Work], Found]:
    """Return what computes gradients one after another."""

    def gradient(vector: Tensor, batch: Any) -> tuple[float, Tensor]:
        point = vector.clone().requires_grad_()
        loss = loss_at(point, batch)
        (found,) = torch.autograd.grad(loss, point)
        return float(loss.detach()), found

    return lambda work: [gradient(vector, batch) for vector, batch in work]


def stacked(loss_at: LossAt, most: int = 32) -> Callable[[Work], Found]:
    """Return what computes so many gradients with one call of the loss."""

    def pieces(work: Work) -> Iterator[tuple[float, Tensor]]:
        for first in range(0, len(work), most):
            vectors, batches = map(list, zip(*work[first : first + most], strict=True))
            points = torch.stack(vectors).requires_grad_()
            losses = vmap(loss_at)(points, torch.stack(batches))
            (found,) = torch.autograd.grad(losses.sum(), points)
            yield from zip(losses.tolist(), found, strict=True)

    return lambda work: list(pieces(work))


def _cut(counts: Sequence[int], total: int) -> list[int]:
    """Return counts that sum to less, in the same proportions."""
    left, cut = total, []
    for number, count in enumerate(counts):
        own = round(left * count / sum(counts[number:]))
        cut.append(own)
        left -= own
    return cut


class _Wire:
    """Sums what travels in few bits, with error feedback, as ``GroupTransport`` does."""

    def __init__(self, bits: int, numel: int, ranks: int) -> None:
        self._bits, self._numel, self._ranks = bits, numel, ranks
        self._padded = -(-numel // (BLOCK * ranks)) * BLOCK * ranks
        self._lost = [torch.zeros(self._padded) for _ in range(ranks)] if bits < 32 else []
        self.sent_bytes = 0

    def sum(self, parts: Sequence[Tensor]) -> Tensor:
        size = 4 * self._numel if self._bits == 32 else packed_bytes(self._padded, self._bits)
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
        packed = torch.empty(packed_bytes(values.numel(), self._bits), dtype=torch.uint8)
        pack_sum(values, torch.zeros_like(values), [], self._bits, packed)
        found = torch.empty_like(values)
        unpack(packed, self._bits, found)
        return found
