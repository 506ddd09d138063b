"""Teams of ranks inside one process: a thread per rank, for tests of the mathematics."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.planning.plans import WindowPlan
from evener.planning.policies import Forecast, Parking, Policy
from evener.planning.report import Report
from evener.planning.shares import apportion
from evener.team.environment import DistributedTrainConfig
from helpers.limits import PATIENCE_S

T = TypeVar("T")

OVERLAP = "auto"
"""When gradients of SYNC travel, unless a test says so itself; ``tests/numerics`` sets it."""


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
    if policy == "sync":
        config = {"overlap": OVERLAP, **config}
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


class Parks(ScriptedPolicy):
    """Equal shares of those who are present; some ranks are parked from window 2 on.

    Args:
        ddp: Of this rank.
        misfits: Who is parked.
        apart: For how many windows.
    """

    def __init__(self, ddp: Ddp, misfits: Iterable[int], apart: int) -> None:
        super().__init__(ddp.world_size, self._deal)
        self._ddp, self._misfits, self._apart = ddp, tuple(misfits), apart
        self._absent, self._parked = ddp.assembly.engine.team.absent, frozenset[int]()

    def _deal(self, window: int, size: int) -> tuple[int, ...]:
        away = self._absent | self._parked
        return tuple(apportion(size, [float(r not in away) for r in range(self.world_size)]))

    def set_absent(self, ranks: frozenset[int]) -> None:
        self._absent = ranks

    def set_parked(self, ranks: frozenset[int]) -> None:
        self._parked = ranks

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        if self._ddp.window != 0:
            return None
        before, after = Forecast(1.0, 0.5, 0.1), Forecast(0.5, 0.0, 0.1)
        return Parking(dict.fromkeys(self._misfits, 1.0), before, after)

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        return self._apart
