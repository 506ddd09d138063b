"""``Loop``: data-parallel training in the user's loop, on devices of unequal speed."""

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from evener.checkpoint import write_checkpoint
from evener.comm.base import Communicator
from evener.comm.existing import default_group
from evener.config.checks import whole_number
from evener.config.keys import Allowed
from evener.config.settings import DdpConfig
from evener.data.fetching import Prefetch
from evener.devices import count_accelerators
from evener.engine.loaders.dataset_arguments import Collate, DatasetArguments, Given, is_stream
from evener.engine.loaders.evaluation import EvaluationLoader, Gatherer
from evener.engine.loaders.stream import StreamLoader
from evener.engine.loaders.training import TeamLoader
from evener.engine.membership_change import cannot_join
from evener.engine.memory import explain as explain_memory
from evener.engine.results import Progress, WindowResult
from evener.engine.share import (
    Share,
    Stopwatch,
    check_reduction,
    checked_weight,
    needs_plans,
)
from evener.engine.sync import SyncEngine
from evener.engine.training_state import Stateful
from evener.errors import CheckpointError, ConfigError, EvenerError, PeerLostError, UsageError
from evener.loop.arguments import Models, Schedulers, check_arguments, in_evaluation
from evener.loop.assembly import Assembly
from evener.loop.event_stream import EventStream, SinkMaker
from evener.loop.saved_state import capture, find_state, restore
from evener.observe.events import Sink
from evener.places import has_passed, methods_passed, raised_at
from evener.planning.policies import ApplyPolicy
from evener.protocol.formation import EVALUATING, TRAINING, read_team_limits
from evener.team.elastic_membership import check_team_limits
from evener.team.environment import ELASTIC, DistributedTrainConfig
from evener.team.failures import explain_with, forget, note
from evener.team.fixed import place_in
from evener.team.members import Member
from evener.team.membership import Membership
from evener.team.placement import Devices, devices_of_host
from evener.team.starting import start_all_ranks, start_elastic_team

T = TypeVar("T")
_LOADING = "loading a checkpoint (ddp.load)"
_AVERAGING = "averaging a value (ddp.weighted_mean)"
MicroBatchSize = int | Literal["auto", "share"]

#: Longest wait for another rank in ``Ddp.close``, in seconds: no rank has work left there.
CLOSING_S = 60.0

_NO_SINGLE_STEPS = (
    "ddp.step(optimizer) needs policy 'sync': in windows of local steps every optimizer is stepped "
    "on every batch; leave the argument out, or use policy 'sync'"
)

_NEVER_COMPUTED = (
    "evener: rank {} has had no share of any window so far, so its loop's body has not run, and "
    "variables that it assigns do not exist. Remedy: set result = None before the loop, and use "
    "result.loss only if result is not None; or use ddp.on_commit(fn)"
)

_LEAST_FOR_STATISTICS = 3
"""Smallest micro-batch size with batch statistics: any share of two or more samples can then be
split without a micro-batch of a single sample."""


class Loop:
    """A rank of the team; made by ``setup``.

    Users know it as ``Ddp``, which documents the public attributes.

    Attributes:
        assembly: The objects behind this rank; not part of the public interface.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._engine = assembly.engine
        self.events = EventStream(assembly)
        self._loaders: list[TeamLoader | StreamLoader] = []
        self._eval_loaders: weakref.WeakSet[EvaluationLoader] = weakref.WeakSet()
        self._gatherer = Gatherer(assembly.engine)
        self._closed = False
        explain_with(self._explain)
        self.world_size = assembly.team.world_size
        self.device = assembly.device
        self.precision = assembly.precision

    @classmethod
    def setup(
        cls,
        model: Models,
        optimizer: Optimizer | Sequence[Optimizer],
        scheduler: Schedulers = None,
        *,
        policy: str | ApplyPolicy = ApplyPolicy.SYNC,
        backend: str = "auto",
        devices: Devices = "auto",
        precision: str = "auto",
        config: DdpConfig | None = None,
        environment: DistributedTrainConfig | None = None,
        communicator: Communicator | None = None,
        process_group: Any = None,
        elastic: Membership | str | tuple[int, int] | None = None,
        quiet: bool = False,
        sinks: Sequence[Sink | SinkMaker] = (),
    ) -> Self:
        """Join the team and make all ranks start from rank 0's model.

        All ranks call it together. The model moves to this rank's device, its trainable
        parameters move into flat buffers (the ``Parameter`` objects stay), it gets ``train()``, and
        receives rank 0's parameters and buffers.

        The rank reads its place from the environment: torchrun, SLURM or ``evener launch``. In a
        script that was started plainly (``python train.py``) and asks for several devices, this
        call starts the script once for each of them and does not return: the process becomes the
        launcher. The code before the call runs again in every rank, so call it early. If a script
        cannot be started again (a notebook, an interactive session), ``"auto"`` uses one device and
        prints how to use all.

        Args:
            model: A module, or several as a list or dict; the same architectures on every rank.
            optimizer: One or more ``torch.optim`` optimizers over the models' parameters.
            scheduler: Torch scheduler(s), stepped once per optimizer step of the team; or a
                function of ``Progress`` that gives the factor of the base learning rate.
            policy: ``"sync"``, ``"cadence"`` or ``"async"``; see ``ApplyPolicy``.
            backend: ``"auto"``, ``"gloo"``, ``"cpu"`` or ``"nccl"``; see ``AverageBackend``.
            devices: ``"auto"`` (every device of this host's accelerator, else the CPU), ``"cpu"``,
                ``"cuda"``, ``"xpu"``, ``"mps"``, ``"accelerator"`` (whatever torch finds), one
                device such as ``"cuda:1"``, a number of ranks, or a list with a device for each
                rank of this host, such as ``["cuda:0", "cpu"]``, ``["cpu", "cpu"]`` or ``[0, 1]``
                (numbers of the host's accelerator).
            precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (autocast around the model's forward);
                ``"auto"`` is the fast one of this device. Ranks may differ. With ``fp16`` anywhere
                the team scales losses; if one rank overflows, all skip the window.
            config: Further options.
            environment: This rank's place, instead of the process environment.
            communicator: The ranks to train with, instead of connecting to them; closed by
                ``close``. Its rank and world size take precedence over those of ``environment``.
            process_group: A group of ``torch.distributed`` whose ranks are the team; the default
                group, if one is initialised. evener reads ranks and addresses from it; gradients
                travel over evener's own connections.
            elastic: Fewest and most workers of an elastic team, such as ``"1:3"`` or ``(1, 3)``. A
                script that was started plainly becomes the launcher of the most workers; ``evener
                launch --elastic`` can start fewer. ``None`` is an elastic team if the script was
                started for one, else a fixed team. Or a ``Membership``, which decides which ranks
                are in the team.
            quiet: Do not print the team to stderr; warnings are always printed.
            sinks: Receive the run's events, on the main process. Each is a ``Sink``, or a function
                without arguments that makes one, called on the main process only. Closed by
                ``close``, and when another rank becomes the main process.

        Raises:
            ConfigError: A bad option, or ranks with different models or versions.
            LaunchError: The ranks did not find one another.
        """
        optimizers = check_arguments(model, optimizer, scheduler)
        config = config or DdpConfig()
        config = replace(config, quiet=True) if quiet else config
        place = environment
        membership = elastic if isinstance(elastic, Membership) else None
        if elastic is not None and membership is None:
            _find_elastic_team(elastic, quiet=config.quiet)
        if place is None and communicator is None and membership is None:
            place = _find_place(devices, process_group or default_group(), quiet=config.quiet)
        team = cls(
            Assembly(
                model,
                optimizers,
                scheduler,
                policy=policy,
                backend=backend,
                devices=devices,
                precision=precision,
                config=config,
                environment=place or DistributedTrainConfig.from_env(),
                communicator=communicator,
                membership=membership,
            )
        )
        try:
            team.events.report_to(sinks)
        except BaseException:
            team.close()
            raise
        return team

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the member of each rank, or its last one in an elastic team; see ``devices``."""
        return self.assembly.team.member_by_rank

    @property
    def devices(self) -> tuple[str, ...]:
        """Return each rank's device, such as ``"cuda:0"``; empty for ranks that had no worker."""
        return tuple(member.device for member in self.members)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0; a rank of an elastic team keeps it while it is there."""
        return self._engine.rounds.rank

    @property
    def is_main_process(self) -> bool:
        """Return whether this rank writes and prints for the team; true on one rank.

        It is rank 0 until that is parked because it is too slow. Then it is the lowest rank that
        stays, also after rank 0 has come back. In an elastic team it is the oldest member. So read
        it each time.
        """
        return self._engine.rounds.is_main

    @property
    def window(self) -> int:
        """Return the windows closed so far: the only counter that is the same on every rank."""
        return self._engine.window

    @property
    def progress(self) -> Progress:
        """Return what the team has applied so far."""
        return self._engine.run.progress

    @property
    def stopping(self) -> bool:
        """Return whether the team has agreed to stop; loaders then yield nothing more."""
        return self._engine.rounds.stopping

    # ── data ─────────────────────────────────────────────────────────────────────────────────────

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
        cache: str | None = None,
        max_steps: int | None = None,
    ) -> TeamLoader | StreamLoader:
        """Return a loader for training, which gives each rank its part of the data.

        Over a map-style data set every sample is trained on exactly once an epoch, in windows of
        ``batch_size`` samples that are split by speed. A ``DataLoader`` keeps its data set,
        ``collate_fn``, ``num_workers``, ``pin_memory``, ``drop_last`` and sampler; its
        ``batch_size`` becomes that of the whole team, so that the optimizer steps stay the same.

        A plain ``BatchSampler`` counts as its sampler and ``batch_size``.

        Over an ``IterableDataset``, or a ``DataLoader`` with another batch sampler, each rank reads
        for itself and contributes one batch to every window. A message names once what is then not
        guaranteed.

        Args:
            dataset: Anything with ``len`` and ``[index]``, an ``IterableDataset``, or a
                ``DataLoader`` over either; the same on every rank.
            batch_size: Samples of one optimizer step: of the whole team in SYNC, of a rank's own
                local step in CADENCE and ASYNC.
            seed: Seed of the epochs' permutations and of derived random numbers.
            shuffle: Whether each epoch has another order; by default true for a data set, and as
                it was made for a ``DataLoader``.
            collate_fn: Makes a micro-batch of a list of samples; torch's default otherwise.
            num_workers: 0 loads in this process, more in that many worker processes.
            micro_batch_size: Most samples of one forward/backward on this rank; ``"share"`` is this
                rank's whole part of a window. ``"auto"`` is the equal share of the batch, and at
                least three samples with batch statistics. In CADENCE and ASYNC, and with several
                models and optimizers, which may be stepped one by one, it is all of the batch.
            whole_micro_batches: In SYNC, make each rank's share of a window a multiple of
                ``micro_batch_size``, which must be a number, the same on every rank. For losses
                that compare the samples of a micro-batch: only the last micro-batch of a window may
                then be smaller, as in one process.
            prefetch: ``"thread"`` loads ahead in a thread: for data sets that draw no random
                numbers. ``"auto"`` loads inline, or ahead with worker processes.
            cache: Keep the samples of a map-style data set after this rank's first fetch, for later
                epochs: ``"memory"`` in this process, ``"device"`` as tensors on this rank's device,
                ``"disk"`` or ``"disk:FOLDER"`` in a file that is deleted with this process. A cache
                uses at most half of the free space. Random samples are refused; ``collate_fn`` may
                draw random numbers.
            max_steps: End the run after this many optimizer steps (of all ranks together).

        Raises:
            ConfigError: Invalid sizes, or a data set that is empty or cannot be split.
        """
        max_steps = _optional("max_steps", max_steps, 0)
        seed, engine = whole_number("seed", seed, 0), self._engine
        source = _source(batch_size, collate_fn, num_workers)
        loader: TeamLoader | StreamLoader
        if is_stream(dataset):
            if not isinstance(engine, SyncEngine):
                raise needs_plans()
            if cache is not None:
                raise ConfigError(
                    f"cache={cache!r} needs samples with an index, which a stream does not have; "
                    "give a map-style data set, or leave cache out"
                )
            loader = StreamLoader(engine, dataset, **source, seed=seed, max_steps=max_steps)
        else:
            arguments = DatasetArguments(dataset, **source, shuffle=shuffle, seed=seed)
            for remark in arguments.remarks:
                engine.options.guards.warn_once(remark)
            if micro_batch_size in ("auto", "share") and not whole_micro_batches:
                size = self._most_samples(arguments, is_share=micro_batch_size == "share")
            else:
                size = whole_number("micro_batch_size", micro_batch_size, 1)
            engine.run.limits.start_with(size)
            engine.policy.set_micro_batch_sizes(engine.run.limits.sizes)
            engine.whole_micro_batches = size if whole_micro_batches else 0
            self.events.learn(num_samples=arguments.count_trained())
            if cache is None:
                fetcher = arguments.fetcher(prefetch)
            else:
                fetcher = arguments.cached_fetcher(prefetch, cache, self.device)
            loader = TeamLoader(
                engine, arguments, fetcher=fetcher, micro_batch_size=size, max_steps=max_steps
            )
            if not self._loaders:
                loader.introduce_data()
        self._loaders.append(loader)
        engine.run.positions.hold(loader.cursor)
        return loader

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, up to ``num_epochs``.

        It is like ``range(num_epochs)``, but begins with the first epoch that is not committed:
        after ``load``, and on a rank that joins an elastic team. Make the loader before the call.

        Args:
            num_epochs: Epochs of the run.
        """
        num_epochs = whole_number("num_epochs", num_epochs, 0)
        engine = self._engine
        planned = [loader for loader in self._loaders if isinstance(loader, TeamLoader)]
        epoch = 0
        while True:
            if (
                planned and engine.generations.is_joining
            ):  # perhaps again, as the team has continued without it
                planned[0].join()
                epoch = (
                    engine.run.open_cursor.epoch
                )  # where the others are, be it the one that it was in
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

        All ranks iterate over it together after an epoch. In ``on_commit``, the ranks that are not
        parked share the whole data set. In the loop, ``gather`` gives every rank the rows of all
        ranks, for metrics that need them all (F1, AUC, BLEU). Use ``weighted_mean`` to combine
        means of the ranks' parts exactly::

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
        arguments = DatasetArguments(dataset, **_source(batch_size, collate_fn, num_workers))
        loader = EvaluationLoader(self._engine, self._gatherer, arguments)
        self._eval_loaders.add(loader)
        return loader

    def gather(self, value: T) -> T:
        """Give every rank the rows of all ranks, in the order of the data set.

        In the loop of an ``eval_loader``, concatenate the results of successive calls: they are the
        rows of the whole data set in its order, each once, on every rank. All ranks call it the
        same number of times for each batch, in the same order. With a tiny ``batch_size``, a rank
        may have two batches in the last round: it gets no rows for the first of them, and all for
        the second. Outside of any loop, rows come in rank order.

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

    def _most_samples(self, arguments: DatasetArguments, *, is_share: bool) -> int:
        """Return the most samples of a rank's part of a window; see ``loader``."""
        size = arguments.batch_size
        if is_share or self.assembly.steps_singly:
            return size
        engine = self._engine
        parts = engine.team.world_size if engine.rounds.state.is_sync else 1
        equal = -(-min(size, arguments.count_trained()) // parts)
        least = _LEAST_FOR_STATISTICS if self._engine.options.avoid_ones else 1
        return max(equal, min(size, least))

    # ── training ─────────────────────────────────────────────────────────────────────────────────

    def backward(
        self,
        loss: Tensor,
        weight: float | None = None,
        *,
        optimizer: Optimizer | None = None,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> None:
        """Add a micro-batch's gradient to the window.

        The window's gradient is Σ ``weight · ∇loss`` / Σ ``weight`` over all ranks and
        micro-batches: that of the mean over all units, however they were split. A second call on
        one micro-batch adds gradient, not weight. With ``reduction="sum"`` it is Σ ``∇loss``, that
        of the sum over all units. Clipping and ``grad_norm`` then see the gradient of the sum;
        ``WindowResult.loss`` is the mean over units in any case.

        Args:
            loss: Scalar; the mean over ``weight`` units, or their sum.
            weight: Units behind the loss, such as counted tokens; the micro-batch's samples by
                default, and 1 outside of a loader. With 0 the micro-batch does not count.
            optimizer: The optimizer of this loss, if several are stepped one by one: only its
                parameters get a gradient. See ``step``.
            reduction: What the loss is: ``"mean"`` or ``"sum"`` over its units, the same in the
                whole window, on every rank. ``None`` is ``"mean"``, but one of the first losses
                that is a sum is refused.

        Raises:
            UsageError: Outside a micro-batch, a loss that is a sum or was scaled by a
                ``GradScaler``, a bad weight, a second weight or reduction that differs, or
                gradients that something else has written.
        """
        check_reduction(reduction)
        engine = self._engine
        share = engine.share
        if not engine.is_training:
            share = self._start_unplanned()
        engine.options.guards.before_backward(loss, share.open_samples, reduction)
        part, own = None, None
        if optimizer is not None:
            part = self.assembly.part_of(optimizer)
            own = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        with engine.in_backward(part):
            share.backward(loss, weight, part, own, summed=reduction == "sum")
        engine.team.membership.declare(TRAINING, done=1)
        engine.plan_ahead()

    def step(self, optimizer: Optimizer | None = None) -> WindowResult | None:
        """End a micro-batch; with the last one of this rank's share, close the window.

        Several optimizers are stepped together, or one by one on the same samples, as in a GAN::

            for real, noise in loader.epoch(epoch):
                ddp.backward(loss_of_discriminator(...), optimizer=opt_d)
                ddp.step(opt_d)
                ddp.backward(loss_of_generator(...), optimizer=opt_g)
                ddp.step(opt_g)

        Each ``ddp.step(optimizer)`` averages and applies what was accumulated for that optimizer;
        the window closes when the loop asks for the next batch. All ranks step the same optimizers
        in the same order. The loader must yield a rank's share of a window as one micro-batch: the
        second optimizer needs the parameters that the first has updated on *all* samples. That is
        ``micro_batch_size="share"``, the default with several models and optimizers.

        Args:
            optimizer: Step this one alone.

        Returns:
            ``None`` inside a window; at its end the result, the same on every rank. By then
            gradients are averaged and clipped, the optimizer has stepped, and gradients are zeroed.
            With ``optimizer``, the result of that step.

        Raises:
            NonFiniteGradientError: On every rank; nothing was applied.
            CollectiveMismatchError: Another rank joined a different collective.
            UsageError: Something other than ``backward`` has written gradients.
        """
        engine = self._engine
        engine.options.guards.check_gradients()
        if optimizer is None:
            return engine.end_micro_batch()
        if not isinstance(engine, SyncEngine):
            raise UsageError(_NO_SINGLE_STEPS)
        return engine.step_part(self.assembly.part_of(optimizer))

    def _start_unplanned(self) -> Share:
        """Start a window outside of any loader: one contribution of each rank."""
        engine = self._engine
        if engine.generations.is_joining:
            raise cannot_join("windows without ddp.loader")
        engine.options.guards.warn_once(
            "training without ddp.loader: every ddp.step() is one update, to which each rank "
            "contributes once, with the weight given to ddp.backward (1 by default). Not "
            "guaranteed: which rank sees which samples, that each is seen once an epoch, shares "
            "that follow speed, and resuming in mid-epoch. Ranks that read the same batches repeat "
            "one another's work: ddp.loader(dataset, batch_size=...) gives each sample to one rank"
        )
        share = engine.open_share(1)
        share.start_micro_batch(1)
        share.count_since(engine.spans.work_at_once())
        return share

    def weighted_mean(self, value: float | Tensor, weight: float = 1.0) -> float:
        """Return the mean of a number over ranks, weighted; all ranks call it together.

        Args:
            value: This rank's mean; ignored when ``weight`` is 0.
            weight: Units behind it.

        Returns:
            Σ value · weight / Σ weight in float64, the same on every rank; ``nan`` for no weight.

        Raises:
            UsageError: The weight is not a number of at least 0.
        """
        units = checked_weight(weight)
        number = value.detach() if isinstance(value, Tensor) else value  # torch warns otherwise
        product = float(number) * units if units else 0.0
        gathered = self._engine.collectives.ask(_AVERAGING, [product, units])
        self._gatherer.check_complete(gathered)
        numerator = denominator = 0.0
        for theirs, their_units in gathered.values():  # from the left, as sum() rounds otherwise
            numerator, denominator = numerator + theirs, denominator + their_units
        return numerator / denominator if denominator else float("nan")

    def on_commit(self, fn: Callable[[WindowResult], None]) -> Callable[[WindowResult], None]:
        """Call ``fn(result)`` on every rank when a window is committed.

        Committed means that every rank has applied it. The model then holds exactly that window's
        parameters and buffers on every rank: evaluate and save here. Collectives are allowed in it.
        ``fn`` is not called on a parked rank, which takes part in no window.
        """
        self._engine.commits.call(fn)
        return fn

    def stop(self) -> None:
        """Ask the team to stop after the window that is being computed; any rank may call it."""
        self._engine.rounds.stop()

    def wants_stop(self) -> bool:
        """Return whether this rank was asked to stop; the team agrees at its next exchange."""
        return self._engine.rounds.wants_stop()

    @contextmanager
    def emulated_slowness(self) -> Iterator[None]:
        """Slow the block down on a rank that is emulated slower; do nothing on others."""
        watch = Stopwatch(self._engine.options.slowdown)
        yield
        watch.stop()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into ``eval()`` mode without gradients during the block."""
        team = self._engine.team
        with team.in_phase(EVALUATING), in_evaluation(self.assembly.model):
            yield

    # ── state ────────────────────────────────────────────────────────────────────────────────────

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
            ConfigError: The name is in use or invalid.
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
        engine.collectives.ask("saving (ddp.save)")
        if (
            engine.generations.is_alone
        ):  # the team has saved, or not, before this rank has joined it
            return
        engine.settle()  # parameters may be a window ahead of the data position
        engine.prepare_save()  # after settle(): a function of ``on_commit`` may save, too
        if failure := engine.collectives.ask_main("saving", lambda: self._write(Path(path))):
            raise CheckpointError(failure)

    def _write(self, path: Path) -> str:
        """Write a checkpoint, on the main rank; return why it could not, empty if it could."""
        engine = self._engine
        with engine.consensus.shown(), engine.team.in_phase("saving"):
            try:
                snapshot = capture(self.assembly, engine.run.positions.states())
                written = write_checkpoint(path, snapshot)
            except EvenerError as error:
                return str(error)
        self.events.checkpoint(written)
        return ""

    def load(self, path: str | Path, *, allow: Collection[Allowed] = ()) -> None:
        """Restore a checkpoint, on any number of ranks; all ranks call it together.

        Call it after ``setup``, before or after ``loader``, and before the first epoch.

        Args:
            path: The checkpoint, or a folder, whose newest complete checkpoint is used.
            allow: ``"data"`` continues with a data set of another size, or another seed, from its
                first epoch on; model, optimizer and progress are kept.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, of another model or data set, or
                not the same on every rank.
        """
        assembly = self.assembly
        try:
            saved = find_state(assembly, Path(path))
        except CheckpointError as error:
            assembly.engine.collectives.ask(_LOADING, [str(error), 0])
            raise
        own = ["", saved.engine["progress"]["window"]]
        answers = assembly.engine.collectives.ask(_LOADING, own)
        first, (_, there) = next(iter(answers.items()))
        for rank, (refused, window) in answers.items():
            if refused:
                raise CheckpointError(f"rank {rank} cannot load it: {refused}")
            if window != there:
                raise CheckpointError(
                    f"rank {rank} finds the checkpoint of window {window} in {path}, rank {first} "
                    f"that of window {there}; use storage that every rank sees"
                )
        positions = self._engine.run.positions
        positions.restore(saved.engine["positions"], allow_new_data="data" in allow)
        restore(assembly, saved)
        self.events.learn(resumed_from=saved.path, window=self._engine.window)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Leave the team: end loaders and connections; idempotent.

        Without an error, ranks first commit the applied window. In CADENCE and ASYNC they also
        average the steps of loops that were left by ``break``. All ranks do that together, and wait
        for one another for at most 60 s (or ``DdpConfig.timeout_s``, if that is less). After an
        error of the team, or one that has ended its loop, a rank does not wait for others.

        Raises:
            CollectiveError: A rank was lost, or did not come.
            ReplicasDifferError: The committed states differ (with ``DdpConfig.verify_every``).
        """
        error = sys.exception()
        self._close(error, failed=self._is_lost(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._close(error, failed=error is not None or self._is_lost(None))

    def _close(self, error: BaseException | None, *, failed: bool) -> None:
        if error is not None:
            self._explain(error)
        engine, waits, self._closed = self._engine, not (self._closed or failed), True
        if not isinstance(error, PeerLostError):  # the hook has yet to show that
            forget(self._explain)
        try:
            if waits:
                if engine.in_epoch:  # closing inside the loop is like break
                    engine.leave()
                engine.team.hurry(CLOSING_S)
                engine.settle()
                self.assembly.hand_back()
        except BaseException as broken:
            failed, error = True, broken
            raise
        finally:
            for loader in [*self._loaders, *self._eval_loaders]:
                loader.close()
            self.events.end(failed=failed, error=error)
            # If all members leave on request, the run has not ended: others may continue it.
            if not (failed or (engine.rounds.stopping and engine.team.membership.is_leaving)):
                engine.team.membership.leave(finished=True)
            self.assembly.close()

    def _is_lost(self, error: BaseException | None) -> bool:
        """Return whether this rank need not wait for the others.

        Args:
            error: The exception that is being handled; it may be unrelated to the team.
        """
        engine = self._engine
        if error is None or engine.rounds.is_lost:
            return engine.rounds.is_lost
        is_inside = engine.share.in_micro_batch
        if engine.rounds.has_left:  # by `break`, which is at another line, or by this error
            is_inside = any(has_passed(error, loader.left_at) for loader in self._loaders)
        if is_inside:
            return True
        parts = (self, *self._loaders, *self._eval_loaders)
        return isinstance(error, EvenerError) and any(
            owner in parts or getattr(owner, "_ddp", None) is self
            for owner in methods_passed(error)
        )

    def _explain(self, error: BaseException) -> None:
        """Add to an exception what is known about it here: cause, remedy, rank, file, line."""
        self.events.note_error(error)
        engine = self._engine
        explain_memory(error, engine.share.open_samples)
        if isinstance(error, NameError) and engine.window and not engine.known_sizes:
            note(error, _NEVER_COMPUTED.format(self.rank))
        if isinstance(error, EvenerError) and (place := raised_at(error)):
            note(error, f"evener: raised on rank {self.rank} at {place}")


def _find_elastic_team(given: object, *, quiet: bool) -> None:
    """Make sure that this process is a worker of such a team; may start its workers."""
    limits = "{}:{}".format(*read_team_limits(given))
    if ELASTIC not in os.environ and DistributedTrainConfig.from_env().launched_by == "alone":
        start_elastic_team(limits, quiet=quiet)
    check_team_limits(limits, os.environ)


def _find_place(devices: Devices, process_group: Any, *, quiet: bool) -> DistributedTrainConfig:
    """Return this rank's place, in a process group or the environment; may start more ranks."""
    if process_group is not None:
        return place_in(process_group)
    place = DistributedTrainConfig.from_env()
    if place.launched_by == "alone":
        start_all_ranks(
            devices_of_host(devices, count_accelerators()),
            optional=isinstance(devices, str),
            quiet=quiet,
        )
    return place


def _source(
    batch_size: int | None, collate_fn: Collate | None, num_workers: int | None
) -> dict[str, Any]:
    """Return the user's arguments beside a data set, checked."""
    return {
        "batch_size": _optional("batch_size", batch_size, 1),
        "collate_fn": collate_fn,
        "num_workers": _optional("num_workers", num_workers, 0),
    }


def _optional(name: str, value: int | None, least: int) -> int | None:
    return None if value is None else whole_number(name, value, least)
