"""The results of an epoch: the team's totals, and scalars that ``train_fn`` records."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

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
        complete: False if the run ended within the epoch: ``num_steps``, or a stop.
        avg_loss: Mean loss per unit of weight, over all ranks.
        scalars: The numbers of ``record_scalar``, reduced over all ranks: means by weight, sums, or
            last values.
        per_rank: The same for each rank alone; empty if it recorded nothing.
        eval: The results of ``eval_fn``, with ``eval_dataset`` their means over it; a single number
            is named ``"eval"``. Empty after an epoch without an evaluation.
        samples: Samples of the epoch's windows.
        weight: Their weight: samples, or what ``train_fn`` returned as weights.
        steps: Optimizer steps of the run so far.
        lr: Learning rate of the last step; without policy "sync", of the next step.
        epoch_ms: Milliseconds from the epoch's first window to its last, evaluation left out.
        per_rank_samples_per_s: Samples per second of each rank's own compute; 0 without work.
        per_rank_batch_share: Fraction of the epoch's samples that each rank processed; sums to 1.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochContext:
    """The place of a rank in a managed run, for ``epoch_fn``.

    Attributes:
        epoch: Number of the epoch that begins, from 0.
        step: Optimizer steps of the run so far, those before a ``resume`` included.
        samples: Samples of the run so far.
        lr: Learning rate of the next step, of the first parameter group.
        rank: Number of this rank, from 0.
        world_size: Ranks of the team.
        device: This rank's device.
        is_main_process: Whether this rank writes and prints for the team; true on one rank.
    """

    epoch: int
    step: int
    samples: int
    lr: float
    rank: int
    world_size: int
    device: torch.device
    is_main_process: bool


Reduction = Literal["mean", "sum", "last"]

_figures: ContextVar["EpochFigures | None"] = ContextVar("evener_figures", default=None)


def record_scalar(name: str, value: float | Tensor, reduction: Reduction = "mean") -> None:
    """Record a number of the micro-batch that is being computed; call it inside ``train_fn``.

    At the end of each epoch one number over all micro-batches of all ranks appears as
    ``EpochMetrics.scalars[name]``. It does not depend on how the samples were divided among ranks.
    Micro-batches of windows, or of local steps, that were skipped do not count. A tensor is kept on
    its device until then, so that nothing waits for it.

    Args:
        name: Its name; a second value with that name in one micro-batch replaces the first.
        value: A number, or a tensor with one element.
        reduction: ``"mean"`` by the weights of the micro-batches, for losses and accuracies;
            ``"sum"`` for counts; ``"last"`` for the value of the newest window, and in that of the
            last rank that recorded one. It must be the same wherever the name is recorded.

    Raises:
        UsageError: Outside ``train_fn``, a value that is not a single number, or a reduction that
            is unknown or differs from an earlier one of that name.
    """
    figures = _figures.get()
    if figures is None:
        raise UsageError(
            f"record_scalar({name!r}, ...) was called outside train_fn; call it in the train_fn of "
            "Ddp.builder. In a loop of your own, average with ddp.weighted_mean(value, weight)"
        )
    figures.record(name, value, reduction)


class Recorded(NamedTuple):
    """A recorded number, and its reduction."""

    reduction: str
    value: float | Tensor


class Scalars:
    """Reduces what one rank records in many micro-batches."""

    def __init__(self) -> None:
        #: Reduction; sum of values (by weight), or last value; weight behind it; place of the last.
        self._found: dict[str, tuple[str, float | Tensor, float, int]] = {}

    def add(self, recorded: Mapping[str, Recorded], weight: float, place: int) -> None:
        """Add the records of a micro-batch.

        Args:
            recorded: By name.
            weight: Weight of the micro-batch; with 0 it does not count in means.
            place: Its window. Of several ranks' last values, the one with the highest place counts.
        """
        for name, (reduction, value) in recorded.items():
            _, total, units, _ = self._found.get(name, ("", 0.0, 0.0, 0))
            if reduction == "last":
                self._found[name] = reduction, value, 1.0, place
            elif reduction == "sum":
                self._found[name] = reduction, total + value, 1.0, place
            elif weight:
                self._found[name] = reduction, total + value * weight, units + weight, place

    def document(self) -> dict[str, Any]:
        """Return the records in JSON types, for ``reduce_scalars``."""
        return {
            name: [reduction, float(total), units, place]
            for name, (reduction, total, units, place) in self._found.items()
        }


def reduce_scalars(documents: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return one number for each name, from ``Scalars.document`` of ranks in their order.

    Raises:
        UsageError: Ranks recorded a name with different reductions.
    """
    reduced = {}
    for name in sorted({name for document in documents for name in document}):
        found = [document[name] for document in documents if name in document]
        reductions = sorted({reduction for reduction, *_ in found})
        if len(reductions) > 1:
            raise _conflict(name, *reductions[:2])
        if reductions == ["last"]:
            # In a tie the last rank's value: in SYNC it has the window's last samples.
            reduced[name] = max(reversed(found), key=lambda one: one[3])[1]
        else:
            total = sum(one[1] for one in found)
            reduced[name] = total if reductions == ["sum"] else total / sum(one[2] for one in found)
    return reduced


def _conflict(name: str, first: str, second: str) -> UsageError:
    return UsageError(
        f"record_scalar({name!r}, ...) was called with reduction {first!r} and {second!r}; a name "
        "has one reduction: give two numbers two names"
    )


class EpochFigures:
    """Sums up an epoch: the team's committed windows, and the records of this rank.

    Records of a dropped window must not count. Micro-batches are committed in the order in which
    they were computed.

    Args:
        world_size: Ranks in the team.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._micro_batch: dict[str, Recorded] = {}
        self._reductions: dict[str, str] = {}
        self.begin(0.0)

    def begin(self, now_s: float) -> None:
        """Start an epoch; the figures of the previous one are dropped."""
        self._began_s = now_s
        self._windows = 0
        self._loss_sum = self._weight = self._lr = 0.0
        self._samples = [0] * self._world_size
        self._compute_s = [0.0] * self._world_size
        #: Window, weight and values of micro-batches.
        self._pending: deque[tuple[int, float, Mapping[str, Recorded]]] = deque()
        self._scalars = Scalars()

    @contextmanager
    def recording(self) -> Iterator[Mapping[str, Recorded]]:
        """Let ``record_scalar`` write to these figures during the block.

        Yields:
            The records.
        """
        self._micro_batch = {}
        token = _figures.set(self)
        try:
            yield self._micro_batch
        finally:
            _figures.reset(token)

    def record(self, name: str, value: float | Tensor, reduction: str) -> None:
        """Note a value of the micro-batch that is being computed."""
        if reduction not in get_args(Reduction):
            raise UsageError(
                f"record_scalar({name!r}, ...) got reduction {reduction!r}; choose one of "
                f"{', '.join(get_args(Reduction))}"
            )
        if (before := self._reductions.setdefault(name, reduction)) != reduction:
            raise _conflict(name, before, reduction)
        self._micro_batch[name] = Recorded(reduction, self._checked(name, value))

    def _checked(self, name: str, value: float | Tensor) -> float | Tensor:
        try:
            if not isinstance(value, Tensor):
                return float(value)
            there = value.detach().reshape(()).to(float64_device(value.device))
            return there.to(torch.float64, copy=True)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"record_scalar({name!r}, ...) got {value!r}, a {type(value).__name__}; give a "
                "number or a tensor with one element, such as its mean()"
            ) from None

    def end_micro_batch(self, window: int, weight: float) -> None:
        """Keep the micro-batch's records until its window is committed."""
        self._pending.append((window, weight, self._micro_batch))

    def commit(self, result: WindowResult, rank: int, *, by_window: bool = True) -> None:
        """Add a window, and this rank's records in it.

        Args:
            result: The window.
            rank: This rank.
            by_window: Whether micro-batches belong to the window in which they were computed. If a
                window was begun again after a change of the team, the last ones count.
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
            if not result.skipped:
                self._scalars.add(values, weight, result.window)

    def leave_out(self, num_micro_batches: int) -> None:
        """Clear the newest micro-batches: their step was skipped, so they do not count."""
        for number in range(num_micro_batches):
            window, *_ = self._pending[-1 - number]
            self._pending[-1 - number] = (window, 0.0, {})

    def drop(self, num_micro_batches: int) -> None:
        """Drop the newest micro-batches: they are computed again."""
        for _ in range(num_micro_batches):
            self._pending.pop()

    def document(self, now_s: float) -> dict[str, Any]:
        """Return the figures in JSON types, for ``average_figures``."""
        total = sum(self._samples)
        speeds = zip(self._samples, self._compute_s, strict=True)
        return {
            "windows": self._windows,
            "scalars": self._scalars.document(),
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
    """Return fields of ``EpochMetrics`` from the ``EpochFigures.document`` of each rank.

    The totals are those of the rank that took part in the most windows.

    Args:
        documents: By rank, of the present ranks.
        world_size: Ranks of the team.
    """
    fullest = max(documents.values(), key=lambda document: document["windows"])
    ranks = [documents[r]["scalars"] if r in documents else {} for r in range(world_size)]
    return {
        **fullest["totals"],
        "scalars": reduce_scalars(ranks),
        "per_rank": [reduce_scalars([rank]) for rank in ranks],
    }
