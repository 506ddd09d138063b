"""The results of an epoch: the team's totals, and scalars that ``train_fn`` records."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from evener.devices import float64_device
from evener.engine.results import WindowResult
from evener.errors import UsageError
from evener.notebook import html_table


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMetrics:
    """The results of an epoch of a managed run; committed windows only, the same on every rank.

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
        """Return the metrics as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "EpochMetrics":
        """Read back ``document``."""
        lists = {name: tuple(v) for name, v in document.items() if isinstance(v, list)}
        return cls(**{**document, **lists})

    def _repr_html_(self) -> str:
        means = {"loss": self.avg_loss, **self.scalars, **self.eval}
        figures = ", ".join(f"{name} {value:.4g}" for name, value in means.items())
        title = (
            f"epoch {self.epoch}{'' if self.complete else ' (incomplete)'}: {figures}; "
            f"{self.samples:,} samples in {self.epoch_ms / 1000:.3g} s, lr {self.lr:.3g}"
        )
        shares, speeds = self.per_rank_batch_share, self.per_rank_samples_per_s
        own = list(self.per_rank) or [{} for _ in self.devices]
        names = sorted({name for scalars in own for name in scalars})
        rows = [
            (
                rank,
                device,
                f"{share:.1%}",
                f"{speed:,.4g}",
                *(f"{scalars[name]:.4g}" if name in scalars else "–" for name in names),
            )
            for rank, (device, share, speed, scalars) in enumerate(
                zip(self.devices, shares, speeds, own, strict=True)
            )
        ]
        return html_table(title, ["rank", "device", "share", "samples/s", *names], rows)


_figures: ContextVar["EpochFigures | None"] = ContextVar("evener_figures", default=None)


def record_scalar(name: str, value: float | Tensor) -> None:
    """Record a number of the micro-batch that is being computed; call it inside ``train_fn``.

    At the end of each epoch the mean over all micro-batches of all ranks, by their weights, appears
    as ``EpochMetrics.scalars[name]``. Micro-batches of windows, or of local steps, that were left
    out do not count. A tensor is kept on its device until then, so that nothing waits for it.

    Args:
        name: Its name; a second value of one micro-batch under one name replaces the first.
        value: A number, or a tensor with one element.

    Raises:
        UsageError: Outside ``train_fn``, or a value that is not a single number.
    """
    figures = _figures.get()
    if figures is None:
        raise UsageError(
            f"record_scalar({name!r}, ...) was called outside train_fn; call it in the train_fn of "
            "Ddp.builder. In a loop of your own, average with ddp.weighted_mean(value, weight)"
        )
    figures.record(name, value)


class EpochFigures:
    """Adds up an epoch: the team's committed windows, and what this rank records in its own part.

    A window can be dropped, and then what was recorded in it must not count. Micro-batches are
    committed in the order in which they were computed.

    Args:
        world_size: Ranks in the team.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._micro_batch: dict[str, float | Tensor] = {}
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """Start an epoch; what is left of the one before is forgotten."""
        self._began_s = now_s
        self._windows = 0
        self._loss_sum = self._weight = self._lr = 0.0
        self._samples = [0] * self._world_size
        self._compute_s = [0.0] * self._world_size
        #: Window, weight and values of micro-batches.
        self._pending: deque[tuple[int, float, dict[str, float | Tensor]]] = deque()
        self._scalars: dict[str, tuple[float | Tensor, float]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let ``record_scalar`` find these figures for the length of the block."""
        self._micro_batch = {}
        token = _figures.set(self)
        try:
            yield
        finally:
            _figures.reset(token)

    def record(self, name: str, value: float | Tensor) -> None:
        """Note a value of the micro-batch that is being computed."""
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

    def end_micro_batch(self, window: int, weight: float) -> None:
        """Keep what the micro-batch has recorded until its window is committed."""
        self._pending.append((window, weight, self._micro_batch))

    def commit(self, result: WindowResult, rank: int, *, by_window: bool = True) -> None:
        """Add a window, and what this rank has recorded in it.

        Args:
            result: The window.
            rank: This rank.
            by_window: Whether micro-batches are of the window in which they were computed. Of one
                that was begun again after a change of the team, the last ones count.
        """
        self._windows += 1
        self._lr = result.lr
        for number, record in enumerate(result.ranks):
            self._samples[number] += record.samples
            self._compute_s[number] += record.compute_s
        if not result.skipped:
            self._loss_sum += result.loss * result.weight
            self._weight += result.weight
        count = result.ranks[rank].micro_batches
        if by_window:
            of_it = sum(window <= result.window for window, *_ in self._pending)
            for _ in range(of_it - count):
                self._pending.popleft()
        for _ in range(count):
            _, weight, values = self._pending.popleft()
            for name, value in values.items() if weight and not result.skipped else ():
                product, units = self._scalars.get(name, (0.0, 0.0))
                self._scalars[name] = product + value * weight, units + weight

    def leave_out(self, num_micro_batches: int) -> None:
        """Empty the newest micro-batches: their step was left out, and they count for nothing."""
        for number in range(num_micro_batches):
            window, *_ = self._pending[-1 - number]
            self._pending[-1 - number] = (window, 0.0, {})

    def drop(self, num_micro_batches: int) -> None:
        """Forget the newest micro-batches: they are computed once more."""
        for _ in range(num_micro_batches):
            self._pending.pop()

    def document(self, now_s: float) -> dict[str, Any]:
        """Return the figures in JSON types, for ``average_figures``."""
        total = sum(self._samples)
        speeds = zip(self._samples, self._compute_s, strict=True)
        return {
            "windows": self._windows,
            "scalars": {name: (float(sum_), n) for name, (sum_, n) in self._scalars.items()},
            "totals": {
                "avg_loss": self._loss_sum / self._weight if self._weight else float("nan"),
                "samples": total,
                "weight": self._weight,
                "lr": self._lr,
                "epoch_ms": 1000 * (now_s - self._began_s),
                "per_rank_samples_per_s": [n / s if s else 0.0 for n, s in speeds],
                "per_rank_batch_share": [n / total if total else 0.0 for n in self._samples],
            },
        }


def average_figures(documents: Mapping[int, Mapping[str, Any]], world_size: int) -> dict[str, Any]:
    """Return fields of ``EpochMetrics``, from what ``EpochFigures.document`` gave on each rank.

    The totals are those of a rank that took part in most windows: in all, unless no rank did.

    Args:
        documents: By rank, of those that are present.
        world_size: Ranks of the team.
    """
    fullest = max(documents.values(), key=lambda document: document["windows"])
    ranks = [documents[r]["scalars"] if r in documents else {} for r in range(world_size)]
    total: dict[str, float] = {}
    for name in sorted({name for sums in ranks for name in sums}):
        pairs = [sums[name] for sums in ranks if name in sums]
        total[name] = sum(p[0] for p in pairs) / sum(p[1] for p in pairs)
    means = [{name: s[0] / s[1] for name, s in sums.items()} for sums in ranks]
    return {**fullest["totals"], "scalars": total, "per_rank": means}
