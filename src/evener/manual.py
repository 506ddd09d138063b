"""``Ddp.wrap`` and ``Replicas``: averaging by hand, for loops that windows do not fit."""

import atexit
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Final, Literal, final

import torch
from torch import Tensor, nn

from evener.averaging.replicas import copy_from_first, hand_out, sum_gradients
from evener.closing import Closing
from evener.comm.base import Communicator
from evener.devices import count_accelerators, move
from evener.errors import CollectiveMismatchError, ConfigError, NonFiniteGradientError
from evener.loop.consistency import check_consistency, describe_versions
from evener.parsing import short
from evener.team.backends import connect_team
from evener.team.child import apply_threads, notify_supervisor
from evener.team.environment import DistributedTrainConfig
from evener.team.members import Member, describe_self, hardware_summary
from evener.team.placement import deal_devices, devices_of_host
from evener.team.terminal import say
from evener.team.wire import LEFT

_Named = Mapping[str, Tensor]


@dataclass(eq=False, slots=True)
class _Line:
    """A connection that several ``Replicas`` share; the last one closes it.

    All replicas of a process share one (a GAN wraps two networks): the port of the team serves one
    connection at a time, and calls that differ between ranks are then detected at once. A
    communicator that the user gives is not shared.
    """

    comm: Communicator
    backend: str
    num_users: int = 0

    def release(self) -> None:
        """End one use; the last one closes the connection."""
        self.num_users -= 1
        if not self.num_users:
            self.close()

    def close(self) -> None:
        """Close the connection, also if it is in use."""
        self.comm.close()
        for environment in [place for place, line in _lines.items() if line is self]:
            del _lines[environment]
            atexit.unregister(self.close)
            notify_supervisor(place=LEFT)


_lines: Final[dict[DistributedTrainConfig, _Line]] = {}


def _connect(
    environment: DistributedTrainConfig,
    backend: str,
    device: torch.device,
    timeout_s: float,
    communicator: Communicator | None,
) -> _Line:
    """Connect, or share the existing connection; see ``wrap``."""
    line = _lines.get(environment) if communicator is None else None
    if line is None:
        comm, _ = connect_team(environment, backend, "by hand", device, timeout_s, communicator)
        line = _Line(comm, backend)
        if communicator is None:
            _lines[environment] = line
            # Many scripts never call close(), and a process group aborts if it outlives Python.
            atexit.register(line.close)
    elif line.backend != backend:
        raise ConfigError(
            f"backend is {backend!r}, but replicas wrapped before use {line.backend!r}; give the "
            "same to every Ddp.wrap of a script"
        )
    line.num_users += 1
    return line


@final
class Replicas(Closing):
    """Replicas of one model, in this process and perhaps in others; made by ``Ddp.wrap``.

    The user writes the loop and steps the optimizers; this class only makes replicas equal, in the
    calls of its methods. All processes call a method that exchanges together, in the same order,
    from one thread at a time. This holds over all ``Replicas`` of a process, because they share a
    connection.

    Models may change between calls (grow, freeze parameters, gain a layer), if all replicas change
    in the same way. ``Ddp.wrap`` compares them and names the first difference. After that each call
    compares a digest of its tensors' layout: if processes differ in it, all raise
    ``CollectiveMismatchError``, nothing is changed, and the connection is closed.

    Attributes:
        models: This process's replicas.
        devices: Their devices.
        rank: Number of this process.
        world_size: Replicas over all processes.
        first: Number of this process's first replica among all of them.
        members: The ``Member`` of each replica.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        devices: Sequence[torch.device],
        line: _Line,
        *,
        non_finite: Literal["raise", "propagate"],
        members: tuple[Member, ...],
        first: int,
    ) -> None:
        self.models = tuple(models)
        self.devices = tuple(devices)
        self.rank = line.comm.rank
        self.world_size = len(members)
        self.first = first
        self.members = members
        self._line: _Line | None = line
        self._comm = line.comm
        self._non_finite = non_finite
        self._num_averages = 0

    @property
    def is_main_process(self) -> bool:
        """True in the process that holds replica 0."""
        return self.rank == 0

    def sync_params(self) -> None:
        """Copy parameters (frozen ones too) and buffers of replica 0 to all others.

        Call it once before training, since ``Ddp.wrap`` does not change values; and again after a
        model has grown by layers with random weights.

        Raises:
            ConfigError: Replicas of this process differ in names, shapes or dtypes.
            CollectiveMismatchError: Those of other processes do.
        """
        self._copy([_tensors(model) for model in self.models], "sync_params")

    def sync_buffers(self) -> None:
        """Copy the buffers of replica 0 (BatchNorm's statistics, ...) to all others.

        Only this and ``sync_params`` change buffers: otherwise each replica keeps its own.

        Raises:
            ConfigError: Replicas of this process differ in names, shapes or dtypes.
            CollectiveMismatchError: Those of other processes do.
        """
        self._copy([dict(m.named_buffers()) for m in self.models], "sync_buffers")

    def all_reduce_gradients(self) -> None:
        """Replace every replica's gradients by their mean over all replicas.

        For replicas that each had the same number of samples; see
        ``weighted_all_reduce_gradients`` for the rest.
        """
        self._average("all_reduce_gradients", [1.0] * len(self.models))

    def weighted_all_reduce_gradients(self, batch_counts: Sequence[float]) -> None:
        """Replace every replica's gradients by their mean, weighted by counts.

        The gradient of replica r counts n_r / Σ n, the sum over all replicas of all processes. With
        the loss of each replica a mean over its n_r samples, this is the gradient of the mean
        over all samples. A missing gradient of a replica counts as zero, with the replica's weight.
        If all are missing, the parameter keeps ``grad = None``, and optimizers skip it. Frozen
        parameters are ignored. Half precision is summed in float32.

        Args:
            batch_counts: Samples (or steps, tokens) behind each gradient of this process's
                replicas; or of all ``world_size`` replicas in the order of their numbers, the same
                list on every process, such as ``ElChe.batch_counts``. In a process that holds all
                replicas the two are the same. With 0 a replica takes part, but its gradients are
                ignored.

        Raises:
            ConfigError: The number of counts is wrong, a count is negative, or replicas of this
                process differ; on every process, if all counts are 0. Gradients are unchanged.
            CollectiveMismatchError: Lists of all counts, or replicas, differ between processes.
            NonFiniteGradientError: On every process, with gradients unchanged; not with
                ``non_finite="propagate"``.
        """
        self._average("weighted_all_reduce_gradients", batch_counts)

    def weighted_mean(
        self, values: Sequence[float], weights: Sequence[float] | None = None
    ) -> float:
        """Return the mean of a number over all replicas, the same on every process.

        Args:
            values: One for each replica of this process, such as losses or returns.
            weights: Weights of the values; 1 each by default. Values of weight 0 are ignored.

        Returns:
            Σ weight · value / Σ weight in float64.

        Raises:
            ConfigError: The number of values is wrong, or weights are invalid; on every process.
        """
        weights = [1.0] * len(self.models) if weights is None else weights
        own = self._numbers("values", values), self._numbers("weights", weights, are_weights=True)
        pairs = [(value * weight, weight) for value, weight in zip(*own, strict=True) if weight]
        sums = [math.fsum(numbers) for numbers in zip(*pairs, strict=True)] or [0.0, 0.0]
        rows = self._comm.all_gather_rows(sums, what="weighted_mean")
        total = self._total("weights", [weight for _, weight in rows])
        return math.fsum(value for value, _ in rows) / total

    def close(self) -> None:
        """Leave the team; models and gradients stay as they are. Idempotent, not collective."""
        line, self._line = self._line, None
        if line is not None:
            line.release()

    def _copy(self, replicas: Sequence[_Named], what: str) -> None:
        self._meet(what, replicas)
        copy_from_first(self._comm, replicas, what=what)

    def _average(self, what: str, counts: Sequence[float]) -> None:
        replicas = [
            {name: p for name, p in model.named_parameters() if p.requires_grad}
            for model in self.models
        ]
        numbers = self._numbers("batch_counts", counts, are_weights=True, of_all=True)
        _check_gradients(replicas, self.first)
        num_own, everyone = len(self.models), ""
        if len(numbers) > num_own:
            everyone = str(numbers)
            numbers = numbers[self.first : self.first + num_own]
        rows = self._meet(what, replicas, everyone, [math.fsum(numbers)])
        total = self._total("batch_counts", [count for (count,) in rows])
        factors = [number / total for number in numbers]
        sums, are_finite = sum_gradients(self._comm, self.devices[0], replicas, factors, what=what)
        if self._non_finite == "raise" and not are_finite:
            raise self._non_finite_error(what, replicas, numbers)
        hand_out(replicas, sums)
        self._num_averages += 1

    def _meet(
        self,
        what: str,
        replicas: Sequence[_Named],
        counts: str = "",
        row: Sequence[float] = (),
    ) -> list[list[float]]:
        """Exchange a row before any tensor; its label contains a digest of layout and counts.

        Args:
            what: The call.
            replicas: The tensors of each replica.
            counts: Counts of all replicas, if they are given.
            row: Numbers for the others.

        Returns:
            The rows of all processes.
        """
        layouts = [_layout(named) for named in replicas]
        check_consistency(dict(enumerate(layouts, self.first)), "replica")
        digest = hashlib.blake2b(repr((layouts[0], counts)).encode(), digest_size=4).hexdigest()
        label = f"{what}({short(counts)[1:-1]}), layout {digest} of {len(layouts[0])} tensors"
        try:
            return self._comm.all_gather_rows(row, what=label)
        except CollectiveMismatchError as error:
            error.add_note(
                "evener: replicas must have the same tensors, the same ones frozen, and must "
                f"change in the same way; here: {short(layouts[0])}"
            )
            raise

    def _numbers(
        self,
        name: str,
        values: Sequence[float],
        *,
        are_weights: bool = False,
        of_all: bool = False,
    ) -> list[float]:
        """Return an argument's numbers, one for each replica here, or ``of_all`` processes."""
        sizes = [len(self.models), self.world_size if of_all else len(self.models)]
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):  # for example a single number
            numbers = []
        if len(numbers) not in sizes:
            all_of_them = f" or for each of all {sizes[1]}" if sizes[1] > sizes[0] else ""
            raise ConfigError(
                f"{name} is {values!r}; give a list with a number for each of the {sizes[0]} "
                f"replicas of rank {self.rank}{all_of_them}"
            )
        if are_weights and not all(0 <= number < math.inf for number in numbers):
            raise ConfigError(f"{name} is {values!r}; give finite numbers of 0 or more")
        return numbers

    def _total(self, name: str, weights: Sequence[float]) -> float:
        total = math.fsum(weights)
        if total == 0:
            raise ConfigError(
                f"{name} are 0 on all {self.world_size} replicas, so there is no mean; leave the "
                "call out on every process if no replica has done any work"
            )
        return total

    def _non_finite_error(
        self, what: str, replicas: Sequence[_Named], counts: Sequence[float]
    ) -> NonFiniteGradientError:
        found = (
            [name, number]
            for number, (named, count) in enumerate(zip(replicas, counts, strict=True), self.first)
            for name, p in named.items()
            if count and p.grad is not None and not bool(p.grad.isfinite().all())
        )
        notes = self._comm.all_gather_json(next(found, None), what=f"why {what} is refused")
        rank = next((rank for rank, note in enumerate(notes) if note), 0)
        name, replica = notes[rank] or (None, None)
        text = (
            "gradients are finite on each replica and their weighted mean is not; they are too "
            "large for their dtype: lower the learning rate"
        )
        if name is not None:
            text = (
                f"the gradient of {name!r} on replica {replica} (rank {rank}) holds an inf or a "
                "NaN, so nothing was averaged; lower the learning rate, or wrap with "
                "non_finite='propagate' if a GradScaler has to see it"
            )
        number = self._num_averages
        return NonFiniteGradientError(
            f"{what} number {number}: {text}", rank=rank, parameter=name, window=number
        )


def wrap(
    models: nn.Module | Sequence[nn.Module],
    devices: str | torch.device | Sequence[str | int | torch.device] = "auto",
    *,
    backend: str = "auto",
    non_finite: Literal["raise", "propagate"] = "raise",
    timeout_s: float = 600.0,
    quiet: bool = False,
    environment: DistributedTrainConfig | None = None,
    communicator: Communicator | None = None,
) -> Replicas:
    """Wrap replicas of one model, for loops that average by hand (GAN, RL, growing models).

    All processes call it together, each with any number of replicas: a single process with a model
    for each device, one model in each process under ``evener launch``, torchrun or SLURM, or both.
    Models move to their devices; values are not changed (``sync_params`` makes them equal). A GAN
    wraps its networks one after the other.

    Args:
        models: Replicas of one architecture, or the one of this process.
        devices: A device for each model (a number is one of this host's accelerator), one for all,
            or ``"auto"``: accelerators if there are any, else the CPU. A kind of device, such as
            ``"cuda"``, distributes those of this host.
        backend: ``"auto"``, ``"gloo"``, ``"cpu"`` or ``"nccl"``; see ``AverageBackend``. The same
            in every call of a script.
        non_finite: ``"raise"`` refuses gradients with an inf or a NaN on every process;
            ``"propagate"`` averages them, for a ``GradScaler`` that has to see them.
        timeout_s: Longest wait for another process; that of the first call counts for all.
        quiet: Do not print the devices to stderr.
        environment: This process's place, instead of the process environment.
        communicator: Connects the processes, instead of a new connection; closed by ``close``.

    Returns:
        The replicas of this process.

    Raises:
        ConfigError: Models of different architectures, bad options.
        LaunchError: The processes did not find one another.
    """
    chosen = [models] if isinstance(models, nn.Module) else list(models)
    if non_finite not in ("raise", "propagate"):
        raise ConfigError(f"non_finite is {non_finite!r}; choose 'raise' or 'propagate'")
    _check_models(chosen)
    environment = environment or DistributedTrainConfig.from_env()
    where = place(chosen, devices, environment)
    apply_threads(environment)
    line = _connect(environment, backend, where[0], timeout_s, communicator)
    try:
        for model, device in zip(chosen, where, strict=True):
            move(model, device)
        members, first = _introduce(line.comm, chosen, where, environment)
        replicas = Replicas(
            chosen, where, line, non_finite=non_finite, members=members, first=first
        )
    except BaseException:
        line.release()
        raise
    if line.comm.rank == 0 and not quiet:
        say(
            f"replicas of a model: {hardware_summary(members)}\n"
            f"  backend {line.comm.backend}: {line.comm.reason}"
        )
    return replicas


def _check_models(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be replicas."""
    if not models:
        raise ConfigError("models is empty; give one model for each device of this process")
    owner: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model {number} is a {type(model).__name__}; give torch modules")
        for name, parameter in model.named_parameters():
            other, its_name = owner.setdefault(id(parameter), (number, name))
            if other != number:
                raise ConfigError(
                    f"models {other} and {number} share the parameter {its_name!r}; replicas need "
                    "parameters of their own: build the model once for each, or copy.deepcopy it"
                )


def place(
    models: Sequence[nn.Module],
    devices: str | torch.device | Sequence[str | int | torch.device],
    environment: DistributedTrainConfig,
) -> tuple[torch.device, ...]:
    """Return the device of each replica of this process.

    Args:
        models: The replicas.
        devices: ``"auto"`` (an accelerator for each process of this host in order, if there are
            any), a kind of accelerator, one device for all, or one for each.
        environment: This process's place on its host.

    Raises:
        ConfigError: A device is unknown or missing, or the number of devices is wrong.
    """
    names = deal_devices(devices, environment, len(models))
    if not names:
        each = [devices] * len(models) if isinstance(devices, str | torch.device) else devices
        names = devices_of_host(each, count_accelerators())
    if len(names) != len(models):
        raise ConfigError(
            f"{len(models)} models, but {len(names)} devices ({', '.join(names)}); give one device "
            "for each model of this process"
        )
    return tuple(map(torch.device, names))


# ── comparing replicas ───────────────────────────────────────────────────────────────────────────


def _introduce(
    comm: Communicator,
    models: Sequence[nn.Module],
    devices: Sequence[torch.device],
    environment: DistributedTrainConfig,
) -> tuple[tuple[Member, ...], int]:
    """Compare all replicas; return them, and the number of the first one here."""
    own = [asdict(describe_self(i, environment.local_rank, d)) for i, d in enumerate(devices)]
    layouts = [{**describe_versions(), **_layout(_tensors(model))} for model in models]
    greetings = comm.all_gather_json([own, layouts], what="greetings of replicas")
    replicas = chain.from_iterable(there for _, there in greetings)
    check_consistency(dict(enumerate(replicas)), "replica")
    counts = [len(members) for members, _ in greetings]
    numbered = enumerate(chain.from_iterable(members for members, _ in greetings))
    members = tuple(Member(**{**member, "rank": number}) for number, member in numbered)
    return members, sum(counts[: comm.rank])


def _tensors(model: nn.Module) -> _Named:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _layout(named: _Named) -> dict[str, str]:
    """Return shapes and dtypes as text, sorted by name."""
    return {
        name: f"{list(named[name].shape)} {str(named[name].dtype).removeprefix('torch.')}"
        for name in sorted(named)
    }


def _check_gradients(replicas: Sequence[_Named], first: int) -> None:
    """Refuse gradients that cannot be averaged."""
    for number, named in enumerate(replicas, first):
        for name, tensor in named.items():
            gradient = tensor.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided or gradient.shape != tensor.shape:
                raise ConfigError(
                    f"the gradient of {name!r} on replica {number} is {list(gradient.shape)}, "
                    f"{gradient.layout}, and its parameter {list(tensor.shape)}; replicas exchange "
                    "dense gradients (sparse=False): call zero_grad() after a model has changed"
                )
