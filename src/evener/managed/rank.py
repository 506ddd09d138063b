"""One rank of a managed run: the loop that users of ``Ddp.builder`` need not write."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._pytree import tree_map

from evener.checkpoint import find_newest
from evener.comm.base import Communicator
from evener.engine.loaders.planned import TeamLoader
from evener.engine.results import WindowResult
from evener.errors import ConfigError, UsageError
from evener.loop.checkpointing import Checkpointer
from evener.loop.epochs import EpochLoop
from evener.loop.loop import Loop
from evener.loop.reporting import SinkMaker
from evener.managed.description import ManagedRun
from evener.managed.epoch_metrics import EpochFigures, EpochMetrics, average_figures
from evener.managed.trained import TrainedState, capture_trained
from evener.managed.travel import CarriedDataset, CarriedFunction
from evener.observe.events import Sink
from evener.team.environment import DistributedTrainConfig
from evener.team.placement import choose_device

#: Ranks wait so long for what the main process does alone, such as the user's ``eval_fn``; should
#: it die, they know at once.
EVAL_TIMEOUT_S = 24 * 3600.0
#: Checkpoints that stay in ``checkpoint_dir``, the newest.
KEPT_CHECKPOINTS = 3


class ManagedRank(EpochLoop):
    """Trains this rank's part of a job; every rank of the team makes one.

    Args:
        job: What to do.
        environment: This rank's place.
        stop_when: Asked after each micro-batch; true stops the team.
        communicator: The ranks to train with, instead of connecting to them.
        sinks: Take the run's events, on the main process.

    Raises:
        ConfigError: A function returned what it should not.
    """

    def __init__(
        self,
        job: ManagedRun,
        *,
        environment: DistributedTrainConfig,
        stop_when: Callable[[], bool],
        communicator: Communicator | None = None,
        sinks: Sequence[Sink | SinkMaker] = (),
    ) -> None:
        self.job = job
        torch.manual_seed(job.seed)
        self.model = job.model_fn(choose_device(job.devices, environment))
        _check("model_fn", self.model, nn.Module, "a torch.nn.Module")
        optimizer = job.optim_fn(list(self.model.parameters()))
        wanted = "a torch.optim optimizer over the parameters that it is given"
        _check("optim_fn", optimizer, Optimizer, f"{wanted}, or a list of optimizers")
        scheduler = None
        if job.scheduler is not None:
            scheduler = job.scheduler(optimizer)
            wanted = "a torch scheduler of the optimizer that it is given, or a list of them"
            _check("scheduler", scheduler, LRScheduler | Callable, wanted)
        ddp = Loop.setup(
            self.model,
            optimizer,
            scheduler,
            policy=job.policy,
            backend=job.backend,
            devices=job.devices,
            precision=job.precision,
            config=job.team_config(stop_when),
            environment=environment,
            communicator=communicator,
            sinks=sinks,
        )
        super().__init__(
            ddp,
            num_epochs=job.num_epochs,
            max_steps=job.num_steps,
            checkpoint_every=job.checkpoint_every,
        )
        try:
            self.loader = self._make_loader()
            if job.resume is not None:
                ddp.load(job.resume)
            if job.checkpoint_dir is not None:
                self.checkpointer = Checkpointer(
                    ddp, Path(job.checkpoint_dir), keep_last=KEPT_CHECKPOINTS
                )
        except BaseException:
            ddp.close()
            raise
        self._engine = ddp.assembly.engine
        self._engine.call_on_anew(self._load_newest)
        self._share = self._engine.share
        self._figures = EpochFigures(ddp.world_size)
        self._engine.call_on_left_out(self._figures.leave_out)

    def train(self) -> Iterator[EpochMetrics]:
        """Train; all ranks iterate together.

        Yields:
            The metrics of each epoch, the same on every rank.
        """
        for epoch in self.epochs():
            metrics = self._finish_epoch(epoch)
            if metrics is not None:
                yield metrics
        self.finish()

    def begin_epoch(self, epoch: int) -> None:
        """Call ``epoch_fn``, and start the epoch's figures."""
        if self.job.epoch_fn is not None:
            self.job.epoch_fn(epoch, self.model)
        self._figures.begin(time.perf_counter())

    def begin_again(self) -> None:
        """Forget what the share has recorded."""
        self._figures.drop(self._share.micro_batches)

    def state(self) -> TrainedState:
        """Return the model as the team last agreed on it, on the CPU."""
        with self._engine.consensus():
            return capture_trained(self.model, self.ddp.progress)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the team; idempotent. ``state`` can still be asked for.

        Args:
            error: What has ended this rank's part; the others are then not waited for.
        """
        try:
            self.ddp.__exit__(None, error, None)
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()

    def _load_newest(self) -> None:
        """Load the newest checkpoint of the run, as no worker holds its state any more."""
        folder = self.job.checkpoint_dir
        if folder is not None and find_newest(Path(folder)) is not None:
            self.ddp.load(folder)

    def _make_loader(self) -> TeamLoader:
        job = self.job
        dataset, collate_fn = job.make_dataset(), job.collate_fn
        if job.num_workers:
            dataset = CarriedDataset(dataset)
            collate_fn = None if collate_fn is None else CarriedFunction(collate_fn)
        loader: TeamLoader = self.ddp.loader(
            dataset,
            batch_size=job.batch_size,
            seed=job.seed,
            collate_fn=collate_fn,
            num_workers=job.num_workers,
            micro_batch_size=job.micro_batch_size,
            max_steps=job.num_steps,
        )
        return loader

    def train_micro_batch(self, batch: Any) -> None:
        """Call ``train_fn``, and carry its loss back."""
        ddp = self.ddp
        share = self._share = self._engine.share
        with self._figures.recording():
            answer = self.job.train_fn(self.model, to_device(batch, ddp.device))
        loss, weight = _loss_and_weight(answer)
        ddp.backward(loss, weight)
        self._figures.end_micro_batch(self.ddp.window, share.micro_batch_weight)

    def on_commit(self, result: WindowResult) -> None:
        """Add the window to the epoch's figures; save where it is due, then call the user."""
        self._figures.commit(result, self.ddp.rank, by_window=self._engine.state.is_sync)
        super().on_commit(result)
        checkpoint_fn = self.job.checkpoint_fn
        if checkpoint_fn is not None and self.is_due(result) and self.ddp.is_main_process:
            with torch.no_grad():
                checkpoint_fn(result.progress.window, self.model)

    def _finish_epoch(self, epoch: int) -> EpochMetrics | None:
        """Agree on the epoch's metrics; all ranks call it together."""
        own = self._figures.document(time.perf_counter())
        # With its number: a rank that has answered may be lost before all have heard it.
        figures: dict[int, Any] = dict(self._engine.introduce([self.ddp.rank, own]))
        if not any(answer["windows"] for answer in figures.values()):
            return None
        return EpochMetrics.from_document(
            {
                **average_figures(figures, self.ddp.world_size),
                "epoch": epoch,
                "complete": self.loader.cursor.epoch > epoch,
                "eval": self._evaluate(),
                "steps": self.ddp.progress.steps,
                "devices": list(self.ddp.devices),
            }
        )

    def _evaluate(self) -> Mapping[str, float]:
        """The main process evaluates, the others wait for its answer."""
        eval_fn = self.job.eval_fn
        if eval_fn is None or self.ddp.stopping:
            return {}

        def evaluate() -> dict[str, float]:
            with self.ddp.evaluating():
                return _numbers(eval_fn(self.model))

        return self._engine.ask_main(evaluate, timeout_s=EVAL_TIMEOUT_S) or {}


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a micro-batch: tensors in lists, tuples and dicts, and what has a ``to`` of its own."""
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, _Movable):
            return leaf
        # What holds tensors and moves them itself: PackedSequence, graphs, a tokenizer's batch.
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf.to(device)

    return tree_map(move, batch, is_leaf=lambda node: isinstance(node, _Movable))


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: torch.device) -> Any: ...


def _check(name: str, value: Any, kinds: Any, wanted: str) -> None:
    """Refuse what a function of the user has returned, or one of several, if it does not fit."""
    each = value if isinstance(value, Sequence) and name != "model_fn" else [value]
    if name == "scheduler" and any(isinstance(one, ReduceLROnPlateau) for one in each):
        raise ConfigError(
            "scheduler returned a ReduceLROnPlateau, which follows a metric; a managed run steps "
            "its schedulers once per optimizer step: return another one, or use Ddp.setup"
        )
    if not each or not all(isinstance(one, kinds) for one in each):
        raise ConfigError(f"{name} returned {value!r}, a {type(value).__name__}; return {wanted}")


def _loss_and_weight(answer: Any) -> tuple[Tensor, float | None]:
    loss, weight = answer, None
    if isinstance(answer, tuple) and len(answer) == 2:
        loss, weight = answer
        try:
            weight = float(weight)
        except (TypeError, ValueError):
            raise UsageError(
                f"train_fn returned {weight!r} as the weight; return (loss, weight) with the "
                "number of samples or tokens that the loss is the mean of"
            ) from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UsageError(
            f"train_fn returned {shown} as the loss; return a tensor with one element, the mean "
            "over the micro-batch, or a pair (loss, weight)"
        )
    return loss.reshape(()), weight


def _numbers(answer: Any) -> dict[str, float]:
    try:
        if isinstance(answer, Mapping):
            return {str(name): float(value) for name, value in answer.items()}
        return {"eval": float(answer)}
    except (TypeError, ValueError):
        raise UsageError(
            f"eval_fn returned {answer!r}; return a number, or a dict of numbers by name"
        ) from None
