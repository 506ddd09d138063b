"""Teams on Ray Train: a backend for its trainers, and reports of what the team has committed.

It needs the extra ``evener[ray]``, and Linux. ``EvenerConfig`` passes the address of the team's
coordinator to Ray's workers, so their function makes the same calls as any other script.

An elastic team consists of Ray's *replica groups*, each of one worker: Ray replaces a worker that
died, and does not restart the others.
"""

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

from evener.comm.addresses import bind, join_address, parse_address
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from evener.errors import ConfigError, RunEndedError
from evener.protocol.formation import Deadlines
from evener.team.coordinator_options import CoordinatorOptions, listen
from evener.team.coordinator_thread import CoordinatorThread
from evener.team.environment import COORDINATOR, ELASTIC, LAUNCHED, MEMBER, TOKEN_FILE

try:
    import ray
    import ray.train
    from ray.train.backend import Backend, BackendConfig
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"evener.ray needs Ray Train, which cannot be imported ({error}): pip install 'evener[ray]'"
    ) from error

_NAMESPACE: Final = "evener"
#: Longest wait of the first generation for a further worker. Ray starts them together, on nodes of
#: unequal speed; without the last of them, nothing could be reported.
_GATHER_S: Final = 5.0
_REPORTING: Final = "reporting to Ray Train (evener.ray.report)"
#: Prefix of the ids of members that ``join_actor`` has started, which Ray Train does not know.
_EXTRA: Final = "extra/"


class _TeamAddress(NamedTuple):
    """The address of a team's coordinator, and the team's limits.

    Attributes:
        address: ``HOST:PORT`` of its coordinator.
        token: The token that its members must know.
        least: Fewest members.
        most: Most members.
        is_elastic: Whether members may join and leave.
    """

    address: str
    token: str
    least: int
    most: int
    is_elastic: bool

    def enter(self, rank: int, member: str) -> None:
        """Set this process's place in its environment, as evener's launcher does."""
        # A file in memory is always deleted with the process.
        token_file = os.memfd_create("evener-token")
        os.fchmod(token_file, 0o600)
        os.write(token_file, self.token.encode())
        host, port = parse_address(self.address, "the coordinator's address")
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.most),
            # In each worker, only its own devices are visible, numbered from 0.
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            LAUNCHED: "1",
            COORDINATOR: self.address,
            MEMBER: member,
            TOKEN_FILE: f"/proc/self/fd/{token_file}",
        }
        if self.is_elastic:
            os.environ[ELASTIC] = f"{self.least}:{self.most}"


class _CoordinatorActor:
    """Runs the coordinator of a team; if Ray restarts it, the workers report to it."""

    def __init__(self, team: _TeamAddress) -> None:
        self._team = team
        host, port = parse_address(team.address, "the coordinator's address")
        options = CoordinatorOptions(
            host=host,
            port=port or 0,
            least=team.least,
            most=team.most,
            token=team.token.encode(),
            deadlines=Deadlines(gather_s=_GATHER_S),
        )
        self._thread = CoordinatorThread(options, listen(options))

    def team(self) -> _TeamAddress:
        """Return the address of its team."""
        return self._team


# ── the backend ──────────────────────────────────────────────────────────────────────────────────


@dataclass(kw_only=True)
class EvenerConfig(BackendConfig):  # type: ignore[misc]  # of a library without types
    """Let the workers of a trainer find their team: ``TorchTrainer(..., torch_config=...)``.

    Attributes:
        min_workers: Fewest workers of an elastic team, in which Ray replaces a worker that dies
            while the others continue. ``None`` is a fixed team, which Ray restarts as a whole.
        max_workers: Most workers of an elastic team, those of ``join_actor`` included; by default
            the workers of the trainer.
        name: Name by which ``join_actor`` finds an elastic team; unique in the Ray cluster.

    Raises:
        ConfigError: A value does not fit the others.
    """

    min_workers: int | None = None
    max_workers: int | None = None
    name: str = ""
    #: If this is empty, ``TorchTrainer`` sets one of torch's backends.
    backend: ClassVar[str] = "evener"

    def __post_init__(self) -> None:
        if self.min_workers is None and (self.max_workers is not None or self.name):
            raise ConfigError(
                f"max_workers is {self.max_workers} and name is {self.name!r}, which only elastic "
                "teams have: give min_workers, too, or leave them out"
            )

    @property
    def backend_cls(self) -> type["_FixedBackend"]:
        """Return the class that prepares the workers; Ray instantiates it in its controller."""
        return _FixedBackend if self.min_workers is None else _ElasticBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context of the user's function: a worker that comes too late does not fail."""
        return partial(suppress, RunEndedError)


class _FixedBackend(Backend):  # type: ignore[misc]  # as above
    """Starts a team for every group of workers that Ray starts."""

    def __init__(self) -> None:
        self._coordinator: Any = None
        self._team: _TeamAddress | None = None

    def on_start(self, worker_group: Any, backend_config: EvenerConfig) -> None:
        """Send workers the team's address; Ray calls it before they run the user's function."""
        world_size = worker_group.execute_single(0, _world_size)
        if len(worker_group) == world_size:  # otherwise a worker replaces another one
            if self._coordinator is not None:
                ray.kill(self._coordinator)
            self._team = _choose_address(backend_config, world_size)
            self._coordinator = _start_coordinator(self._team, backend_config.name)
        worker_group.execute(_take_place, self._team)


class _ElasticBackend(_FixedBackend):
    """Lets Ray replace single workers."""

    has_replica_groups = True


def _choose_address(config: EvenerConfig, world_size: int) -> _TeamAddress:
    least = world_size if config.min_workers is None else config.min_workers
    most = world_size if config.max_workers is None else config.max_workers
    if not 1 <= least <= world_size <= most:
        raise ConfigError(
            f"the trainer has {world_size} workers, but min_workers is {least} and max_workers is "
            f"{most}: give a number of workers in between, and at least one"
        )
    host = ray.util.get_node_ip_address()
    with bind(host, 0) as free:  # the actor listens on this port each time it starts
        address = join_address(host, free.getsockname()[1])
    token = secrets.token_hex(16)
    return _TeamAddress(address, token, least, most, config.min_workers is not None)


def _start_coordinator(team: _TeamAddress, name: str) -> Any:
    """Start the coordinator on this node; it ends with the returned reference."""
    # A killed actor keeps its name for a moment, so the actor of each team has another name.
    unique = f"{name}/{secrets.token_hex(4)}"
    named = {"name": unique, "namespace": _NAMESPACE} if name else {}
    node = ray.get_runtime_context().get_node_id()
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here, **named}
    coordinator = ray.remote(_CoordinatorActor).options(**options).remote(team)
    ray.get(coordinator.team.remote())  # it listens
    return coordinator


def _world_size() -> int:
    return int(ray.train.get_context().get_world_size())


def _take_place(team: _TeamAddress) -> None:
    rank = ray.train.get_context().get_world_rank()
    team.enter(rank, f"ray/{rank}/{ray.get_runtime_context().get_actor_id()}")


# ── workers that Ray Train does not know ─────────────────────────────────────────────────────────


class _ExtraWorker:
    """A further worker of an elastic team, as an actor."""

    def run(self, team: _TeamAddress, train_func: Callable[..., Any], config: Any) -> Any:
        """Run the user's function as a member of the team."""
        actor = ray.get_runtime_context().get_actor_id()
        team.enter(team.most - 1, f"{_EXTRA}{actor}")
        with suppress(RunEndedError):
            return train_func() if config is None else train_func(config)


def join_actor(
    train_func: Callable[..., Any], config: Any = None, *, name: str, **options: Any
) -> Any:
    """Start an actor that joins an elastic team, such as a CPU beside a trainer's GPUs.

    Ray Train gives all its workers the same resources; these may have others.

    Args:
        train_func: The function that the trainer's workers run.
        config: Its argument; ``None`` calls it without one.
        name: Name in the team's ``EvenerConfig``.
        **options: Options of the actor, such as ``num_cpus`` (1 if left out), ``label_selector``,
            and ``max_restarts``.

    Returns:
        A reference to what the function returns, for ``ray.get``.

    Raises:
        ConfigError: No team of that name is running, or several.
    """
    actors = ray.util.list_named_actors(all_namespaces=True)
    ours = [one["name"] for one in actors if one["namespace"] == _NAMESPACE]
    found = [one for one in ours if one.rpartition("/")[0] == name]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} elastic teams named {name!r} are running in this Ray cluster, not one: "
            f"give EvenerConfig(min_workers=..., name={name!r}) to one trainer, and wait until it "
            "runs"
        )
    team = ray.get(ray.get_actor(found[0], namespace=_NAMESPACE).team.remote())
    actor = ray.remote(_ExtraWorker).options(**{"num_cpus": 1, **options}).remote()
    return actor.run.remote(team, train_func, config)


# ── reports to Ray Train ─────────────────────────────────────────────────────────────────────────


def load_checkpoint(ddp: Ddp) -> bool:
    """Load the checkpoint that Ray Train has for this run, if it has one.

    Call it on all ranks, after ``ddp.loader`` and before the first epoch. The team may have another
    size than the one that wrote it.

    Returns:
        Whether there was one.
    """
    checkpoint = ray.train.get_checkpoint() if _is_worker_of_ray() else None
    if checkpoint is None:
        return False
    with checkpoint.as_directory() as folder:
        ddp.load(folder)
    return True


def report(ddp: Ddp, metrics: Mapping[str, Any], *, checkpoint: bool = True) -> bool:
    """Report to Ray Train, with a checkpoint of the team; all ranks call it together.

    Ray waits until each of its workers has reported. So nothing is reported while a worker is lost
    and not replaced yet or, in a function of ``ddp.on_commit``, parked.

    Args:
        ddp: The rank's place in the team.
        metrics: Numbers and strings, the same on all ranks.
        checkpoint: Whether to save the state of the team, and to report it.

    Returns:
        Whether this rank has reported.
    """
    is_workers = _is_worker_of_ray()
    with tempfile.TemporaryDirectory(prefix="evener-") as folder:
        saved = Path(folder, "checkpoint")  # exists only on the main process
        if checkpoint:
            ddp.save(saved)
        # Ray's barrier would block this rank until a lost worker is replaced, and the new worker
        # would wait for this rank in order to join. So ranks first check that all are present.
        answers = ddp.assembly.engine.collectives.ask(_REPORTING, is_workers)
        if not is_workers or sum(answers.values()) < _world_size():
            return False
        with_state = ray.train.Checkpoint.from_directory(saved) if saved.exists() else None
        ray.train.report(dict(metrics), checkpoint=with_state)
        return True


def report_commits(ddp: Ddp, *, every: int, checkpoint: bool = True) -> None:
    """Report to Ray Train after every ``every`` committed windows; all ranks call it at the start.

    The metrics are ``window``, ``epoch``, ``samples`` (of the run so far), ``loss`` and ``lr``.

    Args:
        ddp: The rank's place in the team.
        every: Windows from one report to the next. Ray accepts a report about every two seconds;
            earlier ones wait.
        checkpoint: See ``report``.
    """

    def report_window(result: WindowResult) -> None:
        if (result.window + 1) % every == 0:
            metrics = {
                "window": result.window,
                "epoch": result.epoch,
                "samples": result.progress.samples,
                "loss": float(result.loss),
                "lr": result.lr,
            }
            report(ddp, metrics, checkpoint=checkpoint)

    ddp.on_commit(report_window)


def _is_worker_of_ray() -> bool:
    return not os.environ.get(MEMBER, "").startswith(_EXTRA)
