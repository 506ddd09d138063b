"""Teams of ranks inside one process: a thread per rank, for tests of the mathematics."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.planning.plans import WindowPlan
from evener.planning.policies import Parking, Policy
from evener.planning.report import Report
from evener.planning.shares import apportion
from evener.team.environment import DistributedTrainConfig
from helpers.limits import PATIENCE_S

T = TypeVar("T")


def run_team(
    world_size: int, function: Callable[[Communicator], T], timeout_s: float = PATIENCE_S
) -> list[T]:
    """Runs ``function(communicator)`` on a thread per rank; the first error is raised."""
    if world_size == 1:
        return [function(Communicator())]
    team = ThreadTeam(world_size)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def body(rank: int) -> None:
        communicator = team.communicator(rank)
        try:
            results[rank] = function(communicator)
        except BaseException as error:
            errors.append((rank, error))
        finally:
            communicator.close()

    threads = [
        threading.Thread(target=body, args=(r,), name=f"rank-{r}") for r in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(t.is_alive() for t in threads), "a rank did not end"
    if errors:
        raise errors[0][1]
    return results


def setup(
    communicator: Communicator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
    *,
    policy: str = "sync",
    shares: Callable[[int, int], Sequence[float]] | Sequence[float] | None = None,
    precision: str = "auto",
    **config: Any,
) -> Ddp:
    """``Ddp.setup`` on a given communicator; ``shares`` replaces the planner.

    ``shares`` are relative speeds, or a function of (window, size) that gives whole shares.
    """
    ddp = Ddp.setup(
        model,
        optimizer,
        scheduler,
        policy=policy,
        devices="cpu",
        precision=precision,
        environment=DistributedTrainConfig(),
        communicator=communicator,
        config=DdpConfig(quiet=True, timeout_s=PATIENCE_S, **config),
    )
    if shares is not None:
        ddp.assembly.engine.lookahead.stale_policy = ScriptedPolicy(communicator.world_size, shares)
    return ddp


class ScriptedPolicy(Policy):
    """Gives the shares that a test prescribes."""

    def __init__(
        self, world_size: int, shares: Callable[[int, int], Sequence[float]] | Sequence[float]
    ) -> None:
        super().__init__([])
        self.world_size = world_size
        self.shares = shares

    is_calibrated = True

    def set_micro_batch_sizes(self, sizes: Sequence[int | None]) -> None:
        pass

    def calibrate(self, speeds: Sequence[float]) -> None:
        pass

    def solo_speeds(self, batch_size: int) -> tuple[float, ...]:
        return (1.0,) * self.world_size

    def set_parked(self, ranks: frozenset[int]) -> None:
        pass

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        return None

    def observe(self, reports: Sequence[Report], plan: WindowPlan, sync_s: float) -> None:
        pass

    def plan(
        self, window: int, epoch: int, start: int, size: int, *, work_for_all: float = 0.0
    ) -> WindowPlan:
        if callable(self.shares):
            shares = tuple(int(s) for s in self.shares(window, size))
        else:
            shares = tuple(apportion(size, list(self.shares)))
        return WindowPlan(window, epoch, start, size, shares)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass
