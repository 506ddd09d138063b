"""Ranks of CADENCE and ASYNC that are killed, stopped, cut off or slow, at points of a window.

Every other member is looked at: what it was told, how soon, and where it stands. A survivor that
waits for its deadline where it need not is found by the time limits, which are far below it.
"""

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evener.comm import base as comm_module
from evener.ddp import Ddp
from evener.errors import CollectiveError, CollectiveTimeoutError
from evener.loop import loop as loop_module
from helpers.forking import is_stopped
from helpers.limits import wait_until
from helpers.ranks import Outcome, Rank, RankTeam
from helpers.teams import setup

FAR_S = 600.0  # a deadline that no test reaches
SOON_S = 150.0  # far below it, far above what a busy machine needs
DEADLINE_S = 3.0  # from the moment at which all have come to the point of harm
WINDOW = 3  # in which harm is done

#: Where a rank is when harm is done to it: the object, and the method that comes next.
POINTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "before the exchange": (lambda engine: engine, "_exchange"),
    "before the reduce": (lambda engine: engine.consensus, "exchange"),
    "before it lands": (lambda engine: engine, "_apply"),
}


def arm(ddp: Ddp, point: str, harm: Callable[[], None]) -> None:
    """Calls ``harm`` once, at a point of window ``WINDOW``."""
    engine: Any = ddp.assembly.engine
    find, name = POINTS[point]
    owner = find(engine)
    method = getattr(owner, name)
    armed = [True]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if armed and engine.window == WINDOW:
            armed.clear()
            harm()
        return method(*args, **kwargs)

    setattr(owner, name, wrapper)


def harm_of(rank: Rank, ddp: Ddp, kind: str) -> Callable[[], None]:
    engine: Any = ddp.assembly.engine

    def cut() -> None:
        for comm in {engine.team.comm, engine.team.background or engine.team.comm}:
            comm._transport._wires.cut()

    def harm() -> None:
        rank.send("harm")
        if kind == "cut":
            cut()
        elif kind == "slow":
            rank.receive()
        else:
            os.kill(os.getpid(), getattr(signal, kind))

    return harm


def start(rank: Rank, policy: str) -> tuple[Ddp, nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    comm = rank.connect(timeout_s=FAR_S)
    short = {"anchor": 2, "max_anchor": 2, "max_batch_diff": 1}
    ddp = setup(comm, model, optimizer, policy=policy, **short)
    x = torch.randn(8000, 4, generator=torch.Generator().manual_seed(1))
    return ddp, model, ddp.loader(torch.utils.data.TensorDataset(x), batch_size=4, max_steps=60)


def digest(model: nn.Module) -> str:
    together = hashlib.sha256()
    for tensor in model.state_dict().values():
        assert bool(tensor.isfinite().all())
        together.update(tensor.numpy().tobytes())
    return together.hexdigest()


def state(ddp: Ddp, loader: Any) -> dict[str, Any]:
    """Where a member stands: what it would save, and from where it would go on."""
    engine = ddp.assembly.engine
    with engine.consensus.shown():
        return {
            "consensus": digest(ddp.assembly.model),
            "progress": ddp.progress,
            "position": loader.state_dict(),
        }


def play(rank: Rank, policy: str, point: str, kind: str, victim: int) -> dict[str, Any]:
    """Trains until something is wrong, or to the end."""
    ddp, model, loader = start(rank, policy)

    def hurry() -> None:
        rank.send("here")
        rank.receive()  # the victim has been stopped
        ddp.assembly.engine.team.hurry(DEADLINE_S)

    seen: dict[str, Any] = {"commits": []}
    with ddp:
        ddp.on_commit(lambda result: seen["commits"].append((result.window, digest(model))))
        if rank.rank == victim:
            arm(ddp, point, harm_of(rank, ddp, kind))
        elif kind == "slow":
            arm(ddp, point, lambda: rank.send("here"))
        elif kind == "SIGSTOP":
            arm(ddp, point, hurry)
        try:
            for (x,) in loader.epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
        except CollectiveError as error:
            seen |= {"error": type(error).__name__, "message": str(error)}
            seen["missing"] = getattr(error, "missing", ())
            rank.send("told")
            rank.receive()  # all have been told; rank 0, which serves the store, stays until then
        return seen | state(ddp, loader)


def let_go(team: RankTeam, *ranks: int) -> None:
    """Waits until these ranks have been told what is wrong, and lets them end."""
    for rank in ranks:
        assert team.receive(rank) == "told"
    for rank in ranks:
        team.send(rank, "end")


def survivors(outcomes: list[Outcome], victim: int) -> list[dict[str, Any]]:
    for outcome in outcomes:
        assert outcome.rank == victim or outcome.returned, outcome.story()
        assert "frame #" not in outcome.output, "a C++ stack trace"
    return [outcome.value for outcome in outcomes if outcome.rank != victim]


def assert_one_state(members: list[dict[str, Any]], *, applied: bool) -> None:
    """Nobody has half a window: all stand at one consensus, that of the last window that landed."""
    for member in members:
        assert member["commits"] == members[0]["commits"]
        assert (member["consensus"], member["progress"]) == (
            members[0]["consensus"],
            members[0]["progress"],
        )
        assert member["position"] == members[0]["position"]
        assert member["progress"].window == WINDOW + applied
        assert member["commits"][-1][0] == member["progress"].window - 2, "the last is in doubt"


@pytest.mark.parametrize(
    ("policy", "point", "victim"),
    [("cadence", "before it lands", 0), ("async", "before the reduce", 1)],
)
def test_a_killed_rank(policy: str, point: str, victim: int) -> None:
    with RankTeam(play, 3, policy, point, "SIGKILL", victim) as team:
        let_go(team, *({0, 1, 2} - {victim}))
        outcomes = team.wait(SOON_S)
    assert outcomes[victim].died_of == signal.SIGKILL
    members = survivors(outcomes, victim)
    for member in members:
        assert member["error"] == "PeerLostError", member
        assert "lost a peer in" in member["message"]
    assert_one_state(members, applied=point == "before it lands")


@pytest.mark.parametrize(
    ("policy", "point"), [("cadence", "before the exchange"), ("async", "before the reduce")]
)
def test_a_stopped_rank(policy: str, point: str) -> None:
    """It hangs and holds its connections: the deadline passes, and the error says whose fault."""
    victim = 1
    with RankTeam(play, 3, policy, point, "SIGSTOP", victim) as team:
        assert team.receive(victim) == "harm"
        wait_until(lambda: is_stopped(team.pids[victim]))
        for rank in (0, 2):
            assert team.receive(rank) == "here"
        for rank in (0, 2):
            team.send(rank, "go")
        let_go(team, 0, 2)
        outcomes = team.wait(SOON_S)
    assert outcomes[victim].stopped
    members = survivors(outcomes, victim)
    for member, rank in zip(members, (0, 2), strict=True):
        assert member["error"] == "CollectiveTimeoutError", member
        assert member["missing"] == (victim,)
        assert f"rank {rank} waited" in member["message"]
        assert "for rank 1" in member["message"]
        if point == "before the exchange":
            assert f"(rank {rank} was closing a window" in member["message"]
    assert_one_state(members, applied=False)


def test_a_rank_that_is_cut_off() -> None:
    """Its network fails: it loses its peers as they lose it, and nobody waits for a deadline."""
    with RankTeam(play, 3, "async", "before the exchange", "cut", 1) as team:
        assert team.receive(1) == "harm"
        let_go(team, 0, 1, 2)
        outcomes = team.wait(SOON_S)
    members = survivors(outcomes, -1)
    for member in members:
        assert member["error"] == "PeerLostError", member
    assert_one_state(members, applied=False)


def test_a_slow_rank_is_waited_for() -> None:
    """All others have come to the exchange, and may have gone on, before it comes."""
    victim = 1
    with RankTeam(play, 3, "async", "before the exchange", "slow", victim) as team:
        assert team.receive(victim) == "harm"
        for rank in (0, 2):
            assert team.receive(rank) == "here"
        team.send(victim, "go")
        members = [outcome.value for outcome in team.wait(SOON_S)]
    for member in members:
        assert "error" not in member
        assert member["progress"].steps == 60
        assert (member["consensus"], member["commits"]) == (
            members[0]["consensus"],
            members[0]["commits"],
        )


def end_badly(rank: Rank, policy: str, way: str) -> None:
    """Rank 1 hangs in its exchange; rank 0 ends in one of two ways. Nothing may keep it."""
    ddp, model, loader = start(rank, policy)
    hung = threading.Event()
    if rank.rank == 1:
        arm(ddp, "before the exchange", harm_of(rank, ddp, "SIGSTOP"))
    loop_module.CLOSING_S = comm_module._ORPHAN_S = DEADLINE_S
    for (x,) in loader.epoch(0):
        ddp.backward(model(x).square().mean())
        ddp.step()
        if rank.rank == 0 and ddp.window == WINDOW and not hung.is_set():
            rank.send("there")
            rank.receive()  # rank 1 has been stopped
            hung.set()
            if way == "an error":
                raise KeyError("mine")
            break
    with pytest.raises(CollectiveTimeoutError, match=r"waited .* for rank 1"):
        ddp.close()


@pytest.mark.parametrize(("policy", "way"), [("cadence", "close"), ("async", "an error")])
def test_the_end_does_not_wait_for_a_hung_peer(policy: str, way: str) -> None:
    with RankTeam(end_badly, 2, policy, way) as team:
        assert team.receive(1) == "harm"
        assert team.receive(0) == "there"
        wait_until(lambda: is_stopped(team.pids[1]))
        team.send(0, "go")
        outcome = team.wait(SOON_S, [0])[0]
    assert outcome.returned if way == "close" else isinstance(outcome.exception, KeyError)
