"""The roster in virtual time: no split brain, progress, and single rules."""

from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.errors import ConfigError
from evener.parsing import Fields
from evener.planning.silence import silence_deadline_s
from evener.protocol.formation import (
    TRAINING,
    Formation,
    ProcessState,
    Standing,
    read_message,
    read_team_limits,
)
from evener.protocol.roster import Outgoing, Roster
from unit.protocol.elastic_world import DEADLINES, Worker, World

#: By name, what may happen to one worker.
USUAL: dict[str, Callable[[World, Worker], object]] = {
    "step": World.step,
    "step again": World.step,
    "deliver": World.deliver,
    "hear": World.hear,
    "beat": World.beat,
    "connect": World.connect,
    "notice": World.notice_the_dead,
    "0.1 s": lambda world, _: world.wait(0.1),
}
FAULTS: dict[str, Callable[[World, Worker], object]] = {
    "give up": World.give_up,
    "cut": World.cut,
    "part": lambda world, worker: world.part([worker]),
    "part all": lambda world, _: world.part(world.workers),
    "vanish": World.vanish,
    "mend": lambda world, _: world.mend(),
    "stop": World.stop,
    "resume": World.resume,
    "kill": lambda world, worker: world.kill(worker, told=True),
    "die unseen": lambda world, worker: world.kill(worker, told=False),
    "start": lambda world, _: world.start(),
    "start four": lambda world, _: [world.start() for _ in range(4)],
    "crash": lambda world, _: world.crash(),
    "restart": lambda world, _: world.restart(),
    "1 s": lambda world, _: world.wait(1.0),
    "3 s": lambda world, _: world.wait(3.0),
}


def disturb(world: World, random: Random, num_faults: int) -> None:
    """Let faults happen, with usual things between them, all in a random order."""
    for _ in range(num_faults):
        for _ in range(random.randrange(40)):
            USUAL[random.choice([*USUAL])](world, random.choice(world.workers))
        FAULTS[random.choice([*FAULTS])](world, random.choice(world.workers))


@given(st.integers(1, 3), st.integers(2, 5), st.integers(0, 2**32), st.integers(0, 30))
def test_no_two_generations_commit_unlike_windows_and_the_team_goes_on(
    least: int, most: int, seed: int, num_faults: int
) -> None:
    world = World(min(least, most), most)
    random = Random(seed)
    for _ in range(most):
        world.start()
    world.settle(random.choice([0.0, 3.5, 5.0]))
    disturb(world, random, num_faults)  # World.commit checks each commit
    before = len(world.commits)
    world.settle(20.0)
    assert len(world.commits) > before, "the team commits windows again"


class Team:
    """A roster whose first generation has formed, and what it said since."""

    def __init__(self, *members: str, least: int = 1, most: int = 4) -> None:
        self.now_s = 10.0
        self.roster = Roster(least, most, DEADLINES, 0.0)
        for member in members:
            self.join(member)
        self.pass_(1.0)
        self.roster.take()

    def pass_(self, seconds: float) -> list[Outgoing]:
        self.now_s += seconds
        self.roster.tick(self.now_s)
        return self.roster.take()

    def join(self, member: str, **facts: object) -> str:
        why = self.roster.arrive(self.now_s, member, f"session of {member}", facts, None)
        if not why:
            self.roster.report(self.now_s, member, 0, None)
        return why

    def report(
        self, member: str, applied: int, digest: str = "same", phase: str = TRAINING
    ) -> list[Outgoing]:
        standing = Standing(
            applied=applied,
            committed=applied,
            digest=digest,
            phase=phase,
        )
        self.roster.report(self.now_s, member, self.roster.generation, standing)
        return self.roster.take()

    def end(self, member: str, state: ProcessState = ProcessState.GONE) -> list[Outgoing]:
        self.roster.process(self.now_s, member, state, "killed by SIGKILL")
        return self.roster.take()

    @property
    def formation(self) -> Formation:
        assert self.roster.formation is not None
        return self.roster.formation


def told(messages: list[Outgoing], kind: str) -> set[str]:
    return {message.to for message in messages if message.type == kind}


def test_survivors_of_a_death_are_told_at_once_and_form_as_soon_as_all_have_left() -> None:
    team = Team("a", "b", "c")
    assert told(team.end("b"), "over") == {"a", "b", "c"}
    assert told(team.report("c", 4), "formed") == set()
    assert told(team.report("a", 5), "formed") == {"a", "c"}
    assert team.formation.members == ("a", "c")
    assert (team.formation.base, team.formation.source) == (5, "a")
    assert team.formation.receivers == ("c",)


def test_a_joiner_is_wanted_and_takes_the_free_number_when_all_have_left() -> None:
    team = Team("a", "b", "c")
    team.end("a")
    team.report("b", 3)
    team.report("c", 3)
    assert team.formation.numbers == (1, 2), "those that stay keep their numbers"
    assert team.join("d") == ""
    assert told(team.roster.take(), "wanted") == {"b", "c"}
    team.report("b", 4)
    team.report("c", 4)
    assert team.formation.members == ("b", "c", "d")
    assert team.formation.numbers == (1, 2, 0)
    assert team.formation.receivers == ("d",)


def test_a_joiner_waits_while_a_member_does_something_else_than_training() -> None:
    team = Team("a", "b", "c", least=3)
    team.end("c")
    team.join("d")
    team.report("a", 3, phase="evaluating")
    assert told(team.report("b", 3), "wanted") == {"a", "b"}
    assert team.formation.members == ("a", "b"), "fewer than the least, but not for long"
    team.join("e")
    team.report("a", 4)
    team.report("b", 4)
    assert team.formation.members == ("a", "b", "d", "e")


def test_a_stopped_worker_is_lost_after_stopped_s_and_left_out_when_it_continues() -> None:
    team = Team("a", "b")
    assert told(team.end("b", ProcessState.STOPPED), "over") == set()
    assert told(team.pass_(DEADLINES.stopped_s), "over") == {"a", "b"}
    team.report("a", 2)
    assert team.formation.members == ("a",)
    team.end("b", ProcessState.CONTINUED)
    standing = Standing(applied=2, committed=1, digest="same")
    team.roster.report(team.now_s, "b", 1, standing)
    assert told(team.roster.take(), "left_out") == {"b"}


def test_a_team_begins_anew_only_when_every_lease_has_run_out() -> None:
    team = Team("a", "b")
    roster = team.roster
    for member in "ab":
        assert roster.beat(team.now_s, member, 1, "training")
        roster.depart(team.now_s, member)
    team.join("c")
    assert not told(team.pass_(DEADLINES.lease_s - 0.1), "formed")
    assert told(team.pass_(0.2), "formed") == {"c"}


def test_no_lease_is_needed_where_every_process_has_ended() -> None:
    team = Team("a", "b")
    assert team.roster.beat(team.now_s, "a", 1, "training")
    team.join("c")
    team.pass_(DEADLINES.gather_s)
    team.end("a")
    assert told(team.end("b"), "formed") == {"c"}


def test_a_late_worker_does_not_train_a_finished_run_once_more() -> None:
    team = Team("a", "b")
    team.roster.leave(team.now_s, "a", finished=True)
    team.join("late")
    assert not told(team.pass_(DEADLINES.lease_s + 1.0), "ended"), "b may still be at work"
    team.roster.leave(team.now_s, "b", finished=True)
    (refusal,) = [message for message in team.roster.take() if message.type == "ended"]
    assert refusal.to == "late"
    assert "the team's run has ended, in generation 1" in refusal.content["why"]


def test_the_first_worker_that_lives_decides_where_no_member_is_left() -> None:
    team = Team("a", "b")
    for member in "cde":
        assert team.roster.arrive(team.now_s, member, f"session of {member}", {}, None) == ""

    def leaders() -> list[str]:
        return [member for member in "abcde" if team.roster.leads(member)]

    team.end("a")
    team.end("c")
    assert leaders() == [], "b may still tell what there is to know"
    team.end("b", ProcessState.STOPPED)
    team.pass_(DEADLINES.stopped_s)
    assert leaders() == ["d"]
    team.end("d")
    assert leaders() == ["e"]
    assert not Roster(1, 4, DEADLINES, 0.0).leads("a"), "nobody has ever been in the team"


def test_workers_that_have_finished_a_run_may_begin_another() -> None:
    team = Team("a", "b")
    for member in "ab":
        team.roster.leave(team.now_s, member, finished=True)
        team.roster.depart(team.now_s, member)
    said = []
    for member in "ab":
        assert team.roster.arrive(team.now_s, member, "another session", {}, None) == ""
        team.roster.report(team.now_s, member, 0, None)
        said += team.roster.take()
    said += team.pass_(DEADLINES.lease_s + 1.0)
    assert told(said, "formed") == {"a", "b"}
    assert not told(said, "say")


def test_a_team_that_has_lost_all_state_says_so() -> None:
    team = Team("a", "b")
    team.join("c")
    team.pass_(DEADLINES.gather_s)
    team.end("a")
    said = team.end("b")
    assert not team.formation.has_state
    (line,) = [message for message in said if message.type == "say"]
    assert "no member is left that holds the state of generation 1" in line.content["text"]


def test_a_worker_beyond_the_most_gets_the_number_of_one_that_is_lost() -> None:
    team = Team("a", "b", most=2)
    team.join("c")
    team.roster.beat(team.now_s, "c", 0, "joining")
    assert team.roster.number_of("c") == -1
    team.end("b")
    team.roster.beat(team.now_s, "c", 0, "joining")
    assert team.roster.number_of("c") == 1


def test_a_living_member_is_named_and_waited_for_until_timeout_s() -> None:
    team = Team("a", "b", "c")
    team.roster.beat(team.now_s, "b", 17, "evaluating")
    team.end("c")
    team.report("a", 2)
    said = team.pass_(59.0)
    assert told(said, "formed") == set()
    said += team.pass_(0.9)
    assert not told(said, "formed"), "timeout_s is 60 s"
    assert told(team.pass_(0.2), "formed") == {"a"}


def test_a_coordinator_that_has_just_started_lets_the_team_train_before_another_one_joins() -> None:
    held = Team("a", "b").formation
    roster = Roster(1, 4, DEADLINES, 100.0)
    for member in "ab":
        assert not roster.arrive(100.1, member, f"session of {member}", {}, held)
    assert not roster.arrive(100.1, "c", "session of c", {}, None)
    roster.report(100.1, "c", 0, None)
    assert not any(message.content.get("value") for message in roster.take())
    for member in "ab":
        assert roster.beat(103.0, member, 1, "training")
    roster.tick(100.0 + DEADLINES.lease_s)
    assert told(roster.take(), "wanted") == {"a", "b"}


@pytest.mark.parametrize("who", ["worker", "launcher", "nobody but b"])
def test_nobody_is_lost_who_is_busy_for_five_adaptive_deadlines(who: str) -> None:
    """As rank 0 may be in an evaluation of its own, or in a C call in which it sends nothing.

    Then its launcher is heard of. A launcher that is silent alone is stopped, or a debugger holds
    it. Of a worker without a launcher it is not known which of the two it is.
    """
    team = Team("a", "b")
    if who == "worker":
        team.roster.attend(team.now_s, ["a", "b"])
    said = []
    for _ in range(6):
        for _ in range(10):
            if who == "worker":
                team.roster.beat(team.now_s, "a", 0, "evaluating")
            elif who == "launcher":
                team.roster.attend(team.now_s, ["a", "b"])
            assert team.roster.beat(team.now_s, "b", 1, "waiting")
            said += team.pass_(silence_deadline_s([0.1] * 3) / 10)
    assert {message.type for message in said} == {"say"}, "it is named, and that is all"
    assert team.formation.generation == 1
    assert team.roster.beat(team.now_s, "a", 1, "training"), "it may commit"


def live(team: Team, seconds: float, *members: str) -> list[Outgoing]:
    """Time passes, in which these workers and their launchers are heard of."""
    said = []
    for _ in range(round(seconds / 0.25)):
        team.roster.attend(team.now_s, members)
        for member in members:
            team.roster.beat(team.now_s, member, 0, "waiting")
        said += team.pass_(0.25)
    return said


def test_a_machine_that_vanishes_silently_is_lost_after_host_lease_s() -> None:
    """With both of its workers, while those that remain need not wait for ``timeout_s``."""
    team = Team("a", "b", "c", "d")
    live(team, 1.0, "a", "b", "c", "d")
    assert not live(team, DEADLINES.host_lease_s - 0.5, "a", "b")
    messages = live(team, 0.25, "a", "b")
    assert told(messages, "over") == {"a", "b", "c", "d"}
    lines = [message.content["text"] for message in messages if message.type == "say"]
    for member, line in zip("cd", lines, strict=True):
        why = "neither it nor its launcher has sent a heartbeat for 4 s (host_lease_s)"
        assert line.startswith(f"{member} is lost: {why}")
    team.report("a", 5)
    assert "formed" in {message.type for message in team.report("b", 5)}
    assert team.formation.members == ("a", "b")
    assert team.formation.detect_s == DEADLINES.host_lease_s, "since the last heartbeat"
    # The cable is mended: what they say is of a generation that has ended, so they join again.
    team.roster.arrive(team.now_s, "c", "session of c", {}, None)
    assert told(team.report("c", 5), "left_out") == {"c"}


def test_a_coordinator_that_was_stopped_takes_nobody_for_lost() -> None:
    """What workers have sent meanwhile is yet to be read."""
    team = Team("a", "b")
    live(team, 1.0, "a", "b")
    team.pass_(60.0)
    live(team, 2 * DEADLINES.host_lease_s, "a", "b")
    assert team.formation.generation == 1
    assert team.roster.living == ("a", "b")
    live(team, DEADLINES.host_lease_s, "a")
    assert team.roster.living == ("a",), "from then on silence counts again"


def test_who_makes_no_progress_while_others_wait_is_named_with_its_phase() -> None:
    team = Team("a", "b", "c")
    said = []
    for second in range(30):
        team.roster.beat(team.now_s, "a", 5, "waiting")
        team.roster.beat(team.now_s, "b", 5, "evaluating")
        team.roster.beat(team.now_s, "c", 5 + second, "training")  # it advances: slow, not dead
        said += team.pass_(1.0)
    (line,) = [message.content["text"] for message in said if message.type == "say"]
    assert "a waits for b, which has made no progress for" in line
    assert "(it is evaluating, after 5 micro-batches)" in line
    team.roster.beat(team.now_s, "b", 6, "evaluating")
    for _ in range(30):
        team.roster.beat(team.now_s, "b", 6, "evaluating")
        team.roster.beat(team.now_s, "c", 99, "waiting")
        said += team.pass_(1.0)
    assert len(told(said, "say")) == 1, "again, as it had gone on meanwhile"
    assert sum(message.type == "say" for message in said) == 2


def test_a_rank_of_a_fixed_team_that_is_late_again_is_named_again() -> None:
    """Ranks of such a team tell of waits alone, so nothing else shows that one is over."""
    roster = Roster(2, 2, DEADLINES, 0.0, is_fixed=True)
    for number, member in enumerate("ab"):
        assert not roster.arrive(0.0, member, member, {"world_size": 2}, None, number)
        roster.report(0.0, member, 0, None)
    roster.tick(0.0)

    def said(now_s: float) -> int:
        roster.tick(now_s)
        return sum(message.type == "say" for message in roster.take())

    roster.take()
    for begin_s in (10.0, 20.0):
        roster.beat(begin_s, "a", 0, "waiting")
        assert [said(begin_s + later_s) for later_s in (0.5, 2.0, 4.0)] == [0, 1, 0]
        roster.beat(begin_s + 5.0, "a", 1, "training")


def test_a_parked_member_neither_waits_nor_is_waited_for() -> None:
    team = Team("a", "b", "c")
    for _ in range(30):
        team.roster.beat(team.now_s, "a", 5, "parked")
        team.roster.beat(team.now_s, "b", 5, "evaluating")
        assert not told(team.pass_(1.0), "say")
    said = []
    for second in range(30):
        team.roster.beat(team.now_s, "b", 5, "waiting")
        team.roster.beat(team.now_s, "c", second, "training")
        said += team.pass_(1.0)
    assert not told(said, "say")


def test_too_few_workers_are_told_after_timeout_s() -> None:
    team = Team("a", "b", least=2)
    team.end("b")
    team.report("a", 2)
    failed = [message for _ in range(70) for message in team.pass_(1.0) if message.to]
    assert [(message.to, message.type) for message in failed] == [("a", "failed")]
    assert "1 of at least 2 workers came within 60 s" in str(failed[0].content["why"])


def test_a_spare_worker_that_has_waited_for_long_waits_for_another_when_the_team_is_lost() -> None:
    team = Team("a", "b", least=2, most=2)
    team.join("spare")
    team.pass_(2 * DEADLINES.timeout_s)
    team.end("a")
    team.end("b")
    said = [message for _ in range(50) for message in team.pass_(1.0)]
    assert told(said, "say") == {""}
    assert not told(said, "failed")
    team.join("other")
    team.pass_(1.0)
    assert team.formation.members == ("spare", "other")


def test_a_worker_that_differs_is_refused_with_both_values_and_refuses_no_other() -> None:
    team = Team("a")
    team.roster.describe(team.now_s, "a", {"model": "one"})
    why = team.join("b", model="another")
    assert "model of b is 'another', and that of a in the team is 'one'" in why
    assert team.join("c") == ""
    team.roster.describe(team.now_s, "c", {"model": "another"})
    assert told(team.roster.take(), "failed") == {"c"}
    assert team.join("d", model="one") == ""


def test_a_new_coordinator_continues_from_the_highest_generation() -> None:
    old = Team("a", "b", "c")
    old.end("c")
    old.report("a", 6)
    old.report("b", 6)
    new = Roster(1, 4, DEADLINES, 100.0)
    held = old.formation
    first = replace(held, generation=1, members=("a", "b", "c"), numbers=(0, 1, 2))
    assert new.arrive(100.1, "c", "c", {}, first) == ""
    assert new.arrive(100.2, "a", "a", {}, held) == ""
    assert new.arrive(100.3, "b", "b", {}, held) == ""
    assert new.generation == 2
    assert new.beat(100.4, "a", 1, "training"), "its lease is renewed"
    assert not new.beat(100.4, "c", 1, "training")
    new.take()
    new.process(100.5, "b", ProcessState.GONE, "")
    (message,) = [one for one in new.take() if (one.to, one.type) == ("a", "over")]
    assert message.content["generation"] == 2


def test_a_formation_in_which_a_member_has_no_number_is_refused_where_it_is_read() -> None:
    """Or a coordinator that was started again would continue from it."""
    told = asdict(Team("a", "b").formation) | {"members": ["a", "b"], "receivers": ["b"]}
    with pytest.raises(ValueError, match="numbers"):
        read_message(Formation, Fields({**told, "numbers": [0]}))
    assert read_message(Formation, Fields({**told, "numbers": [0, 1]})).members == ("a", "b")


@pytest.mark.parametrize("text", ["", "2", "2:1", "0:2", "a:b"])
def test_impossible_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="MIN:MAX"):
        read_team_limits(text)
    assert read_team_limits("2:4") == (2, 4)


# ── workers that do not reach one another ────────────────────────────────────────────────────────


def fail_to_connect(team: Team, unreached: dict[str, list[str]]) -> list[Outgoing]:
    """All members report that their generation did not connect; those of before hold state."""
    held = Standing(applied=5, committed=5, digest="same")
    receivers = team.formation.receivers
    for member in team.formation.members:
        is_new = member in receivers or not team.formation.has_state
        generation, standing = team.roster.generation, None if is_new else held
        team.roster.report(team.now_s, member, generation, standing, unreached.get(member, []))
    return [*team.roster.take(), *team.pass_(1.0)]  # without any state, it is gathered


def grown(*joiners: str) -> Team:
    """A team of a and b that trains, and has let others join."""
    team = Team("a", "b", most=8)
    for joiner in joiners:
        team.join(joiner)
    team.report("a", 5)
    team.report("b", 5)
    assert team.formation.members == ("a", "b", *joiners)
    team.roster.take()
    return team


@pytest.mark.parametrize(
    ("unreached", "ways"),
    [
        ({"x": ["a", "b"]}, "it does not reach a and b"),
        ({"a": ["x"]}, "a does not reach it"),
        ({"a": ["x"], "b": ["x"], "x": ["a"]}, "it does not reach a and a and b do not reach it"),
    ],
)
def test_a_joiner_that_does_not_reach_the_members_is_refused_and_they_continue(
    unreached: dict[str, list[str]], ways: str
) -> None:
    team = grown("x")
    messages = fail_to_connect(team, unreached)
    assert team.formation.members == ("a", "b")
    assert (team.formation.has_state, team.formation.base) == (True, 5)
    assert told(messages, "failed") == {"x"}
    why = next(m.content["why"] for m in messages if m.type == "failed")
    assert f"x reaches the coordinator, but not the other workers: {ways}; let" in why
    assert told(messages, "say") == {""}


def test_a_generation_that_did_not_connect_and_names_nobody_is_tried_again() -> None:
    team = grown("x")
    fail_to_connect(team, {"a": ["a", "nobody"]})
    assert team.formation.members == ("a", "b", "x")
    assert team.formation.generation == 3


def test_a_team_that_is_too_small_without_them_waits_for_others() -> None:
    team = Team("a", "b", least=2)
    fail_to_connect(team, {"b": ["a"]})
    assert team.formation.generation == 1
    team.join("c")
    team.pass_(2 * DEADLINES.lease_s)
    assert team.formation.members == ("a", "c")


@given(st.integers(2, 6), st.integers(0, 3), st.data())
def test_whatever_links_are_broken_those_left_reach_one_another(
    num_members: int, num_joiners: int, data: st.DataObject
) -> None:
    names = [f"m{n}" for n in range(num_members)]
    joiners = [f"j{n}" for n in range(num_joiners)]
    team = Team(*names, most=12)
    for joiner in joiners:
        team.join(joiner)
    for name in names:
        team.report(name, 5)
    everyone = [*names, *joiners]
    links = st.tuples(st.sampled_from(everyone), st.sampled_from(everyone))
    broken = data.draw(st.sets(links.filter(lambda link: link[0] != link[1]), max_size=8))
    fail_to_connect(team, {m: [b for a, b in broken if a == m] for m in everyone})
    left = team.formation.members
    assert team.formation.generation == 3
    assert not any(a in left and b in left for a, b in broken)
    between_members = [link for link in broken if not {*link} & {*joiners}]
    assert between_members or {*names} <= {*left}, "joiners end no healthy team"


def test_loopback_addresses_are_not_mixed_with_others() -> None:
    roster = Roster(1, 4, DEADLINES, 0.0)

    def arrive(member: str, address: str, is_local: bool) -> str:
        return roster.arrive(1.0, member, member, {}, None, address=address, is_local=is_local)

    assert not arrive("a", "127.0.0.1", True)
    assert not arrive("b", "127.0.0.2", True)
    why = arrive("c", "10.0.0.7", False)
    assert "b is" not in why
    assert (
        "a is reached at 127.0.0.1, where only its own machine connects, and c at 10.0.0.7" in why
    )
    assert "--address" in why
    roster.leave(1.0, "a")
    roster.leave(1.0, "b")
    assert not arrive("c", "10.0.0.7", False)
    assert "d is reached at ::1" in arrive("d", "::1", True)


def test_a_coordinator_that_was_started_again_knows_what_the_team_has_in_common() -> None:
    held = Team("a", "b").formation
    roster = Roster(1, 4, DEADLINES, 0.0)
    roster.remember(0.0, held, {"model": "one"})
    why = roster.arrive(0.0, "x", "session", {"model": "two"}, None)
    assert "model of x is 'two', and that of a in the team is 'one'" in why
    assert not roster.arrive(0.0, "a", "session", {"model": "one"}, held)
    assert roster.facts() == {"model": "one"}
