"""Elastic teams: ranks are lost, join, leave and are left out, and the others continue.

``tests/unit/protocol/test_lost.py`` has a rank lost at every point of a window, and
``tests/processes/test_elastic.py`` kills processes there.
"""

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
from helpers.clocks import RankClocks
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import DATA, Run, begin, loss_of, state_of, train_epochs
from helpers.sinks import Kept

# Rounds of rows in the order of a run in SYNC: 0, 1 calibrate; 2, 3 plan; 4 to 7 close the windows
# of an epoch; 8 ends it. Local steps: 0 plans; then two for each window.
CALIBRATES, CLOSES_WINDOW_2, ENDS_EPOCH = 1, 6, 8
PLANS_AFTER_WINDOW_2 = 6


def heard_by(told: str, what: str, skip: int = 0) -> Kill:
    """w1 dies in an exchange whose result one of the others has."""
    return Kill("w1", what, skip=skip, when="inside", told=[told])


@pytest.mark.parametrize(
    ("policy", "kill", "joins_after"),
    [
        ("sync", heard_by("w2", "a round", CALIBRATES), None),
        ("sync", heard_by("w2", "a round", CLOSES_WINDOW_2), None),
        ("sync", heard_by("w2", "a round", ENDS_EPOCH), None),
        ("sync", heard_by("w2", "answers"), None),
        ("sync", heard_by("w0", "gradients of window 1"), None),
        ("sync", Kill("w0", "of the team's state"), 0),
        ("sync", Kill("j", "of the team's state", when="after"), 0),
        *(
            (policy, kill, joins_after)
            for policy in ("cadence", "async")
            for kill, joins_after in (
                (heard_by("w0", "a round", PLANS_AFTER_WINDOW_2), None),
                (heard_by("w2", "a round", PLANS_AFTER_WINDOW_2), None),
                (heard_by("w0", "buffers of window 1"), None),
                (Kill("w1", "of the team's state"), 0),
            )
        ),
    ],
)
def test_a_rank_is_lost(
    policy: str, kill: Kill, joins_after: int | None, rank_clocks: RankClocks
) -> None:
    if policy == "async":
        rank_clocks.land_after(1)
    clocks = None if policy == "sync" else rank_clocks
    run = Run(3, [kill], policy=policy, clocks=clocks, joins_after=joins_after)
    joiner = set() if joins_after is None else {"j"}
    assert set(run.trained) == {"w0", "w1", "w2", *joiner} - {kill.member}
    if kill.skip == PLANS_AFTER_WINDOW_2 and policy != "sync":
        # The rank on which the window has not landed receives the consensus.
        behind = {"w0": "w2", "w2": "w0"}[kill.told[0]]
        assert run.team.formations[-1].receivers == (behind,)


@pytest.mark.parametrize("moment", ["before backward", "before step"])
@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_is_lost_while_others_ask_for_a_value_in_mid_batch(
    policy: str, moment: str, rank_clocks: RankClocks
) -> None:
    team = ElasticThreads(3)
    windows: dict[int, WindowResult] = {}

    def body(membership: ThreadMembership) -> tuple[int, Any]:
        asked = False
        rank_clocks.start()  # all are as fast, so each has a share of every window

        def ask(ddp: Ddp, now: str) -> None:
            nonlocal asked
            if ddp.window >= 2 and not asked and moment == now:
                asked = True
                if membership.member == "w1":
                    team.die("w1")
                ddp.weighted_mean(1.0)

        with begin(membership, policy=policy) as ddp:
            ddp.on_commit(lambda result: windows.setdefault(result.window, result))
            for x, y in ddp.loader(DATA * 2, batch_size=4, seed=3).epoch(0):
                rank_clocks.spend(0.01 * len(x))
                loss = loss_of(ddp, x, y)
                ask(ddp, "before backward")
                ddp.backward(loss)
                ask(ddp, "before step")
                ddp.step()
            return ddp.progress.samples, ddp.assembly.model

    found = team.run_to_end(body)
    assert {member: samples for member, (samples, _) in found.items()} == {"w0": 96, "w2": 96}
    if policy != "sync":
        found["w0"][1].check([windows[number] for number in sorted(windows)])


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_a_rank_dies_when_another_one_has_left_its_loop(policy: str) -> None:
    """The others are led out of theirs, and all are at the last average."""
    team = ElasticThreads(3, kills=[Kill("w1", "parameters of window 2")])

    def body(membership: ThreadMembership) -> float:
        with begin(membership, policy=policy) as ddp:
            for x, y in ddp.loader(DATA, batch_size=2, seed=3).epoch(0):
                ddp.backward(loss_of(ddp, x, y))
                ddp.step()
                if ddp.window == 2 and ddp.rank == 0:
                    break
            ddp.weighted_mean(1.0)
            return ddp.assembly.model.get_parameter("weight").item()

    found = team.run_to_end(body)
    assert found["w0"] == found["w2"] != 0.0
    assert len(team.formations) == 2


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
        Run(2, joins_after=1)


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_that_is_told_to_leave_finishes_its_window(
    policy: str, rank_clocks: RankClocks
) -> None:
    def tell(_: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        membership.is_told_to_leave |= membership.member == "w0" and result.window == 1

    # With speeds of their own, so that the leaver has a share of each window.
    run = Run(3, policy=policy, at_commit=tell, clocks=rank_clocks)
    assert isinstance(run.team.fate("w0").error, KeyboardInterrupt)
    assert [len(members) for members in run.members] == [3, 2]
    assert run.changes == [("worker_left", 0), ("reformed", None)]
    handed_over = [line.endswith(". Rank 1 is the main process from now on") for line in run.told]
    assert handed_over == [True, True], "each rank that stays; the main process prints its line"
    if policy == "sync":  # all had committed the leaver's last window: nothing is done again
        assert run.team.formations[1].receivers == ()
        left_at, done = run.team.formations[1].base, run.samples(0)
        assert done[left_at - 1] > 0
        assert not any(done[left_at:])


def test_events_tell_who_was_lost_and_who_joined() -> None:
    run = Run(2, [Kill("w1", "gradients of window 6")], joins_after=1)
    assert run.members == [("w0", "w1"), ("w0", "w1", "j"), ("w0", "j")]
    assert run.changes == [
        ("reformed", None),
        ("recovered", 2),
        ("worker_joined", 2),
        ("worker_lost", 1),
        ("reformed", None),
    ]
    for event in run.events:
        if event["type"] == "reformed":
            assert min(event[f"{phase}_s"] for phase in ("detect", "reform", "recover")) >= 0
            assert event["backend"] != "none"
        assert event["type"] != "recovered" or event["num_bytes"] > 0
    *_, after_loss = (event for event in run.events if event["type"] == "reformed")
    assert after_loss["detect_s"] == run.team.deadlines.lease_s
    assert not any("main process" in line for line in run.told), "rank 0 has stayed it"


def test_a_main_process_that_has_just_joined_continues_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second start would make all windows before it void."""
    monkeypatch.setattr(Kept, "continues", True)
    # The joiner's first window is 4.
    run = Run(1, [Kill("w0", "gradients of window 4")], joins_after=1)
    assert run.members == [("w0",), ("w0", "j"), ("j",)]
    assert [event["type"] for event in run.events].count("run_started") == 1


@pytest.mark.parametrize("host", ["the same", "another"])
def test_speeds_last_over_changes_of_the_team_but_for_a_rank_on_another_device(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_host() -> str:
        return host if threading.current_thread().name == "j" else "the same"

    monkeypatch.setattr("evener.team.members.socket.gethostname", find_host)
    known: list[list[bool]] = []

    def watch(ddp: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        if membership.member == "w0" and result.window == 0:
            engine = ddp.assembly.engine
            engine.generations.call_on_change(
                lambda _: known.append([speed > 0 for speed in engine.policy.solo_speeds(12)[:2]])
            )

    run = Run(2, [Kill("w1", "gradients of window 2")], joins_after=3, at_commit=watch)
    assert run.members == [("w0", "w1"), ("w0",), ("w0", "j")]
    assert known == [[True, True], [True, host == "the same"]]


# ── epochs of one window ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_ranks_join_and_leave_where_each_epoch_is_one_window(policy: str) -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> list[Tensor]:
        def commit(result: WindowResult) -> None:
            if (membership.member, result.window) == ("w0", 1):
                team.add("j")
            membership.is_told_to_leave |= membership.member == "w1" and result.window == 3

        with begin(membership, policy=policy) as ddp:
            ddp.on_commit(commit)
            train_epochs(ddp, ddp.loader(DATA, batch_size=len(DATA)), epochs=8)
            return state_of(ddp)

    trained = team.run_to_end(body)
    assert [(one.base, one.members) for one in team.formations] == [
        (0, ("w0", "w1")),
        (2, ("w0", "w1", "j")),
        (5, ("w0", "j")),
    ]
    assert all(map(torch.equal, trained["w0"], trained["j"]))


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_a_team_whose_last_rank_is_told_to_leave_stops_and_forms_no_more(policy: str) -> None:
    team = ElasticThreads(2)
    last = {"w1": 3, "w0": 4}  # the others are to go on without w1 when w0 hears it, too

    def body(membership: ThreadMembership) -> int:
        def commit(result: WindowResult) -> None:
            membership.is_told_to_leave |= result.window == last[membership.member]

        with begin(membership, policy=policy) as ddp:
            ddp.on_commit(commit)
            train_epochs(ddp, ddp.loader(DATA, batch_size=len(DATA)), epochs=8)
            return ddp.progress.window

    assert team.run_to_end(body) == {"w0": 5, "w1": 5}
    assert [one.base for one in team.formations] == [0]


def test_a_rank_leaves_a_loop_without_a_loader() -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> tuple[int, int]:
        with begin(membership) as ddp:
            results = 0
            while ddp.window < 6:
                membership.is_told_to_leave |= membership.member == "w0" and ddp.window == 2
                ddp.backward(loss_of(ddp, *DATA[ddp.window]))
                results += ddp.step() is not None
            return results, ddp.window

    assert team.run_to_end(body) == {"w1": (6, 6)}, "no window is done again"
    assert isinstance(team.fate("w0").error, KeyboardInterrupt)


# ── ranks that were left out, jobs ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_rank_that_was_left_out_joins_again_in_its_loop(policy: str) -> None:
    def stop(_: Ddp, membership: ThreadMembership, result: WindowResult) -> None:
        team = membership.team
        if membership.member == "w2" and result.window == 2 and len(team.formations) == 1:
            team.leave_out("w2")
        while len(team.formations) == 2 and membership.member == "w0" and not team.joiners:
            time.sleep(0.001)  # or the others would do the run to its end

    run = Run(3, policy=policy, at_commit=stop)
    assert [len(members) for members in run.members] == [3, 2, 3]
    assert run.team.formations[2].receivers == ("w2",)


class Small(EpochLoop):
    """A job over ``DATA`` that saves checkpoints."""

    def __init__(self, ddp: Ddp, folder: Path) -> None:
        super().__init__(ddp, num_epochs=2, max_steps=None, checkpoint_every=None)
        self.loader = ddp.loader(DATA, batch_size=12, seed=3)
        self.saves = Checkpointer(ddp, folder, keep_last=1)
        self.checkpointer = self.saves

    def train_micro_batch(self, batch: Any) -> None:
        self.ddp.backward(loss_of(self.ddp, *batch))


def test_a_main_rank_that_was_left_out_writes_no_checkpoints_any_more(tmp_path: Path) -> None:
    team = ElasticThreads(2)

    def body(membership: ThreadMembership) -> tuple[Path | None, bool]:
        def commit(result: WindowResult) -> None:
            if membership.member == "w0" and result.window == 2 and len(team.formations) == 1:
                team.leave_out("w0")
            while membership.member == "w1" and len(team.formations) == 2 and not team.joiners:
                time.sleep(0.001)  # or it would do the run to its end

        with begin(membership) as ddp:
            ddp.on_commit(commit)
            small = Small(ddp, tmp_path)
            with closing(small.saves):
                for _ in small.epochs():
                    pass
                return small.finish(), ddp.is_main_process

    last = tmp_path / "step-8"
    assert team.run_to_end(body) == {"w0": (last, False), "w1": (last, True)}


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_main_rank_saves_what_it_holds_where_the_coordinator_is_lost(
    num_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several hosts the others may go on with the coordinator: they keep their folder."""
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)

    def train(membership: ThreadMembership) -> None:
        with begin(membership) as ddp:
            small = Small(ddp, tmp_path / "saved")
            with closing(small.saves):
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
