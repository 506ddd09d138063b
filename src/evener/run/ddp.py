"""``Ddp``: data-parallel training in the user's own loop, on devices of unequal speed."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from evener.cadence.policies import ApplyPolicy
from evener.comm.base import Communicator
from evener.data.cursor import Cursor
from evener.data.loader import make_fetcher
from evener.errors import CheckpointError, ConfigError, UsageError
from evener.run.assembly import Assembly, assemble
from evener.run.builder import DdpBuilder
from evener.run.environment import DistributedTrainConfig
from evener.run.loaders import make_loader
from evener.run.local_engine import LocalEngine
from evener.run.loop import TeamLoader
from evener.run.models import Models, Schedulers
from evener.run.options import Allowed
from evener.run.placement import Devices, devices_of_host
from evener.run.replicas import wrap
from evener.run.results import Progress, WindowResult
from evener.run.settings import DdpConfig
from evener.run.starting import start_all_ranks
from evener.run.state import load_state, save_state
from evener.run.team import Meeting, Member


class Ddp:
    """A rank's place in the team; made by ``Ddp.setup``.

    Attributes:
        rank: Number of this rank, from 0.
        world_size: Ranks in the team.
        device: This rank's torch device.
        devices: Every rank's device, such as ``("cuda:0", "cpu")``.
        members: The team, in rank order.
        precision: ``fp32``, ``bf16`` or ``fp16``, as resolved for this device.
        assembly: The parts that this rank is made of; not part of the public interface.
    """

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self._engine = assembly.engine
        self._loaders: list[TeamLoader] = []
        self._restored: Mapping[str, Any] | None = None
        self._allows_new_data = False
        self.rank = assembly.team.rank
        self.world_size = assembly.team.world_size
        self.device = assembly.device
        self.members: tuple[Member, ...] = assembly.members
        self.devices = tuple(member.device for member in self.members)
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
        quiet: bool = False,
    ) -> Self:
        """Joins the team and makes all ranks start from rank 0's model.

        All ranks call it together. The model moves to this rank's device, its trainable
        parameters move into flat buffers (the ``Parameter`` objects stay), it gets ``train()``, and
        receives rank 0's parameters and buffers.

        The rank reads its place from the environment: torchrun, SLURM or ``evener launch``. In a
        script that was started plainly (``python train.py``) and asks for several devices, this
        call starts the script once for each of them and does not return: the process becomes the
        launcher. What comes before it in the script runs once more in every rank, so call it early.
        Where a script cannot be started again (a notebook, an interactive session), ``"auto"``
        takes one device and says how to use all.

        Args:
            model: A module, or several as a list or dict; the same architectures on every rank.
            optimizer: One or more ``torch.optim`` optimizers over the models' parameters.
            scheduler: Torch scheduler(s), stepped once per optimizer step of the team; or a
                function of ``Progress`` that gives the factor of the base learning rate.
            policy: ``"sync"``, ``"cadence"`` or ``"async"``; see ``ApplyPolicy``.
            backend: ``"auto"``, ``"gloo"`` or ``"nccl"``.
            devices: ``"auto"`` (every CUDA device, else the CPU), ``"cpu"``, ``"cuda"``, one device
                such as ``"cuda:1"``, a number of ranks, or a list with a device for each rank of
                this host, such as ``["cuda:0", "cpu"]`` or ``["cpu", "cpu"]``.
            precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (autocast around the model's forward);
                ``"auto"`` is the fast one of this device. Ranks may differ. With ``fp16`` anywhere
                the team scales losses; an overflow on one rank leaves the window out on all.
            config: Further options.
            environment: This rank's place, instead of the process environment.
            communicator: The ranks to train with, instead of connecting to them; closed by
                ``close``. Its rank and size go before those of ``environment``.
            quiet: Do not print the team to stderr.

        Raises:
            ConfigError: A bad option, or ranks with different models or versions.
            LaunchError: The ranks did not find one another.
        """
        config = config or DdpConfig()
        config = replace(config, quiet=True) if quiet else config
        place = environment or DistributedTrainConfig.from_env()
        if environment is None and communicator is None and place.launched_by == "alone":
            start_all_ranks(
                devices_of_host(devices, torch.cuda.device_count()),
                optional=devices in ("auto", "cuda"),
                quiet=config.quiet,
            )
        return cls(
            assemble(
                model,
                [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer),
                scheduler,
                policy=policy,
                backend=backend,
                devices=devices,
                precision=precision,
                config=config,
                environment=place,
                communicator=communicator,
            )
        )

    wrap = staticmethod(wrap)
    #: ``Ddp.builder(model_fn, optim_fn, train_fn)``: evener owns the loop; see ``DdpBuilder``.
    builder = DdpBuilder

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def window(self) -> int:
        """Windows closed so far: the only counter that is the same on every rank."""
        return self._engine.window

    @property
    def progress(self) -> Progress:
        """What the team has applied so far."""
        return self._engine.progress

    @property
    def stopping(self) -> bool:
        """Whether the team has agreed to stop; loaders then yield nothing more."""
        return self._engine.stopping

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        micro_batch_size: int | Literal["auto"] = "auto",
        prefetch: Literal["auto", "inline", "thread", "process"] = "auto",
        max_steps: int | None = None,
    ) -> TeamLoader:
        """A loader over a map-style data set that gives each sample to exactly one rank.

        Args:
            dataset: Anything with ``len`` and ``[index]``; the same on every rank.
            batch_size: Samples of one optimizer step: of the whole team in SYNC, of a rank's own
                local step in CADENCE and ASYNC.
            seed: Seed of the epochs' permutations and of derived random numbers.
            collate_fn: Makes a micro-batch of a list of samples; torch's default otherwise.
            num_workers: 0 loads in this process, more in that many worker processes.
            micro_batch_size: Most samples of one forward/backward on this rank; ``"auto"`` is
                the equal share of the batch, or all of it in CADENCE and ASYNC.
            prefetch: ``"thread"`` loads ahead in a thread: for data sets that draw no random
                numbers. ``"auto"`` loads inline, or ahead with worker processes.
            max_steps: End the run after this many optimizer steps (of all ranks together).

        Raises:
            ConfigError: Sizes that make no sense, or an empty data set.
        """
        num_samples = len(dataset)  # type: ignore[arg-type]
        _check_sizes(num_samples, batch_size, micro_batch_size, max_steps)
        local = isinstance(self._engine, LocalEngine)
        share = -(-min(batch_size, num_samples) // (1 if local else self.world_size))
        micro = share if micro_batch_size == "auto" else micro_batch_size
        cursor = Cursor(num_samples, seed)
        self.assembly.set_micro_batch_size(micro)
        self._restore_position(cursor)
        loader = make_loader(
            self._engine,
            make_fetcher(dataset, collate_fn, seed, num_workers, prefetch),
            cursor,
            batch_size=batch_size,
            micro_batch_size=micro,
            max_steps=max_steps,
        )
        self._loaders.append(loader)
        return loader

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Adds a micro-batch's gradient to the window.

        The window's gradient is Σ ``weight · ∇loss`` / Σ ``weight`` over all ranks and
        micro-batches: that of the mean over all units, however they were split. A second call on
        one micro-batch adds gradient, not weight.

        Args:
            loss: Scalar; the mean over ``weight`` units.
            weight: Units behind the loss, such as counted tokens; the micro-batch's samples by
                default. 0 leaves the micro-batch out.

        Raises:
            UsageError: Outside a micro-batch, a bad weight, or a second weight that differs.
        """
        flat = self.assembly.flat
        flat.attach_grads()  # a zero_grad() since the last call must not lose sums
        self._engine.share.backward(loss, weight)
        flat.attach_grads()  # nor one after this call

    def step(self) -> WindowResult | None:
        """Ends a micro-batch; with the last one of this rank's share, closes the window.

        Returns:
            ``None`` inside a window; then the window's result, the same on every rank: gradients
            averaged, clipped, the optimizer stepped, gradients zeroed.

        Raises:
            NonFiniteGradientError: On every rank, nothing applied.
            CollectiveMismatchError: Another rank joined another collective.
        """
        return self._engine.end_micro_batch()

    def all_reduce(self, value: float | Tensor, weight: float = 1.0) -> float:
        """The mean of a number over ranks, weighted; all ranks call it together.

        Args:
            value: This rank's mean; ignored when ``weight`` is 0.
            weight: Units behind it.

        Returns:
            Σ value · weight / Σ weight in float64, the same on every rank; ``nan`` for no weight.
        """
        number = float(value)
        product = number * weight if weight else 0.0
        rows = self._meet(Meeting.ALL_REDUCE, [product, float(weight)])
        numerator = denominator = 0.0
        for row in rows:
            numerator += row[0]
            denominator += row[1]
        return numerator / denominator if denominator else float("nan")

    def on_commit(self, fn: Callable[[WindowResult], None]) -> Callable[[WindowResult], None]:
        """Calls ``fn(result)`` on every rank when a window is committed.

        Committed means that every rank has applied it. The model then holds exactly that window's
        parameters and buffers on every rank: the place for evaluation and saving. Collectives are
        allowed in it. A parked rank, which takes part in no window, is left out until it is called
        back.
        """
        self._engine.options.on_commit.append(fn)
        return fn

    def stop(self) -> None:
        """Asks the team to stop after the window that is being computed; any rank may call it."""
        self._engine.leave_soon = True

    def save(self, path: str | Path) -> None:
        """Writes a checkpoint of the whole team to ``path``; all ranks call it together.

        Raises:
            CheckpointError: Rank 0 could not write it.
        """
        self._meet(Meeting.SAVE)
        self._engine.prepare_save()
        self._engine.settle()  # parameters may be a window ahead of the data position
        failure = ""
        if self.is_main_process:
            with self._engine.consensus():
                failure = save_state(self.assembly, self._cursor_state(), Path(path))
        self.assembly.agree_on_failure(failure)

    def load(self, path: str | Path, *, allow: Collection[Allowed] = ()) -> None:
        """Restores a checkpoint, on any number of ranks; all ranks call it together.

        Call it after ``setup``, before or after ``loader``, and before the first epoch.

        Args:
            path: The checkpoint, or a folder of which the newest complete one is taken.
            allow: ``"data"`` goes on with a data set of another size, or another seed, from its
                first epoch on; model, optimizer and progress are kept.

        Raises:
            CheckpointError: Missing, damaged, of another model or data set, or not the same on
                every rank.
        """
        self._restored = load_state(self.assembly, Path(path))
        self._allows_new_data = "data" in allow
        windows = self.assembly.team.introduce({"window": self.window})
        for rank, other in enumerate(windows):
            if other != windows[0]:
                raise CheckpointError(
                    f"rank {rank} finds the checkpoint of window {other['window']} in {path}, rank "
                    f"0 that of window {windows[0]['window']}; use storage that every rank sees"
                )
        for loader in self._loaders:
            self._restore_position(loader.cursor)
            loader.skip_timing()

    def wants_stop(self) -> bool:
        """Whether this rank was told to stop; the team agrees at its next exchange."""
        return self._engine.wants_stop()

    @contextmanager
    def emulated_slowness(self) -> Iterator[None]:
        """Stretches the block on a rank that is emulated slower; does nothing on others."""
        slowdown = self._engine.options.slowdown
        start = slowdown.start()
        yield
        slowdown.after(start)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the model into ``eval()`` without gradients for the length of the block."""
        model = self.assembly.model
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            model.train(was_training)

    def close(self) -> None:
        """Leaves the team: ends loaders and connections; idempotent."""
        for loader in self._loaders:
            loader.close()
        self.assembly.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _meet(self, kind: Meeting, payload: Sequence[float] = ()) -> list[list[float]]:
        rows, leaving = self._engine.team.meet(
            kind, window=self.window, leaving=int(self._engine.wants_stop()), payload=payload
        )
        self._engine.stopping |= leaving > 0
        return rows

    def _restore_position(self, cursor: Cursor) -> None:
        if self._restored is None:
            return
        state = self._restored["cursor"]
        if self._allows_new_data and not cursor.is_of(state):
            cursor.restart()
        else:
            cursor.load_state_dict(state)

    def _cursor_state(self) -> dict[str, Any]:
        if not self._loaders:
            raise UsageError(
                "ddp.save needs the data position: make the loader with ddp.loader first"
            )
        return self._loaders[0].cursor.state_dict()


def _check_sizes(
    num_samples: int, batch_size: int, micro_batch_size: int | str, max_steps: int | None
) -> None:
    if num_samples < 1:
        raise ConfigError("the data set is empty; give at least one sample")
    if batch_size < 1:
        raise ConfigError(f"batch_size is {batch_size}; give at least 1 sample per optimizer step")
    if isinstance(micro_batch_size, str):
        if micro_batch_size != "auto":
            raise ConfigError(f"micro_batch_size is {micro_batch_size!r}; give a number or 'auto'")
    elif micro_batch_size < 1:
        raise ConfigError(f"micro_batch_size is {micro_batch_size}; give at least 1 sample")
    if max_steps is not None and max_steps < 0:
        raise ConfigError(f"max_steps is {max_steps}; give 0 or more")
