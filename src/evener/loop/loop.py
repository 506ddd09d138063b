"""``Loop``: data-parallel training in a loop of one's own, on devices of unequal speed."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Self

from torch import Tensor
from torch.optim import Optimizer

from evener.comm.base import Communicator
from evener.comm.existing import default_group
from evener.config.settings import DdpConfig
from evener.devices import count_accelerators
from evener.engine.memory import explain as explain_memory
from evener.engine.results import Progress, WindowResult
from evener.engine.share import (
    Share,
    Stopwatch,
    check_reduction,
    checked_value,
    checked_weight,
    refuse_number,
)
from evener.engine.team_change import cannot_join
from evener.errors import EvenerError, PeerLostError
from evener.loop.arguments import Models, Schedulers, check_arguments, in_evaluation
from evener.loop.assembly import Assembly
from evener.loop.data_side import DataSide
from evener.loop.event_stream import SinkMaker
from evener.observe.events import Sink
from evener.places import methods_passed, raised_at
from evener.planning.policies import ApplyPolicy
from evener.protocol.formation import EVALUATING, TRAINING, read_team_limits
from evener.team.elastic_membership import check_team_limits
from evener.team.environment import ELASTIC, DistributedTrainConfig
from evener.team.failures import explain_with, forget, note
from evener.team.members import Member
from evener.team.membership import Membership
from evener.team.placement import Devices, devices_of_host, place_in
from evener.team.starting import start_all_ranks, start_elastic_team

#: Longest wait for another rank in ``Ddp.close``, in seconds: work that remains is no reason there.
CLOSING_S = 60.0


class Loop(DataSide):
    """A rank's place in the team; made by ``setup``.

    Users know it as ``Ddp``, which documents the public attributes.

    Attributes:
        assembly: The parts that this rank is made of; not part of the public interface.
    """

    def __init__(self, assembly: Assembly) -> None:
        super().__init__(assembly)
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
        says how to use all.

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
            sinks: They receive the run's events, on the main process. Each is a ``Sink``, or a
                function without arguments that makes one, called on the main process only. Closed
                by ``close``, and when another rank becomes the main process.

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
        return self.assembly.members

    @property
    def devices(self) -> tuple[str, ...]:
        """Return each rank's device, such as ``"cuda:0"``; empty for ranks that had no worker."""
        return tuple(member.device for member in self.members)

    @property
    def rank(self) -> int:
        """Number of this rank, from 0; a rank of an elastic team keeps it while it is there."""
        return self._engine.rank

    @property
    def is_main_process(self) -> bool:
        """Return whether this rank writes and prints for the team; true on one rank.

        It is rank 0 until that is parked because it is too slow. Then it is the lowest rank that
        stays, also after rank 0 has come back. In an elastic team it is the oldest member. So read
        it each time.
        """
        return self._engine.is_main

    @property
    def window(self) -> int:
        """Return the windows closed so far: the only counter that is the same on every rank."""
        return self._engine.window

    @property
    def progress(self) -> Progress:
        """Return what the team has applied so far."""
        return self._engine.progress

    @property
    def stopping(self) -> bool:
        """Return whether the team has agreed to stop; loaders then yield nothing more."""
        return self._engine.stopping

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
            optimizer: The optimizer of this loss, if several take turns: only its parameters get a
                gradient. See ``step``.
            reduction: What the loss is: ``"mean"`` or ``"sum"`` over its units, the same in the
                whole window, on every rank. ``None`` is ``"mean"``, but in its first windows a loss
                that is a sum is refused.

        Raises:
            UsageError: Outside a micro-batch, a loss that is not a tensor, a loss that is a sum or
                was scaled by a ``GradScaler``, a bad weight, a second weight or reduction that
                differs, or gradients that something else has written.
        """
        refuse_number(loss)
        check_reduction(reduction)
        engine = self._engine
        habits, share = engine.habits, engine.share
        if not engine.is_training:
            share = self._start_unplanned()
        habits.before_backward(share, loss, weight, reduction)
        summed = reduction == "sum"
        if optimizer is None:
            share.backward(loss, weight, summed=summed)
        else:
            own = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
            share.backward(loss, weight, self.assembly.part_of(optimizer), own, summed=summed)
        habits.after_backward(share)
        engine.team.declare(TRAINING, done=1)
        engine.plan_ahead()

    def step(self, optimizer: Optimizer | None = None) -> WindowResult | None:
        """End a micro-batch; with the last one of this rank's share, close the window.

        Several optimizers are stepped together, or they take turns on the same samples, as in a
        GAN::

            for real, noise in loader.epoch(epoch):
                ddp.backward(loss_of_discriminator(...), optimizer=opt_d)
                ddp.step(opt_d)
                ddp.backward(loss_of_generator(...), optimizer=opt_g)
                ddp.step(opt_g)

        Each ``ddp.step(optimizer)`` averages and applies what was accumulated for that optimizer;
        the window closes when the loop asks for the next batch. Every rank takes the same turns in
        the same order. The loader must hand out a rank's share of a window as one micro-batch: the
        next turn needs the parameters that the previous turn has updated on *all* samples. That is
        ``micro_batch_size="share"``, the default with several models and optimizers.

        Args:
            optimizer: Step this one alone.

        Returns:
            ``None`` inside a window; then the window's result, the same on every rank: gradients
            averaged, clipped, the optimizer stepped, gradients zeroed. A turn returns its own
            update.

        Raises:
            NonFiniteGradientError: On every rank, nothing applied.
            CollectiveMismatchError: Another rank joined another collective.
            UsageError: Gradients were written by something else than ``backward``.
        """
        engine = self._engine
        habits = engine.habits
        habits.before_step(engine.share)
        if optimizer is None:
            result = engine.end_micro_batch()
        else:
            result = engine.step_part(self.assembly.part_of(optimizer))
        if result is not None:
            habits.after_update(engine.share)
        return result

    def _start_unplanned(self) -> Share:
        """Start a window outside of any loader: one contribution of each rank."""
        engine = self._engine
        if engine.is_joining:
            raise cannot_join("windows without ddp.loader")
        engine.habits.tell_once(
            "training without ddp.loader: every ddp.step() is one update, to which each rank "
            "contributes once, with the weight given to ddp.backward (1 by default). Not "
            "guaranteed: which rank sees which samples, that each is seen once an epoch, shares "
            "that follow speed, and resuming in mid-epoch. Ranks that read the same batches do the "
            "same work: ddp.loader(dataset, batch_size=...) gives each sample to one rank"
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
            UsageError: The value is not a number, or the weight is not one of at least 0.
        """
        units = checked_weight(weight)
        product = checked_value(value) * units if units else 0.0
        numerator, denominator = self._engine.sum_up([product, units])
        self._gatherer.check_complete()
        return numerator / denominator if denominator else float("nan")

    def on_commit(self, fn: Callable[[WindowResult], None]) -> Callable[[WindowResult], None]:
        """Call ``fn(result)`` on every rank when a window is committed.

        Committed means that every rank has applied it. The model then holds exactly that window's
        parameters and buffers on every rank: evaluate and save here. Collectives are allowed in it.
        ``fn`` is not called on a parked rank, which takes part in no window.
        """
        self._engine.call_on_commit(fn)
        return fn

    def stop(self) -> None:
        """Ask the team to stop after the window that is being computed; any rank may call it."""
        self._engine.stop()

    def wants_stop(self) -> bool:
        """Return whether this rank was told to stop; the team agrees at its next exchange."""
        return self._engine.wants_stop()

    @contextmanager
    def emulated_slowness(self) -> Iterator[None]:
        """Stretch the block on a rank that is emulated slower; do nothing on others."""
        watch = Stopwatch(self._engine.slowdown)
        yield
        watch.stop()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model into ``eval()`` without gradients for the length of the block."""
        team = self._engine.team
        with team.in_phase(EVALUATING), in_evaluation(self.assembly.model):
            yield

    def close(self) -> None:
        """Leave the team: end loaders and connections; idempotent.

        Without an error, ranks first commit the applied window. In CADENCE and ASYNC they also
        average the steps of loops that were left by ``break``. All ranks do that together, and wait
        for one another for at most 60 s (or ``DdpConfig.timeout_s``, if that is less). After an
        error of the team, or one that has ended this rank's loop, this rank waits for no other.

        Raises:
            CollectiveError: A rank was lost, or did not come.
            ReplicasDifferError: Of what is committed, with ``DdpConfig.verify_every``.
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
                if engine.in_epoch:  # closing inside the loop is leaving it
                    engine.leave()
                engine.hurry(CLOSING_S)
                engine.settle()
                self.assembly.hand_back()
        except BaseException as broken:
            failed, error = True, broken
            raise
        finally:
            for loader in [*self._loaders, *self._eval_loaders]:
                loader.close()
            self.events.end(failed=failed, error=error)
            # Members that were all told to leave have ended no run: others may continue it.
            if not (failed or (engine.stopping and engine.team.is_leaving)):
                engine.team.finish()
            self.assembly.close()

    def _is_lost(self, error: BaseException | None) -> bool:
        """Return whether the other ranks need not be waited for.

        Args:
            error: What is being handled; it may have nothing to do with the team.
        """
        engine = self._engine
        if engine.is_lost:
            return True
        if error is None:
            return False
        if isinstance(error, EvenerError) and self._has_raised(error):
            return True
        if engine.has_left:
            return any(loader.loop.holds(error) for loader in self._loaders)
        return engine.share.in_micro_batch

    def _has_raised(self, error: BaseException) -> bool:
        """Return whether an error has come out of a method of this team, its loaders or trainer."""
        parts = (self, *self._loaders, *self._eval_loaders)
        return any(
            owner in parts or getattr(owner, "_ddp", None) is self
            for owner in methods_passed(error)
        )

    def _explain(self, error: BaseException) -> None:
        """Add to an exception what is known about it here: cause, remedy, rank, file, line."""
        self.events.note_error(error)
        share = self._engine.share
        explain_memory(error, share.open_samples)
        for loader in self._loaders:
            if text := loader.loop.explain(error, self.rank):
                note(error, text)
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
