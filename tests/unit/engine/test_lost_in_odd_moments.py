"""Ranks that are lost, frozen layers and parked ranks, where a loop does something else."""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Ddp
from evener.comm import background
from evener.comm.base import Communicator
from evener.errors import CollectiveMismatchError, EvenerError
from evener.planning.shares import apportion
from helpers.elastic import Died, ElasticThreads, ThreadMembership
from helpers.elastic_runs import DATA, begin
from helpers.limits import PATIENCE_S
from helpers.models import seeded
from helpers.teams import ScriptedPolicy, run_team, setup


def test_a_rank_is_lost_in_a_mean_between_backward_and_step() -> None:
    team = ElasticThreads(3)
    lost_at: list[int] = []

    def body(membership: ThreadMembership) -> int:
        def prepare(ddp: Ddp) -> None:
            """Each member has a share, whatever speeds are measured."""
            engine: Any = ddp.assembly.engine

            def split(window: int, size: int) -> tuple[int, ...]:
                members = engine.team.members
                return apportion(size, [float(n in members) for n in range(membership.most)])

            engine.lookahead.stale_policy = ScriptedPolicy(membership.most, split)

        with begin(membership, seed=1, prepare=prepare) as ddp:
            model = ddp.assembly.model
            # One micro-batch a window, so that all ranks ask for equally many means.
            for x, y in ddp.loader(DATA, batch_size=8, micro_batch_size=8, seed=3).epoch(0):
                ddp.backward(((model(x) - y) ** 2).mean())
                if not lost_at and membership.member == "w1" and ddp.window >= 1:
                    lost_at.append(ddp.window)
                    membership.team.die("w1")
                ddp.weighted_mean(1.0)
                ddp.step()
            return ddp.progress.samples

    fates = {fate.member: fate.error or fate.value for fate in team.run(body)}
    assert isinstance(fates.pop("w1"), Died)
    assert fates == {"w0": 32, "w2": 32}, "each sample once, by those that are left"


def frozen_bias(comm: Communicator, policy: str) -> tuple[Any, nn.Module, nn.Parameter]:
    model = seeded(lambda: nn.Linear(1, 1), 0, torch.float32)
    bias = model.get_parameter("bias").requires_grad_(False)
    short = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 1}  # whatever the ranks' speeds
    options = short if policy != "sync" else {}
    ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, **options)
    return ddp, model, bias


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_layer_that_one_rank_alone_unfreezes_is_named(policy: str) -> None:
    def body(comm: Communicator) -> EvenerError | None:
        ddp, model, bias = frozen_bias(comm, policy)
        data = TensorDataset(torch.arange(80.0).unsqueeze(1) / 80)
        try:
            with ddp:
                ddp.on_commit(lambda r: bias.requires_grad_(comm.rank == 1 and r.window >= 1))
                for (x,) in ddp.loader(data, batch_size=4).epoch(0):
                    ddp.backward(model(x).square().mean())
                    ddp.step()
        except EvenerError as error:
            return error
        return None

    for error in run_team(2, body):
        assert error is not None
        assert not isinstance(error, CollectiveMismatchError)
        assert "1 on rank 0, 2 on rank 1" in str(error)


def test_a_stale_exchange_hands_its_result_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LIMIT_S", 0.0)
    exchanger: background.BackgroundJob[str] = background.BackgroundJob("flight")
    hangs, goes_on = threading.Event(), threading.Event()

    def stale() -> str:
        assert hangs.wait(PATIENCE_S)
        return "stale"

    exchanger.start(stale)
    (thread,) = [one for one in threading.enumerate() if one.name == "flight"]
    exchanger.close()  # gives up
    exchanger.start(lambda: "new" if goes_on.wait(PATIENCE_S) else "late")
    hangs.set()
    thread.join(PATIENCE_S)
    is_ready = exchanger.ready
    goes_on.set()
    assert not is_ready, "the new exchange is under way"
    assert exchanger.wait() == "new"
