"""The data side of ``Ddp``: loaders, and the state that a checkpoint holds of them."""

import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack, overload

from torch.utils.data import DataLoader, Dataset, IterableDataset

from evener.checkpoint import write_checkpoint
from evener.config.checks import whole_number
from evener.config.options import Allowed
from evener.data.fetching import Prefetch
from evener.engine.loaders.evaluation import EvaluationLoader
from evener.engine.loaders.gathering import Gatherer
from evener.engine.loaders.intake import Collate, Given, is_stream, read
from evener.engine.loaders.planned import TeamLoader
from evener.engine.loaders.stream import StreamLoader, stream_of
from evener.engine.state import Stateful
from evener.errors import CheckpointError, ConfigError, EvenerError
from evener.loop.assembly import Assembly
from evener.loop.event_stream import EventStream
from evener.loop.saved_state import capture, find_state, restore
from evener.protocol.row import Purpose

T = TypeVar("T")
MicroBatchSize = int | Literal["auto", "share"]

_LEAST_FOR_STATISTICS = 3
"""Least micro-batch of a model with batch statistics: any share of two or more samples can be cut
into micro-batches of up to so many without one of a single sample."""


class LoaderOptions(TypedDict, total=False):
    """Keywords of ``Ddp.loader``."""

    batch_size: int | None
    seed: int
    shuffle: bool | None
    collate_fn: Collate | None
    num_workers: int | None
    micro_batch_size: MicroBatchSize
    whole_micro_batches: bool
    prefetch: Prefetch
    max_steps: int | None


class DataSide:
    """What ``Ddp`` offers for data and for state on disk."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._engine = assembly.engine
        self.events = EventStream(assembly)
        self._loaders: list[TeamLoader | StreamLoader] = []
        self._eval_loaders: weakref.WeakSet[EvaluationLoader] = weakref.WeakSet()
        self._gatherer = Gatherer(assembly.engine)

    @overload
    def loader(  # type: ignore[overload-overlap]  # a stream is a Dataset, too
        self, dataset: IterableDataset[Any], **options: Unpack[LoaderOptions]
    ) -> StreamLoader: ...
    @overload
    def loader(self, dataset: Dataset[Any], **options: Unpack[LoaderOptions]) -> TeamLoader: ...
    @overload
    def loader(
        self, dataset: DataLoader[Any], **options: Unpack[LoaderOptions]
    ) -> TeamLoader | StreamLoader: ...
    def loader(
        self,
        dataset: Given,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
        micro_batch_size: MicroBatchSize = "auto",
        whole_micro_batches: bool = False,
        prefetch: Prefetch = "auto",
        max_steps: int | None = None,
    ) -> TeamLoader | StreamLoader:
        """Return a loader for training, which gives each rank its part of the data.

        Over a map-style data set every sample is trained on exactly once an epoch, in windows of
        ``batch_size`` samples that are split by speed. A ``DataLoader`` keeps its data set,
        ``collate_fn``, ``num_workers``, ``pin_memory``, ``drop_last`` and sampler; its
        ``batch_size`` becomes that of the whole team, so that the optimizer steps stay the same.

        A plain ``BatchSampler`` counts as its sampler and ``batch_size``.

        Over an ``IterableDataset``, or a ``DataLoader`` with another batch sampler, each rank reads
        for itself and contributes one batch to every window. A message says once what is then not
        guaranteed.

        Args:
            dataset: Anything with ``len`` and ``[index]``, an ``IterableDataset``, or a
                ``DataLoader`` over either; the same on every rank.
            batch_size: Samples of one optimizer step: of the whole team in SYNC, of a rank's own
                local step in CADENCE and ASYNC.
            seed: Seed of the epochs' permutations and of derived random numbers.
            shuffle: Another order in each epoch; on for a data set, and for a ``DataLoader`` as it
                was made.
            collate_fn: Makes a micro-batch of a list of samples; torch's default otherwise.
            num_workers: 0 loads in this process, more in that many worker processes.
            micro_batch_size: Most samples of one forward/backward on this rank; ``"share"`` is this
                rank's whole part of a window. ``"auto"`` is the equal share of the batch, and at
                least three samples with batch statistics. In CADENCE and ASYNC, and with several
                models and optimizers, which may take turns (see ``step``), it is all of the batch.
            whole_micro_batches: In SYNC, make each rank's share of a window a multiple of
                ``micro_batch_size``, which must be a number, the same on every rank. For losses
                that compare the samples of a micro-batch: only the last micro-batch of a window may
                then be smaller, as in one process.
            prefetch: ``"thread"`` loads ahead in a thread: for data sets that draw no random
                numbers. ``"auto"`` loads inline, or ahead with worker processes.
            max_steps: End the run after this many optimizer steps (of all ranks together).

        Raises:
            ConfigError: Sizes that make no sense, an empty data set, or a sampler that splits the
                data itself.
        """
        batch_size = _optional("batch_size", batch_size, 1)
        num_workers = _optional("num_workers", num_workers, 0)
        max_steps = _optional("max_steps", max_steps, 0)
        seed = whole_number("seed", seed, 0)
        engine = self._engine
        loader: TeamLoader | StreamLoader
        if is_stream(dataset):
            batches = stream_of(
                dataset,  # type: ignore[arg-type]  # is_stream has looked
                rank=engine.rank,
                world_size=engine.world_size,
                batch_size=batch_size,
                collate_fn=collate_fn,
                num_workers=num_workers,
            )
            loader = StreamLoader(engine, batches, seed=seed, max_steps=max_steps)
        else:
            intake = read(
                dataset,
                batch_size=batch_size,
                collate_fn=collate_fn,
                num_workers=num_workers,
                shuffle=shuffle,
                seed=seed,
            )
            num_samples = intake.count_trained()
            size = self._most_samples(micro_batch_size, intake.batch_size, num_samples)
            for remark in intake.remarks:
                engine.habits.tell_once(remark)
            if whole_micro_batches and isinstance(micro_batch_size, str):
                raise ConfigError(
                    f"whole_micro_batches needs a number of samples, and micro_batch_size is "
                    f"{micro_batch_size!r}, which depends on the ranks; give a number"
                )
            engine.set_micro_batch_size(size)
            engine.whole_micro_batches = size if whole_micro_batches else 0
            self.events.learn(num_samples=num_samples)
            loader = TeamLoader(
                engine,
                intake,
                prefetch=prefetch,
                micro_batch_size=size,
                max_steps=max_steps,
            )
            if not self._loaders:
                loader.introduce_data()
        self._loaders.append(loader)
        engine.positions.hold(loader)
        return loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left to do, up to ``num_epochs``.

        It is like ``range(num_epochs)``, but begins with the first epoch that is not committed:
        after ``load``, and on a rank that joins an elastic team. Make the loader before.

        Args:
            num_epochs: Epochs of the run.
        """
        num_epochs = whole_number("num_epochs", num_epochs, 0)
        engine = self._engine
        planned = [loader for loader in self._loaders if isinstance(loader, TeamLoader)]
        epoch = 0
        while True:
            if planned and engine.is_joining:  # perhaps again, as the team has continued without it
                planned[0].join()
                epoch = engine.cursor.epoch  # where the others are, be it the one that it was in
            else:
                epoch = max([epoch, *(one.cursor.epoch for one in planned)])
            if epoch >= num_epochs:
                return
            yield epoch
            epoch += 1

    def eval_loader(
        self,
        dataset: Given,
        *,
        batch_size: int | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
    ) -> EvaluationLoader:
        """Return a loader for evaluation: each sample on one rank, once, in the data set's order.

        All ranks iterate over it together: after an epoch, or in ``on_commit``, where those that
        are not parked share the whole data set. In the loop, ``gather`` gives every rank the rows
        of all ranks, for metrics that need them all (F1, AUC, BLEU). Use ``weighted_mean`` to
        combine means of the ranks' parts exactly::

            logits, labels = [], []
            with ddp.evaluating():
                for x, y in ddp.eval_loader(valid_set, batch_size=64):
                    logits.append(ddp.gather(model(x)))
                    labels.append(ddp.gather(y))
            auc = roc_auc_score(torch.cat(labels), torch.cat(logits))  # the same on every rank

        With fewer samples than ranks, rank 0 evaluates them all. The loop's body does not run on
        the others, which get no rows: compute on rank 0 if that may happen.

        Args:
            dataset: Map-style data set, or a ``DataLoader`` over one; the same on every rank.
            batch_size: Most samples of a batch on this rank; that of the ``DataLoader`` by default.
            collate_fn: As in ``loader``.
            num_workers: As in ``loader``.

        Raises:
            ConfigError: The data set cannot be split, or there is no batch size.
        """
        if is_stream(dataset):
            raise ConfigError(
                "an IterableDataset or a batch sampler cannot be split for evaluation; give a "
                "map-style data set, or let every rank evaluate on all of it"
            )
        intake = read(
            dataset,
            batch_size=_optional("batch_size", batch_size, 1),
            collate_fn=collate_fn,
            num_workers=_optional("num_workers", num_workers, 0),
        )
        loader = EvaluationLoader(self._engine, self._gatherer, intake)
        self._eval_loaders.add(loader)
        return loader

    def gather(self, value: T) -> T:
        """Give every rank the rows of all ranks, in the order of the data set.

        In the loop of an ``eval_loader``, concatenate the results of successive calls: they are the
        rows of the whole data set in its order, each once, on every rank. All ranks call it equally
        often for each batch, in the same order. With a tiny ``batch_size``, a rank may have two
        batches in the last round: it gets no rows for the first of them, and all for the second.
        Outside of any loop, rows come in rank order.

        Args:
            value: Tensor, or a list, tuple or dict of tensors, on any device. The first dimension
                may differ between ranks; the others and the dtype are the same on all. A scalar
                tensor is one row. No gradient flows.

        Returns:
            New tensors of the same dtype on the same device, in the same structure.

        Raises:
            UsageError: In a training loop, or not a dense tensor.
            CollectiveMismatchError: Ranks gather rows of different kinds, or a different number of
                times.
        """
        return self._gatherer.gather(value)

    def register(self, name: str, stateful: Stateful) -> None:
        """Save and restore an object with ``save`` and ``load``.

        Its state is taken from one rank, so it must be the same on every rank. Examples are a
        scheduler, an average of the weights, and a metric over all ranks. Parked ranks receive it
        when they are called back. After ``load``, registering restores the state.

        Args:
            name: Its name in checkpoints.
            stateful: Has ``state_dict`` and ``load_state_dict``; the state consists of tensors,
                numbers, strings, ``None``, lists, tuples and dicts.

        Raises:
            ConfigError: The name is taken or impossible.
        """
        state = self.assembly.state
        state.register(name, stateful)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint of the whole team to ``path``; all ranks call it together.

        Raises:
            CheckpointError: The main process could not write it.
            ReplicasDifferError: Ranks hold different states (with ``DdpConfig.verify_every``).
        """
        engine = self._engine
        engine.ask(Purpose.SAVE)
        if engine.is_alone:  # the team has saved, or not, before this rank has joined it
            return
        engine.settle()  # parameters may be a window ahead of the data position
        engine.prepare_save()  # not before: a function of ``on_commit`` may save, too
        engine.verify()
        if failure := engine.ask_main(lambda: self._write(Path(path))):
            raise CheckpointError(failure)

    def _write(self, path: Path) -> str:
        """Write a checkpoint, on the main rank; return why it could not, empty if it could."""
        engine = self._engine
        with engine.consensus(), engine.team.in_phase("saving"):
            try:
                snapshot = capture(self.assembly, engine.positions.states())
                written = write_checkpoint(path, snapshot)
            except EvenerError as error:
                return str(error)
        self.events.checkpoint(written)
        return ""

    def load(self, path: str | Path, *, allow: Collection[Allowed] = ()) -> None:
        """Restore a checkpoint, on any number of ranks; all ranks call it together.

        Call it after ``setup``, before or after ``loader``, and before the first epoch.

        Args:
            path: The checkpoint, or a folder of which the newest complete one is taken.
            allow: ``"data"`` continues with a data set of another size, or another seed, from its
                first epoch on; model, optimizer and progress are kept.

        Raises:
            CheckpointError: Missing, damaged, of another model or data set, or not the same on
                every rank.
        """
        assembly = self.assembly
        try:
            saved = find_state(assembly, Path(path))
        except CheckpointError as error:
            assembly.engine.introduce([str(error), 0])
            raise
        answers = assembly.engine.introduce(["", saved.progress.window])
        for rank, (refused, window) in enumerate(answers):
            if refused:
                raise CheckpointError(f"rank {rank} cannot load it: {refused}")
            if window != answers[0][1]:
                raise CheckpointError(
                    f"rank {rank} finds the checkpoint of window {window} in {path}, rank 0 that "
                    f"of window {answers[0][1]}; use storage that every rank sees"
                )
        positions = self._engine.positions
        positions.restore(saved.positions, allow_new_data="data" in allow)
        restore(assembly, saved)
        self.events.learn(resumed_from=saved.path, window=self._engine.window)

    def _most_samples(self, given: MicroBatchSize, batch_size: int, num_samples: int) -> int:
        """Return the most samples of one forward/backward; see ``loader``."""
        if not isinstance(given, str):
            return whole_number("micro_batch_size", given, 1)
        if given not in ("auto", "share"):
            raise ConfigError(f"micro_batch_size is {given!r}; give a number, 'share' or 'auto'")
        if given == "share" or self.assembly.takes_turns:
            return batch_size
        engine = self._engine
        equal = -(-min(batch_size, num_samples) // engine.parts_of_batch)
        least = _LEAST_FOR_STATISTICS if engine.options.avoid_ones else 1
        return max(equal, min(batch_size, least))


def _optional(name: str, value: int | None, least: int) -> int | None:
    return None if value is None else whole_number(name, value, least)
