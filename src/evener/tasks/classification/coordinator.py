"""``DataParallelCoordinator``: one classifier per device, trained together in one process."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, final

import torch

from evener.averaging.weights import power_of_two_near
from evener.comm.base import Communicator, SingleCommunicator
from evener.comm.threads import ThreadTeam
from evener.config.classify import ClassifyConfig
from evener.devices import count_accelerators, kind_of
from evener.engine.finite import non_finite_on, overflow
from evener.engine.loss_scale import LossScale
from evener.errors import CollectiveError, ConfigError, UsageError
from evener.planning.fixed import FixedShares
from evener.planning.plan import WindowPlan
from evener.planning.policies import Policy
from evener.planning.sync import SyncPolicy
from evener.protocol.machine import combine
from evener.tasks.classification.encoding import Encoded
from evener.tasks.classification.given import GivenModel
from evener.tasks.classification.metrics import Evaluation, add_confusions
from evener.tasks.classification.pipeline import ClassifyPipeline, Prediction
from evener.tasks.classification.replica import Computed, Replica
from evener.tasks.classification.samples import Sample
from evener.team.host import threads_per_rank
from evener.team.placement import Devices, devices_of_host

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a batch came to, over all replicas.

    Attributes:
        avg_loss: Mean loss by class weight, before the update, in nats; ``nan`` for an empty batch.
        correct: Samples whose class was found, before the update.
        total: Samples, each counted once.
        grad_norm: 2-norm of the averaged gradient, before clipping; ``nan`` without an update.
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float


@final
class DataParallelCoordinator:
    """Trains one LoRA classifier on several devices of this process, each at its own speed.

    There is a replica, and a thread, for each device. A batch is shared out in proportion to
    measured speeds; every replica computes the gradient of its samples, the gradients are summed
    by weight, and every replica makes the update that one device would have made on the whole
    batch. So replicas stay bit-identical. Only adapter and head travel; replicas on one device
    share the memory of the frozen base.

    Use it from one thread at a time, and close it (or use ``with``). Replicas on the CPU share its
    cores: while there are two or more of them, torch's number of threads is lowered.

    Args:
        model_config: The base: a local folder, keys such as ``{"path": ...}`` or
            ``{"type": "bert", "config": {...}}``, or a ``ModelConfig``.
        classify_config: What is trained, and how; ``labels`` must be given. Or its keys.
        devices: ``"auto"`` (every accelerator, else the CPU), a list such as
            ``["cuda:0", "cuda:1", "cpu"]``, one device, or a number of them.
        partition_ratios: Shares relative to one another, instead of measured speeds.
        emulate_slow: Factor by device number by which to slow it on purpose.

    Attributes:
        devices: The device of each replica.

    Raises:
        ConfigError: A device that is not there, a base that does not load, a bad option.
    """

    def __init__(
        self,
        model_config: GivenModel,
        classify_config: ClassifyConfig | Mapping[str, Any],
        devices: Devices = "auto",
        *,
        partition_ratios: Sequence[float] | None = None,
        emulate_slow: Mapping[int, float] | None = None,
    ) -> None:
        names = devices_of_host(devices, count_accelerators())
        self.devices = tuple(torch.device(name) for name in names)
        slow = emulate_slow or {}
        if unknown := [number for number in slow if number not in range(len(names))]:
            raise ConfigError(
                f"emulate_slow slows replica {unknown[0]!r}, and there are replicas 0 to "
                f"{len(names) - 1}; name one of these"
            )
        first = ClassifyPipeline.build(model_config, classify_config)
        config = first.config
        first.to(self.devices[0])
        self._config = config
        self._window = 0
        self._usable = True
        # Devices of different kinds round an update differently.
        self._unlike = len({kind_of(d).describe(d) for d in self.devices}) > 1
        self._planner = self._make_planner(partition_ratios)
        pipelines = [first, *(first.replica(device) for device in self.devices[1:])]
        micro = None if config.micro_batch_size == "auto" else config.micro_batch_size
        self._replicas = [
            Replica(p, comm, slow=slow.get(rank, 1.0), micro_batch_size=micro)
            for rank, (p, comm) in enumerate(zip(pipelines, _connect(len(names)), strict=True))
        ]
        self._loss_scale = LossScale(
            rank for rank, replica in enumerate(self._replicas) if replica.precision == "fp16"
        )
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"evener-replica-{rank}")
            for rank in range(len(names))
        ]
        self._torch_threads = torch.get_num_threads()
        on_cpu = sum(device.type == "cpu" for device in self.devices)
        if on_cpu > 1:
            each = threads_per_rank(None, on_cpu)
            self._on_all(lambda _: torch.set_num_threads(each))

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """The classifier on the first device; the others hold the same values."""
        return self._replicas[0].pipeline

    @property
    def pipelines(self) -> tuple[ClassifyPipeline, ...]:
        """The classifiers, one for each device."""
        return tuple(replica.pipeline for replica in self._replicas)

    @property
    def num_batches(self) -> int:
        """Batches that have been trained on."""
        return self._window

    @property
    def shares(self) -> tuple[int, ...]:
        """How the next hundred samples would be shared out, by device."""
        return self._planner.plan(self._window, 0, 0, 100).shares

    @property
    def lr(self) -> float:
        """Learning rate of the adapter; may be set between batches."""
        return float(self._replicas[0].optimizer.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        value = float(value)
        if not 0 <= value < math.inf:
            raise ConfigError(f"lr is {value}; give a finite number of 0 or more")
        ratios = (1.0, self._config.optimizer.head_lr_ratio)
        for replica in self._replicas:
            for group, ratio in zip(replica.optimizer.param_groups, ratios, strict=True):
                group["lr"] = value * ratio

    def train_batch_parallel(self, samples: Sequence[Sample]) -> BatchResult:
        """Makes one update with a batch of samples, each seen by exactly one replica.

        Args:
            samples: Any number. Fewer than devices leave some without work; none make no update.

        Returns:
            The result over all of them.

        Raises:
            DataError: A bad sample; nothing was computed.
            NonFiniteGradientError: A loss or gradient is not finite; nothing was applied.
        """
        self._check_usable()
        encoded = self.primary_pipeline.encode(samples)
        if not encoded:
            return BatchResult(avg_loss=math.nan, correct=0, total=0, grad_norm=math.nan)
        plan = self._planner.plan(self._window, 0, 0, len(encoded))
        while (result := self._attempt(plan, encoded)) is None:
            self._loss_scale.update(overflowed=True)
        return result

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Classifies labelled texts on all devices and compares; the loss of none is ``nan``.

        Raises:
            DataError: A bad sample.
        """
        self._check_usable()
        encoded = self.primary_pipeline.encode(samples)
        pieces = self._pieces(encoded)
        parts = self._on_all(lambda r: r.pipeline.evaluate_encoded(pieces[r.comm.rank]))
        loss_sum, weight = 0.0, 0.0
        for part in parts:
            loss_sum += part[0]
            weight += part[1]
        return Evaluation(
            loss=loss_sum / weight if weight else math.nan,
            confusion=add_confusions([part[2] for part in parts]),
        )

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """The classes of texts, in their order, on all devices.

        Raises:
            DataError: A text is empty.
        """
        self._check_usable()
        pieces = self._pieces(self.primary_pipeline.encode_texts(texts))
        parts = self._on_all(lambda r: r.pipeline.predict_encoded(pieces[r.comm.rank]))
        return [prediction for part in parts for prediction in part]

    def save(self, folder: str | Path) -> None:
        """Writes adapter and merged weights; see ``ClassifyPipeline.save``."""
        self.primary_pipeline.save(folder)

    def close(self) -> None:
        """Ends the threads; the pipelines stay usable. Idempotent."""
        self._usable = False
        for thread in self._threads:
            thread.shutdown()
        for replica in self._replicas:
            replica.close()
        if torch.get_num_threads() != self._torch_threads:
            torch.set_num_threads(self._torch_threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _attempt(self, plan: WindowPlan, encoded: Sequence[Encoded]) -> BatchResult | None:
        """Computes a batch and updates; ``None`` where fp16 overflowed, and less scale may help."""
        weight = self.primary_pipeline.weight_of([label for _, label in encoded])
        scale = power_of_two_near(weight) / self._loss_scale.value
        places = [plan.positions(k) for k in range(len(self.devices))]

        def compute(replica: Replica) -> Computed:
            own = places[replica.comm.rank]
            return replica.compute([encoded[p] for p in own], own, scale, plan.window)

        try:
            computed = self._on_all(compute)
        except BaseException:
            self._on_all(Replica.drop)
            raise
        self._window = plan.window + 1
        reports = [c.report for c in computed]
        total_weight, loss = combine(dict(enumerate(reports)))  # class weights are above 0
        norm, error = math.inf, overflow(plan, self._window)
        culprits = [rank for rank, report in enumerate(reports) if report.non_finite]
        for rank in culprits[:1]:
            code, names = reports[rank].non_finite, self._replicas[0].flat.names
            error = non_finite_on(rank, code, plan, names, self._window)
        if not culprits:
            norm = self._update(plan, scale, total_weight)
        else:
            self._on_all(Replica.drop)
        if math.isfinite(norm):
            self._loss_scale.update(overflowed=False)
        elif self._loss_scale.can_shrink and all(map(self._loss_scale.may_shrink, culprits)):
            return None
        elif self._config.non_finite == "raise":
            raise self._loss_scale.exhausted(error)
        self._planner.observe(reports, plan, 0.0)
        correct = sum(c.correct for c in computed)
        return BatchResult(
            avg_loss=loss,
            correct=correct,
            total=len(encoded),
            grad_norm=norm if math.isfinite(norm) else math.nan,
        )

    def _update(self, plan: WindowPlan, scale: float, total_weight: float) -> float:
        """The gradient's norm; where it is not finite, nothing was applied."""
        try:
            norms = self._on_all(
                lambda r: r.update(scale, total_weight, plan.window, unlike=self._unlike)
            )
        except BaseException:
            # Some replicas may have made the update and others not.
            self._usable = False
            raise
        return norms[0]

    def _make_planner(self, ratios: Sequence[float] | None) -> Policy:
        members = [f"{device}/{rank}" for rank, device in enumerate(self.devices)]
        if ratios is not None:
            return FixedShares(members, ratios)
        size = self._config.micro_batch_size
        return SyncPolicy(members, [None if size == "auto" else size] * len(members))

    def _pieces(self, whole: Sequence[_T]) -> list[list[_T]]:
        """A part of a list for each replica, in order, in proportion to speed."""
        pieces, start = [], 0
        for share in self._planner.plan(self._window, 0, 0, len(whole)).shares:
            pieces.append(list(whole[start : start + share]))
            start += share
        return pieces

    def _on_all(self, work: Callable[[Replica], _T]) -> list[_T]:
        """Runs ``work`` on every replica's thread; raises the first error when all have ended.

        The error of a replica goes before those of others, who only miss it.
        """
        futures = [
            thread.submit(work, replica)
            for thread, replica in zip(self._threads, self._replicas, strict=True)
        ]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, CollectiveError)), errors[0])
        return [future.result() for future in futures]

    def _check_usable(self) -> None:
        if not self._usable:
            raise UsageError(
                "this coordinator was closed, or an update of it failed half-way; make a new one"
            )


def _connect(number: int) -> list[Communicator]:
    if number == 1:
        return [SingleCommunicator()]
    team = ThreadTeam(number)
    return [team.communicator(rank) for rank in range(number)]
