"""A process's place in a team: read once from the environment, checked, then passed on."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from evener.comm.addresses import LOOPBACK, is_loopback, join_address, parse_address
from evener.errors import ConfigError
from evener.parsing import short
from evener.team import slurm

#: Set to 1 by evener's launcher in every rank that it starts.
LAUNCHED = "EVENER_LAUNCHED"
#: ``HOST:PORT`` of the team's coordinator, if a launcher has started it.
COORDINATOR = "EVENER_COORDINATOR"
#: Id of this worker, which is never reused.
MEMBER = "EVENER_MEMBER"
#: The user's address at which other workers reach it; by default, that of its route to the
#: coordinator.
ADDRESS = "EVENER_ADDRESS"
#: File with the token that the processes of a team must know.
TOKEN_FILE = "EVENER_TOKEN_FILE"
#: Elastic teams only: fewest and most workers, as ``MIN:MAX``.
ELASTIC = "EVENER_ELASTIC"

_Choice = TypeVar("_Choice", bound=StrEnum)

_NUMBERS = ("world_size", "rank", "local_rank", "local_world_size", "coordinator_port")
_KEYS = (*_NUMBERS, "role", "coordinator_addr", "backend", "comm_backend")
#: Sections of a file that may contain the keys.
_SECTIONS = (("training", "distributed"), ("distributed",))
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
#: Environment variables of torchrun's options, by the launcher's option.
_MACHINES: Final[Mapping[str, str]] = {
    "nnodes": "PET_NNODES",
    "node_rank": "PET_NODE_RANK",
    "master_addr": "PET_MASTER_ADDR",
    "port": "PET_MASTER_PORT",
    "nproc": "PET_NPROC_PER_NODE",
}


class DistributedRole(StrEnum):
    """The role of a process besides computing."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


class DistributedBackend(StrEnum):
    """The kind of a rank's device; ``ACCELERATOR`` is what ``torch.accelerator`` finds."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"
    ACCELERATOR = "accelerator"


class AverageBackend(StrEnum):
    """How ranks exchange."""

    AUTO = "auto"
    """NCCL if every rank has its own GPU and NCCL works; else as ``CPU``."""

    NCCL = "nccl"
    """Between GPUs of one vendor, one for each rank."""

    GLOO = "gloo"
    """Through sockets, also between ranks of one host."""

    CPU = "cpu"
    """Through shared memory if all ranks are on one host and can share it; else as ``GLOO``."""


_CHOICES: Final[Mapping[str, type[StrEnum]]] = {
    "role": DistributedRole,
    "backend": DistributedBackend,
    "comm_backend": AverageBackend,
}


def choose(name: str, value: str, kind: type[_Choice]) -> _Choice:
    """Return the member of an enumeration that has a value.

    Args:
        name: The option's name, for errors.
        value: The user's value: the member, or its value.
        kind: The enumeration.

    Raises:
        ConfigError: No member has the value.
    """
    try:
        return kind(value)
    except ValueError:
        hint = ""
        if value == "wgpu":  # one of entrenar's backends
            hint = "; torch has no wgpu: 'auto' uses the accelerator that torch finds"
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(kind)}{hint}") from None


@dataclass(frozen=True, slots=True)
class DistributedTrainConfig:
    """A process's place in a team of ranks.

    Attributes:
        world_size: Ranks in the team.
        rank: Number of this rank, from 0.
        local_rank: Number of this rank among those on this host; it determines the device. -1 means
            unknown: then ``rank`` if the address is a loopback one, else 0.
        role: Coordinator for rank 0, worker for the others; follows from the rank if left out.
        coordinator_addr: Host of the coordinator through which ranks find one another (rank 0's): a
            name or an IP address, or ``host:port``. On rank 0 it may be ``0.0.0.0`` or ``::``, with
            which the coordinator listens on every address; the others need an address of that host.
        backend: The kind of this rank's device.
        comm_backend: How ranks exchange if ``Ddp.setup`` has ``backend="auto"``.
        coordinator_port: Its port; 0 only in a team of one.
        local_world_size: Ranks on this host. 0 means unknown: then all of them if the address is a
            loopback one, else those up to this one.
        agent_store: Whether torchrun's agent has a store at that address. Then rank 0's coordinator
            has another port, which it publishes in that store.
        coordinator_token: The coordinator's token, if ranks got it in another way than by
            ``EVENER_TOKEN_FILE``.
        launched_by: ``"alone"``, ``"evener"``, ``"torchrun"``, ``"slurm"``, or ``"the user"`` if
            the place is from a file.

    Raises:
        ConfigError: A value is invalid.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = -1
    role: DistributedRole = None  # type: ignore[assignment]  # set in __post_init__
    coordinator_addr: str = LOOPBACK
    backend: DistributedBackend = DistributedBackend.AUTO
    comm_backend: AverageBackend = AverageBackend.AUTO
    _: KW_ONLY
    coordinator_port: int = 0
    local_world_size: int = 0
    agent_store: bool = False
    coordinator_token: str = field(default="", repr=False)
    launched_by: str = "alone"

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the class is frozen; only this sets missing values
        for name in _NUMBERS:
            if type(getattr(self, name)) is not int:
                given = short(getattr(self, name))
                raise ConfigError(f"{name} is {given}; give a whole number")
        size, rank = self.world_size, self.rank
        role = DistributedRole.WORKER if rank else DistributedRole.COORDINATOR
        set_field(self, "role", self.role or role)
        for name, kind in _CHOICES.items():
            set_field(self, name, choose(name, getattr(self, name), kind))
        if self.role is not role:
            raise ConfigError(
                f"role is {self.role.value!r} for rank {rank}; rank 0 is the coordinator and all "
                f"others are workers, so pass role={role.value!r}, or none"
            )
        host, port = parse_address(self.coordinator_addr, "coordinator_addr", may_bind=rank == 0)
        if port is None and self.coordinator_port:
            given = join_address(host, self.coordinator_port)
            _, port = parse_address(given, "the coordinator's address", may_bind=True)
        if self.coordinator_port not in (0, port):
            raise ConfigError(
                f"coordinator_addr is {self.coordinator_addr!r} and coordinator_port is "
                f"{self.coordinator_port}; give the port once"
            )
        set_field(self, "coordinator_addr", host)
        set_field(self, "coordinator_port", port or 0)
        if self.local_rank == -1:
            set_field(self, "local_rank", rank if is_loopback(host) else 0)
        if not self.local_world_size:
            known = size if is_loopback(host) else self.local_rank + 1
            set_field(self, "local_world_size", known)
        if not (0 <= rank < size and 0 <= self.local_rank < self.local_world_size <= size):
            raise ConfigError(
                f"rank is {rank} and world_size is {size}, local_rank is {self.local_rank} and "
                f"local_world_size is {self.local_world_size}; ranks are numbered from 0, on each "
                "host too (RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment)"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "DistributedTrainConfig":
        """Read this process's place from the environment.

        In this order: evener's launcher, torchrun's variables (set by any program), a SLURM step of
        several tasks, otherwise a team of one.

        Args:
            environ: Instead of the process's environment.

        Raises:
            ConfigError: A variable is missing or invalid; names the variable, its value and the
                remedy.
        """
        environ = os.environ if environ is None else environ
        if environ.get(LAUNCHED):
            return _from_variables(environ, launched_by="evener")
        if "RANK" in environ or "WORLD_SIZE" in environ:
            return _from_variables(environ, launched_by="torchrun")
        if slurm.in_step(environ):
            place = slurm.read_place(environ)
            if place["world_size"] == 1:
                # For example the shell of `srun --pty bash`, which may start ranks.
                return cls()
            # A batch script may choose the port itself.
            port = _integer(environ, "MASTER_PORT", default=slurm.choose_port(environ))
            return cls(**place, coordinator_port=port, launched_by="slurm")
        if any(environ.get(name) for name in (*_REQUIRED, "LOCAL_RANK")):
            raise ConfigError(_partial(environ))
        return cls()

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> "DistributedTrainConfig":
        """Read a process's place from a file.

        The keys are ``world_size``, ``rank``, ``local_rank``, ``local_world_size``, ``role``,
        ``coordinator_addr`` (a host, or ``host:port``), ``coordinator_port``, ``backend`` and
        ``comm_backend``, at the top of the file or under ``training: distributed:``.

        Args:
            path: YAML.
            **changes: Take precedence over the file, such as ``rank=1`` if all ranks share it. The
                file's ``role`` and ``local_rank`` are then ignored.

        Raises:
            ConfigError: Names the file, the key, its value and what is allowed.
        """
        from evener.yaml_files import read_yaml  # rarely needed

        document = _section(read_yaml(Path(path)))
        if "rank" in changes:  # these values of the file may be for another rank
            document = {k: v for k, v in document.items() if k not in ("role", "local_rank")}
        place = {**document, **changes}
        needed = ("world_size", "rank", "coordinator_addr")
        try:
            for key in document.keys() - _KEYS:
                raise ConfigError(
                    f"unknown key {key!r} ({short(document[key])}): {', '.join(_KEYS)}"
                )
            for key in needed[:1] if place.get("world_size") == 1 else needed:
                if key not in place:
                    raise ConfigError(
                        f"{key} is missing; give it there, or as from_yaml(..., {key}=)"
                    )
            return cls(**{"launched_by": "the user", **place})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def of_rank(cls, rank: int, world_size: int, **changes: Any) -> "DistributedTrainConfig":
        """Return the place of a rank in a team on one host; ``changes`` are further fields."""
        return cls(world_size, rank, **changes)


def read_machines(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the machines of a run from the environment, for the launcher.

    Kubeflow's trainer starts the same program on each machine, and sets the variables of torchrun's
    options.

    Args:
        environ: The launcher's environment.

    Returns:
        Values for ``nnodes``, ``node_rank``, ``master_addr``, ``port`` and ``nproc``, as far as
        they are set; nothing without ``PET_NNODES``. ``auto`` and ``gpu`` set no ``nproc``.

    Raises:
        ConfigError: A value is not a number.
    """
    if not environ.get(_MACHINES["nnodes"]):
        return {}
    found: dict[str, Any] = {}
    for option, name in _MACHINES.items():
        text = environ.get(name)
        if not text or (option == "nproc" and text in ("auto", "gpu")):
            continue
        found[option] = text if option in ("nnodes", "master_addr") else _integer(environ, name)
    return found


def _from_variables(environ: Mapping[str, str], launched_by: str) -> DistributedTrainConfig:
    if not all(environ.get(name) for name in _REQUIRED):
        raise ConfigError(_partial(environ))
    return DistributedTrainConfig(
        _integer(environ, "WORLD_SIZE"),
        _integer(environ, "RANK"),
        # Some launchers set only the four variables.
        local_rank=_integer(environ, "LOCAL_RANK", default=-1),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", default=0),
        coordinator_addr=environ["MASTER_ADDR"],
        coordinator_port=_integer(environ, "MASTER_PORT"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launched_by=launched_by,
    )


def _partial(environ: Mapping[str, str]) -> str:
    present = [name for name in (*_REQUIRED, "LOCAL_RANK") if environ.get(name)]
    shown = ", ".join(f"{name}={environ[name]}" for name in present) or "none of them"
    missing = ", ".join(name for name in _REQUIRED if not environ.get(name))
    return (
        f"the environment describes a rank incompletely: {shown} set, {missing} missing; set all "
        f"of {', '.join(_REQUIRED)} (torchrun does) or unset them to run alone"
    )


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name) or ""
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}, which is not an integer; it is set by the program that starts "
            "the ranks: correct it there or unset it"
        ) from None


def _section(document: dict[str, Any]) -> dict[str, Any]:
    for names in _SECTIONS:
        inner: Any = document
        for name in names:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            return inner
    return document
