"""Ranks that are lost, frozen layers and parked ranks, where a loop does something else."""

import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from evener import Ddp, WindowResult
from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam
from evener.engine import background
from evener.errors import CollectiveMismatchError, EvenerError
from evener.loop.checkpointing import Checkpointer
from evener.loop.epochs import EpochLoop
from evener.planning.policies import Forecast, Parking
from helpers.elastic import Died, ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import DATA, begin, train
from helpers.limits import PATIENCE_S
from helpers.models import seeded
from helpers.teams import ScriptedPolicy, run_team, setup


def test_a_rank_is_lost_in_a_mean_between_backward_and_step() -> None:
    team = ElasticThreads(3)
    lost_at: list[int] = []

    def body(membership: ThreadMembership) -> int:
        with begin(membership, seed=1) as ddp:
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
    options = {"anchor": 2, "max_anchor": 2} if policy != "sync" else {}
    ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.01), policy=policy, **options)
    return ddp, model, bias


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
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


def test_handing_over_may_take_longer_than_an_exchange() -> None:
    """The main rank is parked, and its checkpoint is on a slow disk."""
    team = ThreadTeam(2, timeout_s=1.0)

    class ParksMain(ScriptedPolicy):
        def __init__(self) -> None:
            super().__init__(2, (1, 1))
            self.asked = 0

        def set_parked(self, ranks: frozenset[int]) -> None:
            self.shares = [float(rank not in ranks) for rank in range(2)]

        def decide_parking(self, batch_size: int, main: int) -> Parking | None:
            self.asked += 1
            now, then = Forecast(1.0, 0.5, 0.1), Forecast(0.5, 0.0, 0.1)
            return Parking({0: 1.0}, now, then) if self.asked == 3 and main == 0 else None

        def windows_apart(self, batch_size: int, change_s: float) -> int:
            return 100

    def body(comm: Communicator) -> int:
        ddp, model, _ = frozen_bias(comm, "sync")
        ddp.assembly.engine.lookahead.stale_policy = ParksMain()
        ddp.assembly.team.call_on_handover(lambda: time.sleep(3.0))
        data = TensorDataset(torch.arange(80.0).unsqueeze(1) / 80)
        with ddp:
            for (x,) in ddp.loader(data, batch_size=4).epoch(0):
                ddp.backward(model(x).square().mean())
                ddp.step()
        return ddp.progress.samples

    outcomes: list[Any] = [None, None]

    def run(rank: int) -> None:
        comm = team.communicator(rank)
        try:
            outcomes[rank] = body(comm)
        except EvenerError as error:
            outcomes[rank] = error
        finally:
            comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outcomes == [80, 80]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_replacement_on_another_machine_finds_its_own_memory_limit(
    is_elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = socket.gethostname()
    hosts = {"j": "elsewhere"} if is_elsewhere else {}
    monkeypatch.setattr(
        socket, "gethostname", lambda: hosts.get(threading.current_thread().name, host)
    )
    known: dict[str, list[int]] = {}

    def at_commit(ddp: Any, result: WindowResult) -> None:
        me = threading.current_thread().name
        if me == "w1":
            ddp.assembly.engine.run.limits.shrink(4)
        known[me] = [*ddp.assembly.engine.run.limits.known]

    team = ElasticThreads(3, kills=[Kill("w1", "gradients of window 2")])

    def body(membership: ThreadMembership) -> Any:
        def commit(ddp: Any, result: WindowResult) -> None:
            at_commit(ddp, result)
            if result.window == 3 and membership.member == "w0":
                team.add("j")

        return train(membership, commit)

    team.run_to_end(body)
    assert team.formations[-1].numbers == (0, 2, 1)
    assert known["w0"][1] == (0 if is_elsewhere else 2)


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


class Small(EpochLoop):
    """A job over ``DATA`` that saves after every window."""

    def __init__(self, ddp: Ddp, folder: Path) -> None:
        super().__init__(ddp, num_epochs=2, max_steps=None, checkpoint_every=1)
        self.loader = ddp.loader(DATA, batch_size=8, seed=3, micro_batch_size=4)
        self.checkpointer = Checkpointer(ddp, folder, keep_last=1)

    def train_micro_batch(self, batch: Any) -> None:
        x, y = batch
        self.ddp.backward(((self.ddp.assembly.model(x) - y) ** 2).mean())


def test_a_rank_that_is_stopped_between_lease_and_callbacks_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = ElasticThreads(2)
    saved: list[tuple[str, int, int]] = []
    write = Checkpointer._begin

    def note(self: Checkpointer, cursor_state: Any) -> None:
        saved.append((threading.current_thread().name, self._ddp.window, len(team.formations)))
        write(self, cursor_state)

    monkeypatch.setattr(Checkpointer, "_begin", note)

    def body(membership: ThreadMembership) -> int:
        def commit(result: WindowResult) -> None:
            if membership.member == "w0" and result.window == 2 and len(team.formations) == 1:
                team.leave_out("w0")  # the lease has been looked at, and this rank is the main one
            while membership.member == "w1" and len(team.formations) == 2 and not team.joiners:
                time.sleep(0.001)  # or it would do the run to its end

        with begin(membership, seed=1) as ddp:
            ddp.on_commit(commit)
            small = Small(ddp, tmp_path)
            assert small.checkpointer is not None
            with closing(small.checkpointer):
                for _ in small.epochs():
                    pass
                small.finish()
            return ddp.window

    assert [fate.error or fate.value for fate in team.run(body)] == [8, 8]
    assert not [one for one in saved if one[0] == "w0" and one[2] > 1], saved
