"""``DataParallelCoordinator``: one classifier per device, trained together in one process."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from evener.closing import Closing
from evener.config.runs import ClassifyConfig
from evener.config.settings import DdpConfig
from evener.data.cursor import derive_seed
from evener.ddp import Ddp
from evener.devices import count_accelerators
from evener.engine.loaders.training import split
from evener.engine.results import WindowResult
from evener.engine.sync import SyncEngine
from evener.errors import CollectiveError, ConfigError, NonFiniteGradientError, UsageError
from evener.loop.event_stream import SinkMaker
from evener.observe.events import Sink
from evener.planning.plans import WindowPlan
from evener.tasks.classification.base_model import GivenModel
from evener.tasks.classification.metrics import Evaluation
from evener.tasks.classification.pipeline import ClassifyPipeline, Prediction
from evener.tasks.classification.samples import Pair, Sample
from evener.tasks.optimization import apply_settings, make_optimizer
from evener.tasks.trainers.accumulator import Accumulator
from evener.tasks.trainers.distributed_comm import DistributedComm, share_cores
from evener.team.placement import Devices, devices_of_host

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The results of a batch, over all replicas.

    Attributes:
        avg_loss: Mean loss by class weight, before the update, in nats; ``nan`` for an empty batch.
        correct: Correctly classified samples, before the update.
        total: Samples, each counted once.
        grad_norm: 2-norm of the averaged gradient, before clipping; ``nan`` without an update.
    """

    avg_loss: float
    correct: int
    total: int
    grad_norm: float

    def accuracy(self) -> float:
        """Return the fraction of correctly classified samples; ``nan`` for an empty batch."""
        return self.correct / self.total if self.total else math.nan


@final
class DataParallelCoordinator(Closing):
    """Trains one LoRA classifier on several devices of this process, each at its own speed.

    There is a replica for each device: a rank of a team whose ranks are threads. A batch is divided
    in proportion to measured speeds. Every replica computes the gradient of its samples, the
    gradients are summed by weight, and every replica makes the update that one device would make on
    the whole batch. So replicas stay bit-identical. Replicas on one device share the memory of the
    frozen base.

    Use it from one thread at a time, and close it (or use ``with``). Replicas on the CPU share its
    cores: with two or more of them, torch's number of threads is lowered, unless
    ``OMP_NUM_THREADS`` sets it.

    Args:
        model_config: The base: a local folder, keys such as ``{"path": ...}`` or
            ``{"type": "bert", "config": {...}}``, or a ``ModelConfig``.
        classify_config: What is trained, and how; ``labels`` must be given. Or its keys.
        devices: ``"auto"`` (every accelerator, else the CPU), a list such as
            ``["cuda:0", "cuda:1", "cpu"]``, one device, or a number of them.
        partition_ratios: Relative shares, instead of measured speeds.
        emulate_slow: By device number, the factor by which to slow it on purpose.
        verify_every: Number of batches after which all replicas are compared by hashes;
            ``ReplicasDifferError`` is raised if they differ. 0 does not compare.
        sinks: Receive the run's events; see ``Ddp.setup``. Closed by ``close``.

    Attributes:
        devices: The device of each replica.
        pipelines: The classifiers, one for each device.
        num_batches: Batches trained so far.

    Raises:
        ConfigError: A missing device, a base that cannot be loaded, an invalid option.
    """

    def __init__(
        self,
        model_config: GivenModel,
        classify_config: ClassifyConfig | Mapping[str, Any],
        devices: Devices = "auto",
        *,
        partition_ratios: Sequence[float] | None = None,
        emulate_slow: Mapping[int, float] | None = None,
        verify_every: int = 0,
        sinks: Sequence[Sink | SinkMaker] = (),
    ) -> None:
        names = devices_of_host(devices, count_accelerators())
        self.devices = tuple(torch.device(name) for name in names)
        first = ClassifyPipeline.build(model_config, classify_config)
        first.to(self.devices[0])
        self.pipelines = (first, *(first.replica(device) for device in self.devices[1:]))
        self.num_batches = 0
        self._settings = first.config.optimizer
        options = DdpConfig(
            max_grad_norm=first.config.max_grad_norm,
            non_finite=first.config.non_finite,
            partition_ratios=partition_ratios,
            emulate_slow=emulate_slow or {},
            verify_every=verify_every,
            quiet=True,
        )
        self._torch_threads = torch.get_num_threads()
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix=f"evener-replica-{rank}")
            for rank in range(len(names))
        ]
        self._replicas: list[_ThreadRank] = []
        self._ends = DistributedComm.local(len(names))
        try:
            given = (names, options, sinks)
            self._replicas = self._on_all(
                _ThreadRank, self.pipelines, self._ends, *map(repeat, given)
            )
        except BaseException:
            self.close()
            raise
        engine = self._replicas[0].ddp.assembly.engine
        assert isinstance(engine, SyncEngine)
        self._policy, self._loss_scale = engine.policy, engine.options.loss_scale

    @property
    def primary_pipeline(self) -> ClassifyPipeline:
        """The classifier on the first device; the others hold the same values."""
        return self.pipelines[0]

    @property
    def shares(self) -> tuple[int, ...]:
        """How the next hundred samples would be divided, by device."""
        return self._deal(range(100))[0].shares

    @property
    def lr(self) -> float:
        """Learning rate of the adapter; may be set between batches."""
        return self._settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        value = float(value)
        if not 0 <= value < math.inf:
            raise ConfigError(f"lr is {value}; give a finite number of 0 or more")
        self._settings = self._settings.model_copy(update={"lr": value})
        for replica in self._replicas:
            apply_settings(replica.optimizer, self._settings)

    def train_batch_parallel(self, samples: Sequence[Sample]) -> BatchResult:
        """Make one update with a batch of samples, each seen by exactly one replica.

        Args:
            samples: Any number. Fewer than devices leave some without work; none make no update.

        Returns:
            The result over all of them.

        Raises:
            DataError: A bad sample; nothing was computed.
            NonFiniteGradientError: A loss or gradient is not finite; nothing was applied.
        """
        self._check_usable()
        pairs = self.primary_pipeline.pairs(samples)
        if not pairs:
            return BatchResult(avg_loss=math.nan, correct=0, total=0, grad_norm=math.nan)
        plan, parts = self._deal(list(enumerate(pairs)))
        scale = math.inf
        result: WindowResult | None = None
        # If fp16 has overflowed, the scale of losses was lowered: repeat the same batch.
        while result is None or (result.skipped and self._loss_scale.value < scale):
            scale = self._loss_scale.value
            correct = self._compute(parts)
            result = self._update()
        self._policy.observe(result.ranks, plan, 0.0)
        self.num_batches += 1
        return BatchResult(
            avg_loss=result.loss,
            correct=correct,
            total=len(pairs),
            grad_norm=math.nan if result.skipped else result.grad_norm,
        )

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Classify labelled texts on all devices and compare; the loss of none is ``nan``.

        Raises:
            DataError: A bad sample.
        """
        self._check_usable()
        pairs = self.primary_pipeline.pairs(samples)
        return self.primary_pipeline.compare(pairs, self._judge(pairs))

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """Return the classes of texts, in their order, on all devices.

        Raises:
            DataError: A text is empty.
        """
        self._check_usable()
        pipeline = self.primary_pipeline
        return pipeline.name(self._judge(pipeline.pairs_of(texts)))

    def save(self, folder: str | Path) -> None:
        """Write adapter and merged weights; see ``ClassifyPipeline.save``."""
        self.primary_pipeline.save(folder)

    def close(self) -> None:
        """End the threads; the pipelines stay usable. Idempotent."""
        replicas, self._replicas = self._replicas, []
        try:
            self._on_all(_ThreadRank.close, replicas)
        finally:
            for thread in self._threads:
                thread.shutdown()
            torch.set_num_threads(self._torch_threads)

    def _compute(self, parts: Sequence[Sequence[tuple[int, Pair]]]) -> int:
        """Compute gradients, which stay on their replicas; return the correctly classified samples.

        All replicas finish before the first one exchanges anything. So if one fails, for example
        without memory, no replica has changed.
        """
        try:
            number = repeat(self.num_batches)
            return sum(self._on_all(_ThreadRank.compute, self._replicas, parts, number))
        except BaseException:
            self._on_all(_ThreadRank.drop, self._replicas)
            raise

    def _update(self) -> WindowResult:
        try:
            return self._on_all(_ThreadRank.update, self._replicas)[0]
        except NonFiniteGradientError:
            raise  # by all replicas, before any was changed
        except BaseException:
            for end in self._ends:
                end.close()
            self.close()  # some replicas may have made the update and others not
            raise

    def _judge(self, pairs: Sequence[Pair]) -> Tensor:
        """Return logits of texts, in their order."""
        _, parts = self._deal(pairs)
        return torch.cat(self._on_all(ClassifyPipeline.judge, self.pipelines, parts))

    def _deal(self, whole: Sequence[_T]) -> tuple[WindowPlan, list[list[_T]]]:
        """Return a plan, and a list divided in order by the replicas' speeds."""
        plan = self._policy.plan(self.num_batches, 0, 0, len(whole))
        ranks = range(len(self.devices))
        return plan, [[whole[place] for place in plan.positions(rank)] for rank in ranks]

    def _on_all(self, work: Callable[..., _T], *arguments: Any) -> list[_T]:
        """Run ``work`` on every replica's thread; raise the first error when all have ended.

        The error of a replica takes precedence over those of others that only lost it.

        Args:
            work: What to call.
            *arguments: For each of its arguments, one value for each replica.
        """
        futures = [
            thread.submit(work, *own)
            for thread, *own in zip(self._threads, *arguments, strict=False)
        ]
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, CollectiveError)), errors[0])
        return [future.result() for future in futures]

    def _check_usable(self) -> None:
        if not self._replicas:
            raise UsageError(
                "this coordinator was closed, or one of its updates failed half-way; make a new one"
            )


class _ThreadRank:
    """A rank of the team; made and used by one thread only.

    Args:
        pipeline: The classifier, on its device.
        end: Connects the replicas.
        devices: Devices of all replicas.
        options: Options of the team.
        sinks: Receive its events.
    """

    def __init__(
        self,
        pipeline: ClassifyPipeline,
        end: DistributedComm,
        devices: Sequence[str],
        options: DdpConfig,
        sinks: Sequence[Sink | SinkMaker],
    ) -> None:
        config = pipeline.config
        self._pipeline = pipeline
        self._end = end
        self.optimizer = make_optimizer(pipeline.model, config.optimizer)
        try:
            self.ddp = Ddp.setup(
                pipeline.model,
                self.optimizer,
                devices=devices,
                precision=config.precision,
                config=options,
                environment=end.config,
                communicator=end.communicator,
                sinks=sinks,
            )
        except BaseException:
            end.close()  # or the others would wait for this one
            raise
        self._window = Accumulator(self.ddp)
        self._size = config.micro_batch_size
        if self._size != "auto":
            engine = self.ddp.assembly.engine
            engine.run.limits.start_with(self._size)
            engine.policy.set_micro_batch_sizes(engine.run.limits.sizes)
        if (on_cpu := devices.count("cpu")) > 1:
            share_cores(on_cpu)

    def compute(self, part: Sequence[tuple[int, Pair]], batch_number: int) -> int:
        """Compute forward and backward of this replica's part of a batch.

        Returns:
            The number of correctly classified samples.
        """
        pipeline, correct = self._pipeline, 0
        size = len(part) if self._size == "auto" else self._size
        for row in split(range(len(part)), max(1, size)):
            with self._window.micro_batch(len(row)):
                # Dropout depends on the samples, not on the order of threads.
                place = part[row[0]][0]
                seed = derive_seed(pipeline.config.seed, "micro-batch", batch_number, place)
                pipeline.seed_dropout(seed)
                found = pipeline.loss(pipeline.collate([part[i][1] for i in row]))
                self.ddp.backward(found.loss, found.weight)
                correct += int(found.correct.item())
        return correct

    def drop(self) -> None:
        """Drop the gradients of a batch."""
        self._window.drop()

    def update(self) -> WindowResult:
        """Average over replicas and step; all replicas call it together."""
        try:
            result = self._window.close_window()
        except NonFiniteGradientError:
            raise
        except BaseException:
            self._end.close()  # or the others would wait for this one
            raise
        assert result is not None, "a batch that is not empty is a window"
        return result

    def close(self) -> None:
        """Leave the team, together with all replicas; the classifier stays usable."""
        self.ddp.close()
        self._pipeline.model.eval()
