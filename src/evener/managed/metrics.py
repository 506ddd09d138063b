"""What an epoch came to: the team's totals, and scalars that ``train_fn`` records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from evener.devices import float64_device
from evener.engine.results import WindowResult
from evener.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """What an epoch of a managed run came to; committed windows only, the same on every rank.

    Attributes:
        epoch: Number of the epoch, from 0.
        complete: False when the run ended inside the epoch: ``num_steps``, or a stop.
        avg_loss: Mean loss per unit of weight, over all ranks.
        scalars: Means of what ``record_scalar`` was given, by weight, over all ranks.
        per_rank: The same means of each rank alone; empty where it recorded nothing.
        eval: What ``eval_fn`` returned; a single number is named ``"eval"``.
        samples: Samples of the epoch's windows.
        weight: Their weight: samples, or what ``train_fn`` returned as weights.
        steps: Optimizer steps of the run so far.
        lr: Learning rate of the last step; without policy "sync", the one after it.
        epoch_ms: Milliseconds from the epoch's first window to its last, evaluation left out.
        per_rank_samples_per_s: Samples per second of each rank's own compute; 0 without work.
        per_rank_batch_share: Part of the epoch's samples that each rank did; sums to 1.
        devices: Device of each rank.
    """

    epoch: int
    complete: bool
    avg_loss: float
    scalars: Mapping[str, float]
    per_rank: tuple[Mapping[str, float], ...]
    eval: Mapping[str, float]
    samples: int
    weight: float
    steps: int
    lr: float
    epoch_ms: float
    per_rank_samples_per_s: tuple[float, ...]
    per_rank_batch_share: tuple[float, ...]
    devices: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The metrics as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "EpochMetrics":
        """Reads back ``document``."""
        lists = {name: tuple(v) for name, v in document.items() if isinstance(v, list)}
        return cls(**{**document, **lists})


_recorder: ContextVar["ScalarRecorder | None"] = ContextVar("evener_recorder", default=None)


def record_scalar(name: str, value: float | Tensor) -> None:
    """Records a number of the micro-batch that is being computed; call it inside ``train_fn``.

    At the end of each epoch the mean over all micro-batches of all ranks, by their weights, appears
    as ``EpochMetrics.scalars[name]``. Micro-batches of windows, or of local steps, that were left
    out do not count. A tensor is kept on its device until then, so that nothing waits for it.

    Args:
        name: Its name; a second value of one micro-batch under one name replaces the first.
        value: A number, or a tensor with one element.

    Raises:
        UsageError: Outside ``train_fn``, or a value that is no single number.
    """
    recorder = _recorder.get()
    if recorder is None:
        raise UsageError(
            f"record_scalar({name!r}, ...) was called outside train_fn; call it in the train_fn of "
            "Ddp.builder. In a loop of your own, average with ddp.weighted_mean(value, weight)"
        )
    recorder.record(name, value)


@dataclass(slots=True)
class _Sum:
    product: float | Tensor = 0.0
    weight: float = 0.0

    def add(self, product: float | Tensor, weight: float) -> None:
        self.product = self.product + product
        self.weight += weight


class ScalarRecorder:
    """Sums what one rank records, as its micro-batches turn out to be part of the model.

    A window can be dropped, and then what was recorded in it must not count. Micro-batches are
    committed in the order in which they were computed.
    """

    def __init__(self) -> None:
        self._micro_batch: dict[str, float | Tensor] = {}
        self._pending: deque[tuple[float, dict[str, float | Tensor]]] = deque()
        self._epoch: dict[str, _Sum] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Lets ``record_scalar`` find this recorder for the length of the block."""
        self._micro_batch = {}
        token = _recorder.set(self)
        try:
            yield
        finally:
            _recorder.reset(token)

    def record(self, name: str, value: float | Tensor) -> None:
        """Notes a value of the micro-batch that is being computed."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(
                    f"record_scalar({name!r}, ...) got a tensor of shape {tuple(value.shape)}; "
                    "give one number, such as its mean()"
                )
            there = value.detach().reshape(()).to(float64_device(value.device))
            self._micro_batch[name] = there.to(torch.float64, copy=True)
            return
        try:
            self._micro_batch[name] = float(value)
        except (TypeError, ValueError):
            raise UsageError(
                f"record_scalar({name!r}, ...) got {value!r}, a {type(value).__name__}; give a "
                "number or a tensor with one element"
            ) from None

    def end_micro_batch(self, weight: float) -> None:
        """Keeps what the micro-batch has recorded until its window is committed."""
        self._pending.append((weight, self._micro_batch))
        self._micro_batch = {}

    def commit(self, num_micro_batches: int, *, applied: bool) -> None:
        """Adds the oldest micro-batches to the epoch, or drops them."""
        for _ in range(num_micro_batches):
            weight, values = self._pending.popleft()
            for name, value in values.items() if applied and weight else ():
                self._epoch.setdefault(name, _Sum()).add(value * weight, weight)

    def leave_out(self, num_micro_batches: int) -> None:
        """Empties the newest micro-batches: their step was left out, and they count for nothing."""
        for number in range(num_micro_batches):
            self._pending[-1 - number] = (0.0, {})

    def drop(self, num_micro_batches: int) -> None:
        """Forgets the newest micro-batches: they are computed once more."""
        for _ in range(num_micro_batches):
            self._pending.pop()

    def end_epoch(self) -> dict[str, tuple[float, float]]:
        """Hands out (Σ weight · value, Σ weight) by name, and starts anew."""
        sums = {name: (float(s.product), s.weight) for name, s in self._epoch.items()}
        self._pending.clear()
        self._epoch = {}
        return sums


def average_scalars(
    ranks: Sequence[Mapping[str, Sequence[float]]],
) -> tuple[dict[str, float], tuple[dict[str, float], ...]]:
    """The means over all ranks, and those of each rank, of what ``end_epoch`` gave on each."""
    names = sorted({name for sums in ranks for name in sums})
    total: dict[str, float] = {}
    for name in names:
        pairs = [sums[name] for sums in ranks if name in sums]
        total[name] = sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
    return total, tuple({name: s[0] / s[1] for name, s in sums.items()} for sums in ranks)


@dataclass(slots=True)
class EpochTally:
    """Adds up the committed windows of an epoch.

    Attributes:
        started_s: When the epoch started, on the clock of the caller.
        samples: Samples of each rank.
        compute_s: Seconds of compute of each rank.
    """

    world_size: int
    started_s: float = 0.0
    windows: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    lr: float = 0.0
    samples: list[int] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)

    def start(self, now_s: float) -> None:
        """Forgets the epoch before."""
        self.started_s, self.windows = now_s, 0
        self.loss_sum = self.weight = self.lr = 0.0
        self.samples, self.compute_s = [0] * self.world_size, [0.0] * self.world_size

    def add(self, result: WindowResult) -> None:
        """Adds a window when it has been committed."""
        self.windows += 1
        self.lr = result.lr
        for rank, record in enumerate(result.ranks):
            self.samples[rank] += record.samples
            self.compute_s[rank] += record.compute_s
        if not result.skipped:
            self.loss_sum += result.loss * result.weight
            self.weight += result.weight

    def document(self, now_s: float) -> dict[str, Any]:
        """The totals under their names in ``EpochMetrics``."""
        total = sum(self.samples)
        return {
            "avg_loss": self.loss_sum / self.weight if self.weight else float("nan"),
            "samples": total,
            "weight": self.weight,
            "lr": self.lr,
            "epoch_ms": 1000 * (now_s - self.started_s),
            "per_rank_samples_per_s": [
                n / s if s else 0.0 for n, s in zip(self.samples, self.compute_s, strict=True)
            ],
            "per_rank_batch_share": [n / total if total else 0.0 for n in self.samples],
        }
