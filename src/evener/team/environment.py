"""Who am I in the team: read once from the environment, checked, and then only passed on."""

import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from evener.comm.addresses import LARGEST_PORT, LOOPBACK, is_loopback, parse_address
from evener.errors import ConfigError
from evener.parsing import short
from evener.team import slurm

#: Set to 1 by evener's launcher in every rank that it starts.
LAUNCHED = "EVENER_LAUNCHED"
#: ``HOST:PORT`` of the team's coordinator, if a launcher has started it.
COORDINATOR = "EVENER_COORDINATOR"
#: Id of this worker, which no other worker ever had.
MEMBER = "EVENER_MEMBER"
#: Name or number at which the other workers reach it, given by the user; else that of its route to
#: the coordinator.
ADDRESS = "EVENER_ADDRESS"
#: File with what the processes of a team must know.
TOKEN_FILE = "EVENER_TOKEN_FILE"
#: Elastic teams only: fewest and most workers, as ``MIN:MAX``.
ELASTIC = "EVENER_ELASTIC"

_Choice = TypeVar("_Choice", bound=StrEnum)

_NUMBERS = ("world_size", "rank", "local_rank", "local_world_size", "coordinator_port")
_KEYS = (*_NUMBERS, "role", "coordinator_addr", "backend", "comm_backend")
#: Where else in a file the keys may stand.
_SECTIONS = (("training", "distributed"), ("distributed",))
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class DistributedRole(StrEnum):
    """What a process does besides computing."""

    COORDINATOR = "coordinator"
    WORKER = "worker"


class DistributedBackend(StrEnum):
    """What a rank computes on; ``ACCELERATOR`` is whatever ``torch.accelerator`` finds."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"
    XPU = "xpu"
    MPS = "mps"
    ACCELERATOR = "accelerator"


class AverageBackend(StrEnum):
    """How ranks exchange."""

    AUTO = "auto"
    """NCCL where every rank has a GPU of its own and NCCL works; else as ``CPU``."""

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
        name: What is chosen, for errors.
        value: As the user gives it: the member, or its value.
        kind: The enumeration.

    Raises:
        ConfigError: There is none.
    """
    try:
        return kind(value)
    except ValueError:
        hint = ""
        if value == "wgpu":  # one of entrenar's backends
            hint = "; torch has no wgpu: 'auto' takes the accelerator that torch finds"
        raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(kind)}{hint}") from None


@dataclass(frozen=True, slots=True)
class DistributedTrainConfig:
    """A process's place in a team of ranks.

    Attributes:
        world_size: Ranks in the team.
        rank: Number of this rank, from 0.
        local_rank: Number of this rank among those on this host; chooses its device.
        role: Coordinator for rank 0, worker for the others.
        coordinator_addr: Host of the coordinator through which ranks find one another (rank 0's): a
            name or an IP address, or ``host:port``. On rank 0 it may be ``0.0.0.0`` or ``::``,
            where the coordinator then listens on every address; the others need one that leads
            there.
        backend: What this rank computes on.
        comm_backend: How ranks exchange, where ``Ddp.setup`` has ``backend="auto"``.
        coordinator_port: Its port; 0 only in a team of one.
        local_world_size: Ranks on this host. 0 says that it is not known: then all of them where
            the address is a loopback one, else those up to this one.
        agent_store: Whether torchrun's agent has a store at that address. Rank 0's coordinator then
            has another port, of which it tells the others there.
        coordinator_token: What the coordinator asks of ranks, if it was told to them otherwise than
            by ``EVENER_TOKEN_FILE``.
        launched_by: ``"alone"``, ``"evener"``, ``"torchrun"``, ``"slurm"``, or ``"the user"`` where
            a file says who is where.

    Raises:
        ConfigError: A value is impossible.
    """

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    role: DistributedRole = DistributedRole.COORDINATOR
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
        set_field = object.__setattr__  # frozen: texts become enums here, and nowhere else
        for name, kind in _CHOICES.items():
            set_field(self, name, choose(name, getattr(self, name), kind))
        host, port = parse_address(
            self.coordinator_addr, "coordinator_addr", may_bind=self.rank == 0
        )
        if port is not None and self.coordinator_port not in (0, port):
            raise ConfigError(
                f"coordinator_addr is {self.coordinator_addr!r} and coordinator_port is "
                f"{self.coordinator_port}; give the port once"
            )
        set_field(self, "coordinator_addr", host)
        set_field(self, "coordinator_port", port or self.coordinator_port)
        for name in _NUMBERS:
            if type(getattr(self, name)) is not int:
                given = short(getattr(self, name))
                raise ConfigError(f"{name} is {given}; give a whole number")
        size, role = self.world_size, _role(self.rank)
        if not self.local_world_size:
            known = size if is_loopback(host) else self.local_rank + 1
            set_field(self, "local_world_size", known)
        local = self.local_world_size
        variables = "(RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in the environment)"
        for is_right, why in (
            (size >= 1, f"world_size is {size}; a team has at least one rank"),
            (0 <= self.rank < size, f"rank is {self.rank}, but world_size is {size}"),
            (
                0 <= self.local_rank < local,
                f"local_rank is {self.local_rank}, but local_world_size is {local}",
            ),
            (local <= size, f"local_world_size is {local}, but world_size is {size}"),
        ):
            if not is_right:
                raise ConfigError(f"{why}; ranks are numbered from 0, on each host too {variables}")
        if not 0 <= self.coordinator_port <= LARGEST_PORT:
            raise ConfigError(
                f"coordinator_port is {self.coordinator_port}; give a port from 1 to {LARGEST_PORT}"
            )
        if self.role is not role:
            raise ConfigError(
                f"role is {self.role.value!r} for rank {self.rank}; rank 0 is the coordinator and "
                f"all others are workers, so pass role={role.value!r}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "DistributedTrainConfig":
        """Read this process's place from what started it.

        In order: evener's own launcher, torchrun's variables (whoever set them), a SLURM step of
        several tasks, otherwise a team of one.

        Args:
            environ: Instead of the process's environment.

        Raises:
            ConfigError: A variable is missing or impossible; names the variable, its value and
                what to do.
        """
        environ = os.environ if environ is None else environ
        if environ.get(LAUNCHED):
            return _from_variables(environ, launched_by="evener")
        if "RANK" in environ or "WORLD_SIZE" in environ:
            return _from_variables(environ, launched_by="torchrun")
        if slurm.in_step(environ):
            place = slurm.read_place(environ)
            if place["world_size"] == 1:
                # Such as the shell of `srun --pty bash`: it may start ranks of its own.
                return cls()
            # A batch script may choose the port itself.
            port = _integer(environ, "MASTER_PORT", default=slurm.choose_port(environ))
            return cls.of_rank(**place, coordinator_port=port, launched_by="slurm")
        if any(environ.get(name) for name in (*_REQUIRED, "LOCAL_RANK")):
            raise ConfigError(_partial(environ))
        return cls()

    @classmethod
    def from_yaml(cls, path: str | Path, **changes: Any) -> "DistributedTrainConfig":
        """Read a process's place from a file.

        The keys are ``world_size``, ``rank``, ``local_rank``, ``local_world_size``, ``role``,
        ``coordinator_addr`` (a host, or ``host:port``), ``coordinator_port``, ``backend`` and
        ``comm_backend``, alone in the file or under ``training: distributed:``. The role follows
        the rank if none is given. Without local numbers, a loopback address means one host for
        all ranks, any other one rank per host.

        Args:
            path: YAML.
            **changes: Take precedence over the file, such as ``rank=1`` if all ranks share it. The
                file's ``role`` then yields to the rank, and so does its ``local_rank`` if the
                address is a loopback one.

        Raises:
            ConfigError: Names the file, the key, its value and what is allowed.
        """
        from evener.yaml_files import read_yaml  # seldom needed

        document = _section(read_yaml(Path(path)))
        try:
            for key in document:
                if key not in _KEYS:
                    allowed = ", ".join(_KEYS)
                    raise ConfigError(f"unknown key {key!r} ({short(document[key])}): {allowed}")
            place = {**document, **changes}
            alone = place.get("world_size") == 1
            for key in ("world_size",) if alone else ("world_size", "rank", "coordinator_addr"):
                if key not in place:
                    raise ConfigError(
                        f"{key} is missing; give it there, or as from_yaml(..., {key}=)"
                    )
            rank, address = place.setdefault("rank", 0), place.get("coordinator_addr", LOOPBACK)
            known = {"role": _role(rank), "launched_by": "the user"}
            host, _ = parse_address(address, "coordinator_addr", may_bind=rank == 0)
            of_rank = {"role"}
            if is_loopback(host):
                known["local_rank"] = rank
                of_rank.add("local_rank")
            if "rank" in changes:  # the file speaks of another rank
                place = {k: v for k, v in place.items() if k in changes or k not in of_rank}
            return cls(**{**known, **place})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def of_rank(cls, rank: int, world_size: int, **changes: Any) -> "DistributedTrainConfig":
        """Return the place of a rank in a team on one host; ``changes`` are further fields."""
        place = {"local_rank": rank, "local_world_size": world_size, "role": _role(rank), **changes}
        return cls(world_size, rank, **place)


def _from_variables(environ: Mapping[str, str], launched_by: str) -> DistributedTrainConfig:
    if not all(environ.get(name) for name in _REQUIRED):
        raise ConfigError(_partial(environ))
    rank = _integer(environ, "RANK")
    address = environ["MASTER_ADDR"]
    host, _ = parse_address(address, "MASTER_ADDR", may_bind=rank == 0)
    return DistributedTrainConfig.of_rank(
        rank,
        _integer(environ, "WORLD_SIZE"),
        # Some launchers set the four variables only. A loopback address means one host for all
        # ranks; otherwise one rank per host, as those launchers do.
        local_rank=_integer(environ, "LOCAL_RANK", default=rank if is_loopback(host) else 0),
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", default=0),
        coordinator_addr=address,
        coordinator_port=_integer(environ, "MASTER_PORT"),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        launched_by=launched_by,
    )


def _role(rank: int) -> DistributedRole:
    return DistributedRole.WORKER if rank else DistributedRole.COORDINATOR


def _partial(environ: Mapping[str, str]) -> str:
    present = [name for name in (*_REQUIRED, "LOCAL_RANK") if environ.get(name)]
    shown = ", ".join(f"{name}={environ[name]}" for name in present) or "none of them"
    missing = ", ".join(name for name in _REQUIRED if not environ.get(name))
    return (
        f"the environment describes a rank only in part: {shown} set, {missing} missing; set all "
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
            f"{name} is {text!r}, which is no integer; it is set by whatever starts the ranks: "
            "mend it there or unset it"
        ) from None


def _section(document: dict[str, Any]) -> dict[str, Any]:
    for names in _SECTIONS:
        inner: Any = document
        for name in names:
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            return inner
    return document
