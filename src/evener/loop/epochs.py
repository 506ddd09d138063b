"""The loop over epochs of managed runs and jobs: training, checkpoints, the end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from evener.devices import free_cached_memory
from evener.engine.loaders.evaluation import EvaluationLoader
from evener.engine.loaders.training import TeamLoader
from evener.engine.memory import MicroBatchTooLarge, explain, is_out_of_memory
from evener.engine.results import WindowResult
from evener.errors import CoordinatorLostError
from evener.loop.checkpointing import Checkpointer
from evener.loop.loop import Loop
from evener.team.failures import note


class EpochLoop(ABC):
    """A job of the whole team, trained until its last epoch or step; every rank makes one.

    A job implements ``train_micro_batch``. It extends ``on_commit`` by what else it does when a
    window has been committed, such as evaluating. It sets ``loader``, and loads a checkpoint if it
    resumes, before it calls ``epochs``::

        for epoch in self.epochs():
            ...                        # the epoch, or a part of it, has been trained
        path = self.finish()

    Args:
        ddp: The team.
        num_epochs: Epochs of the run; ignored with ``max_steps``.
        max_steps: Optimizer steps of the run, skipped ones included.
        checkpoint_every: Optimizer steps of the team between checkpoints, each taken at the end of
            a window; 0 or ``None`` for one at the end only.

    Attributes:
        loader: The training data; set by the job.
        checkpointer: Writes the checkpoints; set by the job, which also closes it.
    """

    loader: TeamLoader
    checkpointer: Checkpointer | None = None

    def __init__(
        self,
        ddp: Loop,
        *,
        num_epochs: int | None,
        max_steps: int | None,
        checkpoint_every: int | None,
    ) -> None:
        self.ddp = ddp
        self._num_epochs = num_epochs or 0
        self._max_steps = max_steps
        self._checkpoint_every = checkpoint_every or 0

    @property
    def has_ended(self) -> bool:
        """Return whether the last epoch or step is committed; a loaded checkpoint counts, too."""
        if self._max_steps is not None:
            return self.ddp.assembly.engine.optimizer_steps >= self._max_steps
        return self.loader.cursor.epoch >= self._num_epochs

    def epochs(self) -> Iterator[int]:
        """Train until the run ends or the team stops; all ranks iterate together.

        Yields:
            The number of each epoch when this rank has left it.
        """
        self.ddp.on_commit(self.on_commit)
        while True:
            self.loader.join()  # also a second time, if the team has continued without this rank
            if self.ddp.stopping or self.has_ended:
                return
            epoch = self.loader.cursor.epoch
            self.begin_epoch(epoch)
            try:
                self.train_epoch(epoch)
            except CoordinatorLostError as error:
                self._save_alone(error)
                raise
            yield epoch

    def _save_alone(self, error: CoordinatorLostError) -> None:
        """Save what the main rank of an elastic team holds, which cannot continue."""
        ddp, engine = self.ddp, self.ddp.assembly.engine
        if self.checkpointer is not None and ddp.is_main_process:
            hosts = {member.host for member in ddp.members if member.host}
            if len(hosts) > 1:  # other hosts may still reach the coordinator, and save, too
                self.checkpointer.move(f"-of-generation-{engine.rounds.state.generation}")
            engine.generations.go_alone()
            note(error, f"evener: what the team has trained so far is saved in {self.finish()}")

    def train_epoch(self, epoch: int) -> None:
        """Train on the rest of an epoch; if memory runs out, compute the share again.

        Raises:
            RuntimeError: Or another error of ``train_micro_batch``; also if memory does not suffice
                for a micro-batch of one sample, with a note.
        """
        batches, end = self.loader.epoch(epoch), object()
        batch = next(batches, end)
        while batch is not end:
            failure = None
            try:
                self.train_micro_batch(batch)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                # Its traceback holds the frames, and these hold the activations.
                failure = error.with_traceback(None)
            if failure is None:
                self.ddp.step()
                batch = next(batches, end)
                continue
            del batch
            free_cached_memory()
            try:
                batch = batches.throw(MicroBatchTooLarge())
            except StopIteration:
                return  # the team has stopped meanwhile
            except MicroBatchTooLarge as last:
                explain(failure, last.samples)
                raise failure from None
            self.begin_again()

    def evaluate_parts(
        self,
        batches: EvaluationLoader,
        measure: Callable[[Any], object],
        result: Callable[[], Any],
        *,
        heed_stop: bool = True,
    ) -> dict[int, Any] | None:
        """Evaluate a data set, each sample on one rank; all ranks call it together.

        Args:
            batches: The data.
            measure: Called with each batch of this rank, in ``eval()`` mode and without gradients.
            result: Returns the result of this rank's batches, in JSON types.
            heed_stop: Break off if the team stops.

        Returns:
            The results by rank, the same on every rank; ``None`` if a rank was asked to stop
            meanwhile.
        """
        ddp, engine = self.ddp, self.ddp.assembly.engine
        results: dict[int, Any] = {}
        to_do: Iterable[Any] | None = batches
        while to_do is not None:
            with ddp.evaluating():
                for batch in to_do:
                    if not (heed_stop and ddp.wants_stop()):
                        with ddp.emulated_slowness():
                            measure(batch)
            results = engine.collectives.ask("evaluating", result())
            # A rank was lost before it could send its results: the others do its part.
            to_do = batches.make_up(results)
        return None if heed_stop and ddp.stopping else results

    def finish(self) -> Path | None:
        """Save the state at the end, and wait until it is on disk; all ranks call it together.

        Returns:
            The newest complete checkpoint; ``None`` if the team has continued without this rank.

        Raises:
            CheckpointError: It could not be written.
        """
        if self.checkpointer is None:
            return None
        is_over = False
        while not is_over:
            self.prepare_save()
            is_over = self.checkpointer.finish(self.loader.cursor.state_dict())
        return self.checkpointer.path

    def save(self) -> None:
        """Save the state, at a commit or between epochs; all ranks call it together."""
        if self.checkpointer is not None:
            self.prepare_save()
            self.checkpointer.save(self.loader.cursor.state_dict())

    def is_due(self, result: WindowResult) -> bool:
        """Return whether a checkpoint is due after a window; the same on every rank."""
        every = self._checkpoint_every
        return every > 0 and result.progress.optimizer_steps % every < result.optimizer_steps

    @abstractmethod
    def train_micro_batch(self, batch: Any) -> object:
        """Compute forward and backward (``ddp.backward``) of a micro-batch of the loader."""

    def begin_epoch(self, epoch: int) -> None:
        """Prepare an epoch, which may have been begun by an earlier process."""
        return

    def prepare_save(self) -> None:
        """Update the assets and documents of the next checkpoint."""
        return

    def begin_again(self) -> None:
        """Forget the records of this rank's share, which is computed again in smaller parts."""
        return

    def on_commit(self, result: WindowResult) -> None:
        """Save a checkpoint if it is due; called on every rank after each committed window."""
        if self.is_due(result):
            self.save()
        elif self.checkpointer is not None:
            self.checkpointer.report()
