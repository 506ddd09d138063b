"""Elastic teams in SYNC: ranks die at every point, and others join; on threads."""

import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from evener import Ddp, DdpConfig, WindowResult
from evener.checkpoint import open_checkpoint
from evener.comm.base import Communicator
from evener.errors import ConfigError, CoordinatorLostError, ReplicasDifferError
from evener.loop.checkpointing import Checkpointer
from evener.loop.epochs import EpochLoop
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import (
    BATCH,
    DATA,
    EPOCHS,
    MICRO_BATCH,
    Trained,
    begin,
    check,
    run,
    train,
)
from helpers.sinks import Kept

# Rounds of rows in the order of a run: 0, 1 calibrate; 2, 3 plan; 4 to 7 close the windows of an
# epoch; 8 ends it; 9 averages a value; 10, 11 plan the next epoch; 12 to 15 close its windows.
ROUNDS = (1, 6, 8)


@pytest.mark.parametrize("skip", ROUNDS)
def test_a_rank_dies_in_a_round_of_which_only_one_of_the_others_hears(skip: int) -> None:
    team, trained = run(3, [Kill("w1", "a round", skip=skip, when="inside", told=["w2"])])
    check(team, trained)
    assert [len(formation.members) for formation in team.formations] == [3, 2]


def test_a_rank_that_has_received_other_bits_contributes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broadcast = Communicator.broadcast

    def damage(
        comm: Communicator, tensor: Tensor, source: int, *, what: str, **options: Any
    ) -> None:
        broadcast(comm, tensor, source, what=what, **options)
        if threading.current_thread().name == "j" and what == "parameters of the team's state":
            tensor.view(torch.uint8).add_(1)

    monkeypatch.setattr(Communicator, "broadcast", damage)
    with pytest.raises(ReplicasDifferError, match="rank 2 does not hold the parameters"):
        run(2, joins_after=1)


@pytest.mark.parametrize("leaver", ["w0"])
def test_a_rank_that_is_told_to_leave_finishes_its_window_and_nothing_is_done_again(
    leaver: str,
) -> None:
    kept = Kept()

    def tell(membership: ThreadMembership, result: WindowResult) -> None:
        membership.is_told_to_leave |= membership.member == leaver and result.window == 1

    team = ElasticThreads(3)

    def body(membership: ThreadMembership) -> Trained:
        sinks = [lambda: kept]
        return train(membership, lambda _, result: tell(membership, result), sinks=sinks)

    team.run(body)
    assert isinstance(team.fate(leaver).error, KeyboardInterrupt)
    trained = {fate.member: fate.value for fate in team.fates if fate.error is None}
    check(team, trained)
    assert len(trained) == 2
    # All had committed the leaver's last window: nobody had anything in hand.
    base = team.formations[1].base
    assert team.formations[1].receivers == ()
    assert [one.committed[base - 1].ranks[int(leaver[1])].samples > 0 for one in trained.values()]
    assert [(e["type"], e.get("rank")) for e in changes(kept)] == [
        ("worker_left", int(leaver[1])),
        ("reformed", None),
    ]


def train_epochs_of_one_window(ddp: Ddp) -> None:
    model, loader = ddp.assembly.model, ddp.loader(DATA, batch_size=len(DATA))
    for epoch in ddp.epochs(8):
        for x, y in loader.epoch(epoch):
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_ranks_join_and_leave_where_each_epoch_is_one_window(policy: str) -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> list[Tensor]:
        def commit(result: WindowResult) -> None:
            if (membership.member, result.window) == ("w0", 1):
                team.add("j")
            membership.is_told_to_leave |= membership.member == "w1" and result.window == 3

        with begin(membership, seed=membership.number + 1, policy=policy) as ddp:
            ddp.on_commit(commit)
            train_epochs_of_one_window(ddp)
            state = ddp.assembly.model.state_dict()
            return [tensor.detach().clone() for tensor in state.values()]

    trained = team.run_to_end(body)
    assert [(one.base, one.members) for one in team.formations] == [
        (0, ("w0", "w1")),
        (2, ("w0", "w1", "j")),
        (5, ("w0", "j")),
    ]
    assert sorted(trained) == ["j", "w0"]
    assert all(map(torch.equal, trained["w0"], trained["j"]))


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_team_whose_last_rank_is_told_to_leave_stops_and_forms_no_more(policy: str) -> None:
    team = ElasticThreads(2)
    last = {"w1": 3, "w0": 4}  # the others are to go on without w1 when w0 hears it, too

    def body(membership: ThreadMembership) -> int:
        def commit(result: WindowResult) -> None:
            membership.is_told_to_leave |= result.window == last[membership.member]

        with begin(membership, seed=1, policy=policy) as ddp:
            ddp.on_commit(commit)
            train_epochs_of_one_window(ddp)
            return ddp.progress.window

    assert team.run_to_end(body) == {"w0": 5, "w1": 5}
    assert [one.base for one in team.formations] == [0]


@pytest.mark.parametrize(("member", "window"), [("w2", 3), ("w0", 2)])
def test_a_rank_that_was_left_out_joins_again_in_its_loop(member: str, window: int) -> None:
    def stop(membership: ThreadMembership, result: WindowResult) -> None:
        team = membership.team
        if membership.member == member and result.window == window and len(team.formations) == 1:
            team.leave_out(member)
        while len(team.formations) == 2 and membership.member == "w1" and not team.joiners:
            time.sleep(0.001)  # or the others would do the run to its end

    team, trained = run(3, at_commit=stop)
    # It misses windows that the others have committed meanwhile.
    again, others = trained[member], trained["w1"]
    missed = {r.window for r in others.committed} - {r.window for r in again.committed}
    after = [r for r in again.committed if r.window > max(missed, default=-1)]
    trained[member] = again._replace(committed=after)
    check(team, trained, replays=member == "w2")
    assert [len(formation.members) for formation in team.formations] == [3, 2, 3]
    assert team.formations[2].receivers == (member,)


def test_a_main_rank_that_was_left_out_writes_no_checkpoints_any_more(tmp_path: Path) -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> tuple[Path | None, bool]:
        def commit(result: WindowResult) -> None:
            if membership.member == "w0" and result.window == 2 and len(team.formations) == 1:
                team.leave_out("w0")
            while membership.member == "w1" and len(team.formations) == 2 and not team.joiners:
                time.sleep(0.001)  # or it would do the run to its end

        with begin(membership, seed=1) as ddp:
            ddp.on_commit(commit)
            small = Small(ddp, tmp_path)
            assert small.checkpointer is not None
            with closing(small.checkpointer):
                for _ in small.epochs():
                    pass
                return small.finish(), ddp.is_main_process

    fates = {fate.member: fate.error or fate.value for fate in team.run(body)}
    last = tmp_path / "step-8"
    assert fates == {"w0": (last, False), "w1": (last, True)}, "it is only told the path"


class Small(EpochLoop):
    """A job over ``DATA`` that saves checkpoints."""

    def __init__(self, ddp: Ddp, folder: Path) -> None:
        super().__init__(ddp, num_epochs=EPOCHS, max_steps=None, checkpoint_every=None)
        self.loader = ddp.loader(DATA, batch_size=BATCH, seed=3, micro_batch_size=MICRO_BATCH)
        self.checkpointer = Checkpointer(ddp, folder, keep_last=1)

    def train_micro_batch(self, batch: Any) -> None:
        x, y = batch
        self.ddp.backward(((self.ddp.assembly.model(x) - y) ** 2).mean())


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_main_rank_saves_what_it_holds_where_the_coordinator_is_lost(
    num_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several hosts the others may go on with the coordinator: they keep their folder."""
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)

    def train(membership: ThreadMembership) -> None:
        with begin(membership, seed=1) as ddp:
            small = Small(ddp, tmp_path / "saved")
            assert small.checkpointer is not None
            with closing(small.checkpointer):
                [*small.epochs()]

    def body(membership: ThreadMembership) -> list[str]:
        commits = iter(range(5))

        def await_lease() -> None:
            if next(commits, None) is None:
                raise CoordinatorLostError("it does not answer")

        membership.await_lease = await_lease  # type: ignore[method-assign]
        with pytest.raises(CoordinatorLostError) as caught:
            train(membership)
        return [note for note in getattr(caught.value, "__notes__", []) if "saved in" in note]

    fates = ElasticThreads(num_hosts).run(body)
    folder = tmp_path / ("saved" if num_hosts == 1 else "saved-of-generation-1")
    # Five windows are committed, and the sixth is applied.
    assert fates[0].value == [
        f"evener: what the team has trained so far is saved in {folder / 'step-6'}"
    ]
    assert [fate.value for fate in fates[1:]] == [[]] * (num_hosts - 1)
    assert open_checkpoint(folder / "step-6").step == 6


def test_a_rank_leaves_a_loop_without_a_loader() -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> tuple[int, int]:
        with begin(membership, seed=1) as ddp:
            results = 0
            while ddp.window < 6:
                membership.is_told_to_leave |= membership.member == "w0" and ddp.window == 2
                x, y = DATA[ddp.window]
                ddp.backward(((ddp.assembly.model(torch.stack([x, x])) - y) ** 2).mean())
                results += ddp.step() is not None
            return results, ddp.window

    team.run(body)
    assert isinstance(team.fate("w0").error, KeyboardInterrupt)
    assert team.fate("w1").value == (6, 6), "no window is done again"


def changes(kept: Kept) -> list[dict[str, Any]]:
    kinds = ("worker_lost", "worker_left", "reformed", "healed", "worker_joined")
    return [event for event in kept.events if event["type"] in kinds]


def test_a_rank_that_cannot_be_put_together_leaves_the_team() -> None:
    memberships = []

    def body(membership: ThreadMembership) -> None:
        memberships.append(membership)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        config = DdpConfig(quiet=True, speed_hint=(1.0,) * 7)  # of 5 numbers
        Ddp.setup(model, optimizer, devices="cpu", elastic=membership, config=config)

    (fate,) = ElasticThreads(1).run(body)
    assert isinstance(fate.error, ConfigError)
    assert memberships[0].is_closed


def test_events_tell_who_was_lost_and_who_joined() -> None:
    kept = Kept()
    kills = [Kill("w1", "gradients of window 6")]
    run(2, kills, joins_after=1, sinks=[lambda: kept])
    events = changes(kept)
    told = [(event["type"], event.get("rank"), event.get("members")) for event in events]
    assert told == [
        ("reformed", None, ["w0", "w1", "j"]),
        ("healed", 2, None),
        ("worker_joined", 2, None),
        ("worker_lost", 1, None),
        ("reformed", None, ["w0", "j"]),
    ]
    assert all(
        min(event[f"{phase}_s"] for phase in ("detect", "reform", "heal")) >= 0
        for event in events
        if event["type"] == "reformed"
    )
    assert all(event["num_bytes"] > 0 for event in events if event["type"] == "healed")
