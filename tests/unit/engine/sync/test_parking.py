"""A rank that is parked in mid-epoch: what is said of it, and when it is tried again."""

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine import lookahead as module
from evener.planning.plans import WindowPlan
from evener.planning.policies import Forecast, Parking
from helpers.models import seeded
from helpers.teams import ScriptedPolicy, run_team, setup

AWAY = 2
SAMPLES = 240
DATA = TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1) / SAMPLES)


class ParksOnce(ScriptedPolicy):
    """Equal shares of those who are present; rank 2 is parked in the third window."""

    def __init__(self) -> None:
        super().__init__(3, (1, 1, 1))
        self.away: frozenset[int] = frozenset()
        self.sizes: list[int | None] = []
        self.asked = 0

    def set_parked(self, ranks: frozenset[int]) -> None:
        self.away = ranks

    def set_micro_batch_sizes(self, sizes: Any) -> None:
        self.sizes = list(sizes)

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        self.asked += 1
        before, after = Forecast(1.0, 0.5, 0.1), Forecast(0.5, 0.0, 0.1)
        return Parking({AWAY: 1.0}, before, after) if self.asked == 3 else None

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        return 10

    def plan(self, *args: Any, **options: Any) -> WindowPlan:
        self.shares = [float(rank not in self.away) for rank in range(3)]
        return super().plan(*args, **options)


def begin(comm: Communicator, *, frozen: bool = False) -> tuple[Ddp, nn.Module, ParksOnce]:
    model = seeded(lambda: nn.Linear(1, 1), 0, torch.float32)
    model.get_parameter("bias").requires_grad_(not frozen)
    ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.01))
    policy = ParksOnce()
    ddp.assembly.engine.lookahead.stale_policy = policy
    return ddp, model, policy


def test_a_parked_rank_is_named_and_tried_again_in_mid_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NOTEWORTHY_S", 0.0)

    def body(comm: Communicator) -> tuple[list[int], list[int], list[str], list[float]]:
        ddp, model, _ = begin(comm)
        told: list[str] = []
        seen: list[int] = []
        windows: list[int] = []
        ddp.assembly.engine.options.guards.notice = told.append  # type: ignore[method-assign]
        with ddp:
            for (x,) in ddp.loader(DATA, batch_size=6).epoch(0):
                seen += (x[:, 0] * SAMPLES).round().int().tolist()
                windows.append(ddp.window)
                ddp.backward(model(x).square().mean())
                ddp.step()
        return seen, sorted(set(windows)), told, [p.item() for p in model.parameters()]

    samples, windows, told, weights = zip(*run_team(3, body), strict=True)
    assert Counter(chain(*samples)) == dict.fromkeys(range(SAMPLES), 1)
    assert windows[0] == windows[1] == list(range(40))
    # Plans are made two windows ahead.
    assert windows[AWAY] == [0, 1, 2, 3, *range(16, 40)]
    assert weights[0] == weights[1] == weights[AWAY]
    assert told[1:] == ([], []), "the rank that plans says it"
    assert told[0] == [
        "rank 2 is parked: rank 2 alone does 1 samples/s; the team is predicted to do 6 samples/s "
        "with it (a window takes 1e+03 ms, of which the exchange 500 ms) and 12 without. The team "
        "tries again with it at window 14"
    ]


def test_the_rank_that_plans_is_parked_while_another_one_is_already() -> None:
    class ParksTwice(ParksOnce):
        """Rank 2 is parked first, then rank 0, which has planned that."""

        def decide_parking(self, batch_size: int, main: int) -> Parking | None:
            self.asked += 1
            wanted = {2: {2: 1.0}, 6: {0: 1.0}}.get(self.asked) if main == 0 else None
            return wanted and Parking(wanted, Forecast(1.0, 0.5, 0.1), Forecast(0.5, 0.0, 0.1))

    def body(comm: Communicator) -> tuple[list[int], bool, list[float]]:
        ddp, model, _ = begin(comm)
        ddp.assembly.engine.lookahead.stale_policy = ParksTwice()
        seen: list[int] = []
        with ddp:
            for (x,) in ddp.loader(DATA, batch_size=6).epoch(0):
                seen += (x[:, 0] * SAMPLES).round().int().tolist()
                ddp.backward(model(x).square().mean())
                ddp.step()
            return seen, ddp.is_main_process, [p.item() for p in model.parameters()]

    samples, leads, weights = zip(*run_team(3, body), strict=True)
    assert Counter(chain(*samples)) == dict.fromkeys(range(SAMPLES), 1)
    assert len(samples[1]) > max(len(samples[0]), len(samples[2]))
    assert leads == (False, True, False)
    assert weights[0] == weights[1] == weights[2]


def test_a_rank_that_is_called_back_trains_what_others_have_thawed() -> None:
    def body(comm: Communicator) -> tuple[list[float], bool]:
        ddp, model, _ = begin(comm, frozen=True)
        bias = model.get_parameter("bias")
        before = bias.item()
        with ddp:
            ddp.on_commit(lambda result: bias.requires_grad_(result.window >= 5))
            for (x,) in ddp.loader(DATA, batch_size=6).epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
        assert bias.requires_grad
        return [p.item() for p in model.parameters()], bias.item() == before

    first, *others = run_team(3, body)
    assert others == [first] * 2
    assert first[1] is False
