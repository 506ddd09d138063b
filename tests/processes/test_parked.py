"""A rank that is parked: whom errors name meanwhile, and who hears that it was told to stop."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import Ddp, DdpConfig, EvenerError
from evener.planning.policies import Parking
from evener.team.signals import StopSignals
from helpers.ranks import Rank, RankTeam

PARKED = 1
"""Ranks 0 and 2 go on: among themselves they are numbered 0 and 1."""


def set_up(**options: Any) -> tuple[torch.nn.Module, Ddp]:
    """A model and a team whose planner wants to be without rank 1 from window 3 on."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = DdpConfig(speed_hint=(1.0, 1.0, 1.0), quiet=True, **options)
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config)
    park_from(ddp, window=3)
    return model, ddp


def park_from(ddp: Ddp, window: int) -> None:
    """What is worth parking rests on measured times: here nothing does."""
    ddp.assembly.engine.policy.decide_parking = (  # type: ignore[method-assign]
        lambda batch_size, main: (
            Parking({PARKED: 1.0}) if ddp.window >= window and not is_anyone_parked(ddp) else None
        )
    )


def is_anyone_parked(ddp: Ddp) -> bool:
    return bool(ddp.assembly.engine.team.parked)


# ── whom errors name ─────────────────────────────────────────────────────────────────────────────


def meet_at_odds(rank: Rank) -> None:
    """Trains until rank 1 is parked, then rank 2 asks for a mean; what the others are told."""
    model, ddp = set_up()

    def train() -> None:
        for x in ddp.loader(torch.ones(1_000_000, 3), batch_size=8).epoch(0):
            ddp.backward(model(x).mean())
            if rank.rank == 2 and is_anyone_parked(ddp):
                ddp.weighted_mean(1.0)
            ddp.step()

    with pytest.raises(EvenerError) as caught, ddp:
        train()
    rank.send((type(caught.value).__name__, str(caught.value)))


def test_errors_name_ranks_of_the_team_while_one_is_parked() -> None:
    with RankTeam(meet_at_odds, 3) as team:
        for rank in (0, 2):
            kind, text = team.receive(rank)
            assert kind == "CollectiveMismatchError"
            # With or without a share of the window.
            assert re.search("rank 0 is (closing a window|waiting in the loader)", text)
            assert "rank 2 is averaging a value" in text
            assert "rank 1" not in text


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────


def stop_when_told(rank: Rank, folder: str) -> tuple[list[float], bool]:
    """Trains until a signal comes, or is heard of; returns the weights, and whether it did."""
    with StopSignals() as signals:
        model, ddp = set_up(stop_when=lambda: signals.requested is not None)
        # It is not called back before the data ends, which lasts longer than the test may take.
        ddp.assembly.engine.policy.windows_apart = lambda *_: 10**9  # type: ignore[method-assign]
        rank.send(None)
        with ddp:
            sent = False
            for x in ddp.loader(torch.ones(1_000_000, 3), batch_size=8).epoch(0):
                ddp.backward(model(x).mean())
                ddp.step()
                if is_anyone_parked(ddp):
                    if not sent:
                        rank.send("parked")
                    sent = True
                    time.sleep(0.005)
            ddp.save(folder)
            return model.weight.flatten().tolist(), ddp.stopping


def test_a_parked_rank_that_is_told_to_stop_stops_the_team(tmp_path: Path) -> None:
    with RankTeam(stop_when_told, 3, str(tmp_path / "checkpoint")) as team:
        for rank in range(3):
            team.receive(rank)
        for rank in (0, 2):
            assert team.receive(rank) == "parked"
        team.send_signal(PARKED, signal.SIGTERM)
        outcomes = team.wait()
    assert all(o.returned for o in outcomes), "\n".join(o.story() for o in outcomes)
    weights, stopping = zip(*(outcome.value for outcome in outcomes), strict=True)
    assert stopping == (True, True, True)
    assert weights[0] == weights[1] == weights[2]
    assert (tmp_path / "checkpoint").is_dir()
