"""One replica of the coordinator's team: a classifier, its gradients and its optimizer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from evener.averaging.gradients import GradientAverager
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.data.cursor import derive_seed
from evener.engine.emulate import Slowdown, compute_clock
from evener.engine.loaders.planned import split
from evener.engine.share import Share
from evener.loop.precision import HALF, AutocastForward, choose_precision
from evener.planning.report import Report
from evener.tasks.classification.encoding import Encoded
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.optimization import make_optimizer


@dataclass(frozen=True, slots=True)
class Computed:
    """What a replica has computed of a batch.

    Attributes:
        report: For the planner and the weight rule.
        correct: Samples whose class was found.
    """

    report: Report
    correct: int


@final
class Replica:
    """A classifier that does its part of every batch; used by one thread only.

    Args:
        pipeline: The classifier, on its device.
        comm: Joins the replicas.
        slow: Factor by which it is slowed on purpose.
        micro_batch_size: Most samples of one forward and backward; ``None`` for a whole share.

    Attributes:
        precision: What its forward computes in.
    """

    def __init__(
        self,
        pipeline: ClassifyPipeline,
        comm: Communicator,
        *,
        slow: float,
        micro_batch_size: int | None,
    ) -> None:
        config = pipeline.config
        self.pipeline = pipeline
        self.comm = comm
        self.flat = FlatBuffers(list(pipeline.model.named_parameters()), comm.world_size)
        self.optimizer = make_optimizer(pipeline.model, config.optimizer)
        self._averager = GradientAverager(self.flat, comm)
        self._slowdown = Slowdown(slow, clock=compute_clock(str(pipeline.device)))
        self._micro_batch_size = micro_batch_size
        self._max_norm = config.optimizer.max_grad_norm
        self._update_s = 0.0
        self._known_sizes: set[int] = set()
        self.precision = choose_precision(config.precision, pipeline.device)
        self._autocast = (
            AutocastForward(pipeline.model, pipeline.device, HALF[self.precision])
            if self.precision in HALF
            else None
        )

    def compute(
        self, part: Sequence[Encoded], positions: Sequence[int], scale: float, window: int
    ) -> Computed:
        """Forward and backward on this replica's part of a batch; gradients stay here.

        Args:
            part: Its samples; there may be none.
            positions: Their places in the batch.
            scale: What weights are divided by, over the loss scale; the same on every replica.
            window: Number of the batch.
        """
        size = self._micro_batch_size or max(1, len(part))
        rows = split(range(len(part)), size)
        share = Share(
            len(rows), scale=scale, slowdown=self._slowdown, known_sizes=self._known_sizes
        )
        correct = []
        self.pipeline.model.train()
        for row in rows:
            share.start_micro_batch(len(row))
            self._seed(window, positions[row[0]])
            batch = self.pipeline.encoder.collate([part[i] for i in row])
            self.flat.attach_grads()
            result = self.pipeline.loss(batch)
            share.backward(result.loss, result.weight)
            correct.append(result.correct)
            share.end_micro_batch()
        index = self._averager.gather()
        loss_sum = share.loss_sum_of()
        finite = torch.isfinite(torch.tensor(loss_sum)).item()
        return Computed(
            Report(
                weight=share.weight,
                loss_sum=loss_sum,
                compute_s=share.compute_s + self._update_s,
                micro_batches=share.micro_batches,
                samples=share.samples,
                non_finite=(0 if index is None else index + 1) if finite else -1,
                warmup_s=share.warmup_s,
                warmup_micro_batches=share.warmup_micro_batches,
                warmup_samples=share.warmup_samples,
            ),
            sum(int(c.item()) for c in correct),
        )

    def update(self, scale: float, total_weight: float, window: int, *, unlike: bool) -> float:
        """Averages over replicas and steps; all replicas do it together.

        Args:
            scale: As given to ``compute``.
            total_weight: Σ weight over replicas; larger than 0.
            window: Number of the batch.
            unlike: Devices differ, so that each would round an update in its own way.

        Returns:
            2-norm of the averaged gradient, before clipping; not finite when the sum overflowed,
            and then nothing has been applied.
        """
        try:
            return self._update(scale, total_weight, f"batch {window}", unlike=unlike)
        except BaseException:
            self.comm.close()  # or the others would wait for this one
            raise

    def _update(self, scale: float, total_weight: float, what: str, *, unlike: bool) -> float:
        norm = self._averager.average(scale, total_weight, what=what, max_norm=self._max_norm)
        started_s = time.perf_counter()
        if norm < float("inf"):  # false for a NaN, too
            self.flat.mask_untouched()
            self.optimizer.step()
            self.flat.attach_data()
            if unlike:
                self._averager.unify(what=f"parameters of {what}")
        self.flat.zero_()
        self._update_s = time.perf_counter() - started_s
        return norm

    def drop(self) -> None:
        """Forgets what was computed of a batch."""
        self.flat.zero_()

    def close(self) -> None:
        """Gives back hooks and connections; the classifier stays usable."""
        self.flat.close()
        if self._autocast is not None:
            self._autocast.remove()
        self.comm.close()
        self.pipeline.model.eval()

    def _seed(self, window: int, first_position: int) -> None:
        """Dropout depends on what is computed, not on which thread came first."""
        seed = derive_seed(self.pipeline.config.seed, "micro-batch", window, first_position)
        self.pipeline.draws.seed(seed, self.pipeline.device)
