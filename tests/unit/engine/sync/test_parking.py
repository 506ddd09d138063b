"""A rank that is parked in mid-epoch: what is said of it, and when it is tried again."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine import lookahead, sync
from evener.planning.pieces import ExchangeCost, Pieces
from evener.planning.policies import Forecast, Parking
from helpers.loops import Numbered, flatten, linear, train
from helpers.teams import Parks, run_team, setup

AWAY, SAMPLES = 2, 240
EACH_ONCE = dict.fromkeys(range(SAMPLES), 1)


def begin(comm: Communicator) -> Ddp:
    ddp = setup(comm, *linear())
    ddp.assembly.engine.lookahead.stale_policy = Parks(ddp, [AWAY], apart=10)
    return ddp


def test_a_parked_rank_is_named_and_tried_again_in_mid_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookahead, "NOTEWORTHY_S", 0.0)

    def body(comm: Communicator) -> tuple[list[int], list[int], list[str], list[float]]:
        told: list[str] = []
        windows: list[int] = []
        with begin(comm) as ddp:
            ddp.assembly.engine.options.guards.notice = told.append  # type: ignore[method-assign]
            ddp.on_commit(lambda result: windows.append(result.window))
            seen = train(ddp, ddp.loader(Numbered(SAMPLES), batch_size=6))
        return seen, windows, told, flatten(ddp.assembly.model).tolist()

    samples, windows, told, weights = zip(*run_team(3, body), strict=True)
    assert Counter(chain(*samples)) == EACH_ONCE
    assert windows[0] == windows[1] == [*range(40)]
    # Plans are made two windows ahead.
    assert windows[AWAY] == [0, 1, *range(14, 40)]
    assert weights[0] == weights[1] == weights[AWAY]
    assert told[1:] == ([], []), "the rank that plans says it"
    assert told[0] == [
        "rank 2 is parked: rank 2 alone does 1 samples/s; the team is predicted to do 6 samples/s "
        "with it (a window takes 1e+03 ms, of which the exchange 500 ms) and 12 without. The team "
        "tries again with it at window 12"
    ]


def test_the_rank_that_plans_is_parked_while_another_one_is_already() -> None:
    class ParksTwice(Parks):
        """Rank 2 is parked first, then rank 0, which has planned that."""

        asked = 0

        def decide_parking(self, batch_size: int, main: int) -> Parking | None:
            self.asked += 1
            wanted = {2: {2: 1.0}, 6: {0: 1.0}}.get(self.asked) if main == 0 else None
            return wanted and Parking(wanted, Forecast(1.0, 0.5, 0.1), Forecast(0.5, 0.0, 0.1))

    def body(comm: Communicator) -> tuple[list[int], bool, list[float], list[str]]:
        told: list[str] = []
        with begin(comm) as ddp:
            ddp.assembly.engine.options.guards.notice = told.append  # type: ignore[method-assign]
            ddp.assembly.engine.lookahead.stale_policy = ParksTwice(ddp, [], apart=10)
            seen = train(ddp, ddp.loader(Numbered(SAMPLES), batch_size=6))
            return seen, ddp.is_main_process, flatten(ddp.assembly.model).tolist(), told

    samples, leads, weights, told = zip(*run_team(3, body), strict=True)
    assert Counter(chain(*samples)) == EACH_ONCE
    assert len(samples[1]) > max(len(samples[0]), len(samples[2]))
    assert leads == (False, True, False)
    assert told[1:] == ([], [])
    # Both are told at once, as rank 0 plans no more when this has become noteworthy.
    assert told[0] == [
        "rank 2 and rank 0 are parked: rank 2 alone does 1 samples/s, rank 0 alone does 1 "
        "samples/s; the team is predicted to do 6 samples/s with them (a window takes 1e+03 ms, of "
        "which the exchange 500 ms) and 12 without. Rank 1 is the main process from now on. Code "
        "that logs or saves where ddp.rank == 0 misses the windows in which that rank is parked: "
        "use ddp.is_main_process there, and read it each time"
    ]
    assert weights[0] == weights[1] == weights[2]


def test_a_rank_that_is_called_back_trains_what_others_have_thawed() -> None:
    def body(comm: Communicator) -> tuple[list[float], bool]:
        model, optimizer = linear()
        bias: Any = model.get_parameter("bias").requires_grad_(False)
        before = bias.item()
        with setup(comm, model, optimizer) as ddp:
            ddp.assembly.engine.lookahead.stale_policy = Parks(ddp, [AWAY], apart=10)
            ddp.on_commit(lambda result: bias.requires_grad_(result.window >= 5))
            train(ddp, ddp.loader(Numbered(SAMPLES), batch_size=6))
        return flatten(model).tolist(), bias.item() == before

    first, *others = run_team(3, body)
    assert others == [first] * 2
    assert first[1] is False


def test_ranks_that_are_present_overlap_while_another_one_is_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backward_s: list[float] = []

    def choose(num_bytes: int, of_all_s: float, cost: ExchangeCost) -> Pieces:
        backward_s.append(of_all_s)
        return Pieces(1, 0.0, 0.0)

    monkeypatch.setattr(sync, "choose_pieces", choose)

    def body(comm: Communicator) -> list[bool]:
        with setup(comm, *linear(), overlap="on") as ddp:
            engine = ddp.assembly.engine
            engine.lookahead.stale_policy = Parks(ddp, [AWAY], apart=10)
            overlaps = []
            for _, x in ddp.loader(Numbered(SAMPLES), batch_size=6):
                ddp.backward(ddp.assembly.model(x).square().mean())
                if AWAY in engine.team.parked:
                    overlaps.append(engine._overlap.has_begun)
                ddp.step()
        return overlaps

    zero, one, _ = run_team(3, body)
    assert zero == one
    assert zero.count(True) >= 8, "all but the first window without the parked rank"
    assert min(backward_s) > 0.0, "a parked rank has no backward to hide anything behind"
