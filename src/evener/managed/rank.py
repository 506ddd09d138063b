"""The loop of one rank of a managed run, in place of the user's."""

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map

from evener.checkpoint import find_newest
from evener.comm.base import Communicator
from evener.engine.loaders.evaluation import EvaluationLoader
from evener.engine.loaders.training import TeamLoader
from evener.engine.results import WindowResult
from evener.engine.share import checked_weight
from evener.errors import ConfigError, UsageError
from evener.loop.arguments import several
from evener.loop.checkpointing import Checkpointer
from evener.loop.epochs import EpochLoop
from evener.loop.event_stream import SinkMaker
from evener.loop.loop import Loop
from evener.managed.description import ManagedRun, make_data
from evener.managed.epoch_metrics import (
    EpochContext,
    EpochFigures,
    EpochMetrics,
    Recorded,
    Scalars,
    average_figures,
    reduce_scalars,
)
from evener.managed.trained import TrainedState, capture_trained
from evener.observe.events import Sink
from evener.team.environment import DistributedTrainConfig
from evener.team.placement import choose_device

#: Longest wait of the ranks for the main process, for example in the user's ``eval_fn``; if it
#: dies, they notice at once.
EVAL_TIMEOUT_S = 24 * 3600.0
#: The newest checkpoints that are kept in ``checkpoint_dir``.
KEPT_CHECKPOINTS = 3


class ManagedRank(EpochLoop):
    """Trains this rank's part of a job; every rank of the team makes one.

    Args:
        job: What to do.
        environment: This rank's place.
        stop_when: Called after each micro-batch; true stops the team.
        communicator: The ranks to train with, instead of connecting to them.
        sinks: Receive the run's events, on the main process.

    Raises:
        ConfigError: A function returned a wrong type.
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
        _check("optim_fn", optimizer, Optimizer, "a torch.optim optimizer, or a list of them")
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
            self._eval_loader = self._make_eval_loader()
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
        self._engine.generations.call_on_cold_restart(self._load_newest)
        self._share = self._engine.share
        self._figures = EpochFigures(ddp.world_size)
        self._engine.on_left_out.append(self._figures.leave_out)

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
        if (epoch_fn := self.job.epoch_fn) is not None:
            context = [self._context(epoch)] if _takes_context(epoch_fn) else []
            epoch_fn(epoch, self.model, *context)
        self._figures.begin(time.perf_counter())

    def _context(self, epoch: int) -> EpochContext:
        ddp, group = self.ddp, self.ddp.assembly.optimizers[0].param_groups[0]
        return EpochContext(
            epoch=epoch,
            step=ddp.progress.steps,
            samples=ddp.progress.samples,
            lr=float(group["lr"]) * self._engine.options.lr_factor,
            rank=ddp.rank,
            world_size=ddp.world_size,
            device=ddp.device,
            is_main_process=ddp.is_main_process,
        )

    def begin_again(self) -> None:
        """Drop the records of the share."""
        self._figures.drop(self._share.micro_batches)

    def state(self) -> TrainedState:
        """Return the committed model, on the CPU."""
        with self._engine.consensus.shown():
            return capture_trained(self.model, self.ddp.progress)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the team; idempotent. ``state`` can still be called.

        Args:
            error: The error of this rank, if any; then it does not wait for the others.
        """
        try:
            self.ddp.__exit__(None, error, None)
        finally:
            if self.checkpointer is not None:
                self.checkpointer.close()

    def _load_newest(self) -> None:
        """Load the newest checkpoint of the run, since no worker holds its state any more."""
        folder = self.job.checkpoint_dir
        if folder is not None and find_newest(Path(folder)) is not None:
            self.ddp.load(folder)

    def _make_loader(self) -> TeamLoader:
        job = self.job
        loader = self.ddp.loader(
            make_data(job.dataset),
            batch_size=job.batch_size,
            seed=job.seed,
            collate_fn=job.collate_fn,
            num_workers=job.num_workers,
            micro_batch_size=job.micro_batch_size,
            cache=job.cache,
            max_steps=job.num_steps,
        )
        if not isinstance(loader, TeamLoader):
            raise ConfigError(
                "dataset is a stream; a managed run needs samples by index: give a map-style data "
                "set, or use Ddp.setup"
            )
        return loader

    def _make_eval_loader(self) -> EvaluationLoader | None:
        if self.job.eval_dataset is None:
            return None
        job = self.job
        return self.ddp.eval_loader(
            make_data(job.eval_dataset),
            batch_size=self.loader.micro_batch_size,
            collate_fn=job.collate_fn,
            num_workers=job.num_workers,
        )

    def train_micro_batch(self, batch: Any) -> None:
        """Call ``train_fn``, and run backward on its loss."""
        ddp = self.ddp
        share = self._share = self._engine.share
        with self._figures.recording():
            answer = self.job.train_fn(self.model, to_device(batch, ddp.device))
        loss, weight = _loss_and_weight(answer)
        ddp.backward(loss, weight, reduction=self.job.reduction)
        self._figures.end_micro_batch(self.ddp.window, share.micro_batch_weight)

    def on_commit(self, result: WindowResult) -> None:
        """Add the window to the epoch's figures; save if it is due, then call ``checkpoint_fn``."""
        self._figures.commit(result, self.ddp.rank, by_window=self._engine.rounds.state.is_sync)
        super().on_commit(result)
        checkpoint_fn = self.job.checkpoint_fn
        if checkpoint_fn is not None and self.is_due(result) and self.ddp.is_main_process:
            with torch.no_grad():
                checkpoint_fn(result.progress.window, self.model)

    def _finish_epoch(self, epoch: int) -> EpochMetrics | None:
        """Agree on the epoch's metrics; all ranks call it together."""
        own = self._figures.document(time.perf_counter())
        # With its number: a rank may be lost after it has answered, before all have its answer.
        figures: dict[int, Any] = self._engine.collectives.ask("summing up an epoch", own)
        if not any(answer["windows"] for answer in figures.values()):
            return None
        metrics = EpochMetrics.from_document(
            {
                **average_figures(figures, self.ddp.world_size),
                "epoch": epoch,
                "complete": self.loader.cursor.epoch > epoch,
                "eval": self._evaluate(epoch),
                "steps": self.ddp.progress.steps,
                "devices": list(self.ddp.devices),
            }
        )
        self.ddp.events.emit("epoch", window=self.ddp.window, **metrics.document())
        return metrics

    def _evaluate(self, epoch: int) -> Mapping[str, float]:
        """Evaluate if it is due; all ranks call it together."""
        is_due = (epoch + 1) % (self.job.eval_every or 1) == 0 or self.has_ended
        if self.ddp.stopping or not is_due:
            return {}
        if self._eval_loader is not None:
            return self._evaluate_dataset(self._eval_loader)
        eval_fn = self.job.eval_fn
        if eval_fn is None:
            return {}

        def evaluate() -> dict[str, float]:
            with self.ddp.evaluating():
                return _numbers(eval_fn(self.model))

        ask_main = self._engine.collectives.ask_main
        return ask_main("evaluating", evaluate, timeout_s=EVAL_TIMEOUT_S) or {}

    def _evaluate_dataset(self, batches: EvaluationLoader) -> Mapping[str, float]:
        """Evaluate ``eval_dataset``, each sample on one rank; all ranks call it together."""
        began_s, scalars, weights = time.perf_counter(), Scalars(), [0.0]
        # Without an ``eval_fn``: the training loss, and what is recorded with it.
        function, name = (self.job.eval_fn, "eval") if self.job.eval_fn else (self._loss, "loss")

        def measure(batch: Any) -> None:
            with self._figures.recording() as recorded:
                answer = function(self.model, to_device(batch, self.ddp.device))
            mean, given = _pair(answer)
            weight = batches.num_samples if given is None else checked_weight(given)
            means = {n: Recorded("mean", value) for n, value in _numbers(mean, name).items()}
            scalars.add({**recorded, **means}, weight, len(weights))
            weights.append(weight)

        found = self.evaluate_parts(
            batches, measure, lambda: [scalars.document(), math.fsum(weights)]
        )
        if found is None:
            return {}
        numbers = reduce_scalars([document for document, _ in found.values()])
        if "loss" in numbers:
            weight = math.fsum(weight for _, weight in found.values())
            measured = {"loss": numbers["loss"], "weight": weight}
            elapsed_s = time.perf_counter() - began_s
            window = self.ddp.window
            self.ddp.events.emit(
                "eval", window=window, name="heldout", **measured, elapsed_s=elapsed_s
            )
        return numbers

    def _loss(self, model: Any, batch: Any) -> tuple[float, float | None]:
        loss, weight = _loss_and_weight(self.job.train_fn(model, batch))
        return float(loss), weight


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a micro-batch: tensors in lists, tuples and dicts, and objects with a method ``to``."""
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, _Movable):
            return leaf
        # Objects that move their own tensors: PackedSequence, graphs, a tokenizer's batch.
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf.to(device)

    return tree_map(move, batch, is_leaf=lambda node: isinstance(node, _Movable))


@runtime_checkable
class _Movable(Protocol):
    def to(self, device: torch.device) -> Any: ...


def _check(name: str, value: object, kinds: Any, wanted: str) -> None:
    """Refuse a value of a wrong type that a function of the user has returned."""
    if not all(isinstance(one, kinds) for one in several(value) or [None]):
        raise ConfigError(f"{name} returned {value!r}, a {type(value).__name__}; return {wanted}")


def _pair(answer: Any) -> tuple[Any, Any]:
    """Return the value and the weight, if any, that a function of the user has returned."""
    return answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)


def _loss_and_weight(answer: Any) -> tuple[Tensor, Any]:
    loss, weight = _pair(answer)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UsageError(
            f"train_fn returned {shown} as the loss; return a tensor with one element, the mean "
            "over the micro-batch, or a pair (loss, weight)"
        )
    return loss.reshape(()), weight


def _numbers(answer: Any, name: str = "eval") -> dict[str, float]:
    try:
        if isinstance(answer, Mapping):
            return {str(name): float(value) for name, value in answer.items()}
        return {name: float(answer)}
    except (TypeError, ValueError):
        raise UsageError(
            f"eval_fn returned {answer!r}; return a number, or a dict of numbers by name; with "
            "eval_dataset a mean over the batch, or a pair (mean, weight)"
        ) from None


def _takes_context(function: Callable[..., object]) -> bool:
    """Return whether a function has a third parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins have no signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return len(needed) > 2
