"""``Ddp.wrap`` and ``Replicas``: averaging by hand, for loops that no window fits."""

import atexit
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from evener.averaging.replicas import Entry, copy_from_first, hand_out, sum_gradients
from evener.closing import Closing
from evener.comm.base import Communicator
from evener.devices import count_accelerators, move
from evener.errors import ConfigError, NonFiniteGradientError
from evener.loop.consistency import check_consistency, describe_versions
from evener.team.backends import check_backend, connect_team
from evener.team.channel import LEFT
from evener.team.child import apply_threads, tell
from evener.team.environment import DistributedTrainConfig
from evener.team.members import Member, describe_self, hardware_summary
from evener.team.placement import device_by_number, devices_of_host
from evener.team.terminal import say

_Named = Mapping[str, Tensor]


@dataclass(eq=False, slots=True)
class _Line:
    """The connection that all ``Replicas`` of a process share, and that the last of them closes.

    One for all replicas of a process (a GAN wraps two networks): the port of the team serves one
    connection at a time, and ranks that are in different calls then find out at once. A
    communicator that the user gives is not shared.
    """

    comm: Communicator
    backend: str
    environment: DistributedTrainConfig
    num_users: int = 1

    @classmethod
    def open(
        cls,
        environment: DistributedTrainConfig,
        backend: str,
        device: torch.device,
        timeout_s: float,
        communicator: Communicator | None,
    ) -> "_Line":
        """Connect, or share the connection that is there already; see ``wrap``."""
        check_backend(backend)
        line = None if communicator is not None else _lines.get(environment)
        if line is None:
            connected = connect_team(
                environment, backend, "by hand", device, timeout_s, communicator
            )
            line = cls(connected, backend, environment)
            if communicator is None:
                _lines[environment] = line
                # Many scripts never close, and process groups that outlive the interpreter abort.
                atexit.register(line.close)
            return line
        if line.backend != backend:
            raise ConfigError(
                f"backend is {backend!r}, but replicas wrapped before use {line.backend!r}; give "
                "the same to every Ddp.wrap of a script"
            )
        line.num_users += 1
        return line

    def release(self) -> None:
        """End a use; the last one closes the connection."""
        self.num_users -= 1
        if not self.num_users:
            self.close()

    def close(self) -> None:
        """Close the connection, whoever uses it."""
        self.comm.close()
        if _lines.get(self.environment) is self:
            del _lines[self.environment]
            atexit.unregister(self.close)
            tell(place=LEFT)


_lines: Final[dict[DistributedTrainConfig, _Line]] = {}


@final
class Replicas(Closing):
    """Replicas of one model: some in this process, perhaps more in other processes.

    Made by ``Ddp.wrap``. The loop, the optimizers and the order of things stay the user's; this
    class only makes replicas agree, and only when it is told to. Every method that exchanges is
    called by all processes together, in the same order, from one thread at a time: this holds over
    all ``Replicas`` of a process, which share one connection.

    Models may change between calls (grow, freeze parameters, gain a layer), as long as all
    replicas change alike. What differs is refused on every process, with the first difference
    named and nothing changed.

    Attributes:
        models: This process's replicas.
        devices: Their devices.
        rank: Number of this process.
        world_size: Replicas over all processes.
        first: Number of this process's first replica among all of them.
        members: All replicas, as their processes describe them.
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
        self._agree(self._tensors(), "Ddp.wrap")

    @property
    def is_main_process(self) -> bool:
        """True in the process that holds replica 0."""
        return self.rank == 0

    def sync_params(self) -> None:
        """Copy parameters, frozen ones too, and buffers of replica 0 over those of all others.

        Call it once before training, since ``Ddp.wrap`` leaves values alone; again after a model
        has grown by layers with random weights.

        Raises:
            ConfigError: Replicas differ in names, shapes or dtypes.
        """
        self._copy(self._tensors(), "sync_params")

    def sync_buffers(self) -> None:
        """Copy the buffers of replica 0 (BatchNorm's statistics, ...) over those of all others.

        Besides ``sync_params`` nothing touches buffers: until then each replica keeps its own.

        Raises:
            ConfigError: Replicas differ in names, shapes or dtypes.
        """
        self._copy([dict(m.named_buffers()) for m in self.models], "sync_buffers")

    def all_reduce_gradients(self) -> None:
        """Replace every replica's gradients by their mean over all replicas.

        For replicas that each had the same number of samples; see
        ``weighted_all_reduce_gradients`` for the rest.
        """
        self._average("all_reduce_gradients", [1.0] * len(self.models))

    def weighted_all_reduce_gradients(self, batch_counts: Sequence[float]) -> None:
        """Replace every replica's gradients by their mean, weighted by the work behind them.

        The gradient of replica r counts n_r / Σ n, the sum over all replicas of all processes. With
        the loss of each replica a mean over its n_r samples, this is the gradient of the mean
        over all samples. A parameter without a gradient on some replica counts there as zero, with
        the weight; without one on every replica it keeps ``grad = None``, and optimizers skip it.
        Frozen parameters are left alone. Half precision is added up in float32.

        Args:
            batch_counts: Samples (or steps, tokens) behind each gradient of this process's
                replicas; or of all ``world_size`` replicas in the order of their numbers, the same
                list on every process, such as ``ElChe.batch_counts``. In a process that holds all
                replicas the two are the same. With 0 a replica takes part, but its gradients are
                ignored.

        Raises:
            ConfigError: Neither one count for each replica here nor for each of all, a negative
                one, zeros only over all processes, lists of all that differ between processes, or
                replicas that differ; on every process, with gradients unchanged.
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
            weights: Weights of the values; 1 each by default. Values of weight 0 are not looked at.

        Returns:
            Σ weight · value / Σ weight in float64.

        Raises:
            ConfigError: Not one value for each replica, or bad weights; on every process.
        """
        weights = [1.0] * len(self.models) if weights is None else weights
        problem = self._problem("values", values) or self._problem(
            "weights", weights, are_counts=True
        )
        sums = [0.0, 0.0]
        if not problem:
            pairs = zip(values, weights, strict=True)
            sums = [_sum([float(v) * w if w else 0.0 for v, w in pairs]), _sum(weights)]
        rows = self._meet("weighted_mean", problem, (), sums)
        return _sum([row[0] for row in rows]) / self._total("weights", [row[1] for row in rows])

    def close(self) -> None:
        """Leave the team; models and gradients stay as they are. Idempotent, not collective."""
        line, self._line = self._line, None
        if line is not None:
            line.release()

    def _tensors(self) -> list[_Named]:
        return [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in self.models]

    def _agree(self, replicas: Sequence[_Named], what: str) -> None:
        """Refuse replicas of which one differs."""
        layout, problem = _read_layout(replicas, self.first)
        self._meet(what, problem, layout, [])

    def _copy(self, replicas: Sequence[_Named], what: str) -> None:
        self._agree(replicas, what)
        copy_from_first(self._comm, replicas, what=what)

    def _average(self, what: str, counts: Sequence[float]) -> None:
        replicas = [
            {name: p for name, p in model.named_parameters() if p.requires_grad}
            for model in self.models
        ]
        layout, problem = _read_layout(replicas, self.first, gradients=True)
        problem = self._problem("batch_counts", counts, are_counts=True, of_all=True) or problem
        everyone: list[float] = []
        if not problem and len(counts) == self.world_size > len(self.models):
            everyone = [float(count) for count in counts]
            counts = everyone[self.first : self.first + len(self.models)]
        rows = self._meet(
            what, problem, layout, [0.0 if problem else _sum(counts)], everyone=everyone
        )
        total = self._total("batch_counts", [row[0] for row in rows])
        factors = [count / total for count in counts]
        sums, are_finite = sum_gradients(
            self._comm, self.devices[0], replicas, layout, factors, what=what
        )
        if self._non_finite == "raise" and not are_finite:
            raise self._non_finite_error(what, replicas, counts)
        hand_out(replicas, sums)
        self._num_averages += 1

    def _meet(
        self,
        what: str,
        problem: str,
        layout: tuple[Entry, ...],
        payload: Sequence[float],
        everyone: Sequence[float] = (),
    ) -> list[list[float]]:
        """Exchange a row before any tensor, so that what is refused is refused everywhere.

        Args:
            what: The call.
            problem: What is wrong with its arguments here, if anything is.
            layout: Must be the same on every process.
            payload: Numbers for the others, which are returned.
            everyone: Counts of all replicas, which must be the same on every process, too.
        """
        words = _in_words(layout)
        digest = hashlib.blake2b(repr((words, *everyone)).encode(), digest_size=6).digest()
        # 48 bits tell layouts apart, and are exact in float64.
        row = [float(bool(problem)), float(int.from_bytes(digest)), *payload]
        rows = self._comm.all_gather_rows(row, what=what)
        if any(r[0] for r in rows) or len({r[1] for r in rows}) > 1:
            note = {
                "problem": problem,
                "first": self.first,
                "layout": words,
                "counts": list(everyone),
            }
            notes = self._comm.all_gather_json(note, what=f"why {what} is refused")
            raise ConfigError(f"{what}: {_refusal(notes)}")
        return [r[2:] for r in rows]

    def _problem(
        self,
        name: str,
        values: Sequence[float],
        *,
        are_counts: bool = False,
        of_all: bool = False,
    ) -> str:
        """Why these are not a number for each replica here; the other processes must hear of it.

        Args:
            name: Of the argument.
            values: The numbers.
            are_counts: They must be finite, and 0 or more.
            of_all: They may also be one for each replica of all processes.
        """
        replicas = f"for each of its {len(self.models)} replicas"
        if of_all and self.world_size > len(self.models):
            replicas += f", or of all {self.world_size}"
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):  # a bare number, perhaps
            return f"rank {self.rank}: {name} is {values!r}; give a list with a number {replicas}"
        if len(numbers) != len(self.models) and not (of_all and len(numbers) == self.world_size):
            return f"rank {self.rank}: {name} is {list(values)}, which is not one {replicas}"
        if are_counts and not all(0 <= number < math.inf for number in numbers):
            return f"rank {self.rank}: {name} is {list(values)}; give finite numbers of 0 or more"
        return ""

    def _total(self, name: str, counts: Sequence[float]) -> float:
        total = _sum(counts)
        if total == 0:
            raise ConfigError(
                f"{name} are 0 on all {self.world_size} replicas, so there is no mean; leave the "
                "call out on every process when nobody has done any work"
            )
        return total

    def _non_finite_error(
        self, what: str, replicas: Sequence[Mapping[str, nn.Parameter]], counts: Sequence[float]
    ) -> NonFiniteGradientError:
        found = [
            {"parameter": name, "replica": self.first + number}
            for number, (parameters, count) in enumerate(zip(replicas, counts, strict=True))
            for name, p in parameters.items()
            if count and p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        own: dict[str, Any] = found[0] if found else {"parameter": None}
        notes = self._comm.all_gather_json(own, what=f"why {what} is refused")
        text = (
            "gradients are finite on each replica and their weighted mean is not; they are too "
            "large for their dtype: lower the learning rate"
        )
        culprits = [rank for rank, note in enumerate(notes) if note["parameter"] is not None]
        rank = culprits[0] if culprits else 0
        parameter = notes[rank]["parameter"]
        if culprits:
            text = (
                f"the gradient of {parameter!r} on replica {notes[rank]['replica']} (rank {rank}) "
                "holds an inf or a NaN, so nothing was averaged; lower the learning rate, or wrap "
                "with non_finite='propagate' where a GradScaler shall see it"
            )
        number = self._num_averages
        return NonFiniteGradientError(
            f"{what} number {number}: {text}", rank=rank, parameter=parameter, window=number
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
    """Take replicas of one model, for loops that average by hand (GAN, RL, growing models).

    All processes call it together, each with as many replicas as it likes: one process alone with
    a model for each device, one model in each process under ``evener launch``, torchrun or SLURM,
    or both at once. Models move to their devices; values are left alone (``sync_params`` makes them
    equal). A GAN wraps its networks one after the other.

    Args:
        models: Replicas of one architecture, or the one of this process.
        devices: A device for each model (a number is one of this host's accelerator), one for all,
            or ``"auto"``: accelerators as far as there are any, else the CPU. A kind of device,
            such as ``"cuda"``, deals out those of this host.
        backend: ``"auto"``, ``"gloo"``, ``"cpu"`` or ``"nccl"``; see ``AverageBackend``. The same
            in every call of a script.
        non_finite: ``"raise"`` refuses gradients with an inf or a NaN on every process;
            ``"propagate"`` averages them, for a ``GradScaler`` that has to see them.
        timeout_s: Longest wait for another process; that of the first call counts for all.
        quiet: Do not print the devices to stderr.
        environment: This process's place, instead of the process environment.
        communicator: What joins the processes, instead of connecting to them; closed by ``close``.

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
    line = _Line.open(environment, backend, where[0], timeout_s, communicator)
    try:
        for model, device in zip(chosen, where, strict=True):
            move(model, device)
        members, first = _introduce(line.comm, where, environment)
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
    """Refuse what cannot be replicas."""
    if not models:
        raise ConfigError("models is empty; give one model for each device of this process")
    owner: dict[int, tuple[int, str]] = {}
    for number, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model {number} is a {type(model).__name__}; give torch modules")
        for name, parameter in model.named_parameters():
            if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} of model {number} has no values yet (it is lazy, or on "
                    "the meta device); materialise the model before Ddp.wrap"
                )
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
        devices: ``"auto"`` (accelerators in turn, this host's processes one after the other, as far
            as there are any), a kind of accelerator, one device for all, or one for each.
        environment: This process's place on its host.

    Raises:
        ConfigError: A device is unknown or not there, or there are not as many as models.
    """
    counts = count_accelerators()
    if isinstance(devices, str | torch.device):
        name = str(devices)
        if name in ("auto", "accelerator", *counts):
            first = environment.local_rank * len(models)
            wanted = environment.backend.value if name == "auto" else name
            return tuple(
                torch.device(device_by_number(wanted, first + i, environment, counts))
                for i in range(len(models))
            )
        devices = [name] * len(models)
    if len(devices) != len(models):
        raise ConfigError(
            f"{len(models)} models, but {len(devices)} devices ({list(devices)}); give one device "
            "for each model of this process"
        )
    return tuple(torch.device(name) for name in devices_of_host(devices, counts))


# ── what replicas have in common ─────────────────────────────────────────────────────────────────


def _introduce(
    comm: Communicator, devices: Sequence[torch.device], environment: DistributedTrainConfig
) -> tuple[tuple[Member, ...], int]:
    """Return all replicas, and the number of the first one here."""
    own = [asdict(describe_self(i, environment.local_rank, d)) for i, d in enumerate(devices)]
    notes = comm.all_gather_json([describe_versions(), own], what="greetings of replicas")
    check_consistency({rank: versions for rank, (versions, _) in enumerate(notes)})
    counts = [len(members) for _, members in notes]
    numbered = enumerate(chain.from_iterable(members for _, members in notes))
    members = tuple(Member(**{**member, "rank": number}) for number, member in numbered)
    return members, sum(counts[: comm.rank])


def _read_layout(
    replicas: Sequence[_Named], first: int, *, gradients: bool = False
) -> tuple[tuple[Entry, ...], str]:
    """Look at this process's replicas.

    Args:
        replicas: Tensors by name, a mapping for each replica.
        first: Number of the first of them among all.
        gradients: Also look whether their gradients can be averaged.

    Returns:
        Names, shapes and dtypes sorted by name, and what is wrong, if anything is.
    """
    layouts = [
        tuple((name, tuple(named[name].shape), named[name].dtype) for name in sorted(named))
        for named in replicas
    ]
    for number, layout in enumerate(layouts):
        if layout != layouts[0]:
            words = _in_words(layouts[0]), _in_words(layout)
            return layouts[0], _first_difference(*words, first, first + number)
    for number, named in enumerate(replicas if gradients else ()):
        for name, tensor in named.items():
            if problem := _gradient_problem(tensor):
                place = f"the gradient of {name!r} on replica {first + number}"
                return layouts[0], f"{place} {problem}"
    return layouts[0], ""


def _in_words(layout: Sequence[Entry]) -> dict[str, str]:
    """Return a layout as it travels: shapes and dtypes in words, by name."""
    return {n: f"{list(shape)} {str(dtype).removeprefix('torch.')}" for n, shape, dtype in layout}


def _first_difference(
    left: Mapping[str, str], right: Mapping[str, str], left_number: int, right_number: int
) -> str:
    """Return the first difference of two layouts in words, by name; empty where there is none."""
    for name in sorted({*left, *right}):
        mine, theirs = left.get(name), right.get(name)
        if mine == theirs:
            continue
        if mine and theirs:
            what = (
                f"{name!r} is {theirs} on replica {right_number} and {mine} on replica "
                f"{left_number}"
            )
        else:
            has, lacks = (left_number, right_number) if mine else (right_number, left_number)
            what = f"replica {has} has {name!r} and replica {lacks} has not, or has it frozen"
        return f"{what}; replicas need the same architecture, and must change it alike"
    return ""


def _gradient_problem(parameter: Tensor) -> str:
    gradient = parameter.grad
    if gradient is None:
        return ""
    if gradient.layout is not torch.strided:
        return "is sparse; replicas exchange dense gradients: use sparse=False in its layer"
    if gradient.shape != parameter.shape:
        return (
            f"has shape {list(gradient.shape)}, its parameter {list(parameter.shape)}; call "
            "zero_grad() after a model has changed its size"
        )
    return ""


def _refusal(notes: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong, in the same words on every process."""
    for rank, note in enumerate(notes):
        if note["problem"]:
            return f"{note['problem']} (rank {rank})" if len(notes) > 1 else str(note["problem"])
    for note in notes:
        if text := _first_difference(notes[0]["layout"], note["layout"], 0, note["first"]):
            return text
    for rank, note in enumerate(notes):
        if note["counts"] != notes[0]["counts"]:
            given = [f"all {n['counts']}" if n["counts"] else "its own" for n in (notes[0], note)]
            return (
                f"batch_counts are of {given[0]} on rank 0 and of {given[1]} on rank {rank}; give "
                "every process the same list of all replicas, or each process its own replicas'"
            )
    return "replicas differ; build the same model on every process"


def _sum(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:  # from the left: sum() rounds differently from 3.12 on
        total += value
    return total
