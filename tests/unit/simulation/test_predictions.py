"""What ``evener plan`` predicts of teams and recommends."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ConfigError
from evener.observe.events import make_event
from evener.observe.table import RunTable
from evener.planning.policies import ApplyPolicy
from evener.planning.speed import CostModel
from evener.simulation.advice_text import text
from evener.simulation.changes import Change, predict_changes
from evener.simulation.measured_team import measured_team
from evener.simulation.prediction import TeamSpec, predict, simulate
from evener.simulation.simulated_rank import UNDISTURBED, Link, Noise, SimulatedRank
from evener.simulation.team_advice import advise, best_policy, needed, predict_all

SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC
BOUNDED = settings(deadline=None, derandomize=True, max_examples=5, database=None)


def team_at(
    *speeds: float, link: Link | None = None, batch_size: int = 64, micro_batch_size=None, **options
) -> TeamSpec:
    return TeamSpec(
        ranks=tuple(
            SimulatedRank(CostModel(0.0, 1.0 / speed), micro_batch_size, name=f"rank {rank}")
            for rank, speed in enumerate(speeds)
        ),
        link=link or Link(),
        batch_size=batch_size,
        local_batch_size=batch_size,
        **options,
    )


def slow_link(seconds: float) -> Link:
    return Link(num_bytes=4000, transfer_s=seconds)


# ── predictions ──────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_by_hand():
    """96 samples at 3:1 are 72 and 24, 0.72 s; a ring of two ranks moves everything once."""
    found = predict(team_at(100, 100 / 3, link=slow_link(0.08), batch_size=96), SYNC)
    assert found.window_s == pytest.approx(0.8)
    assert found.samples_per_s == pytest.approx(120)
    assert found.of_ideal == pytest.approx(0.9)
    assert found.exchange == pytest.approx(0.1)
    assert found.wait == pytest.approx(0.0)
    assert found.shares == pytest.approx((0.75, 0.25))
    assert (found.sent_bytes, found.sent_bytes_per_s) == (4000, pytest.approx(5000))


def test_one_rank_loses_nothing():
    for policy in ApplyPolicy:
        found = predict(team_at(50, link=slow_link(9.0)), policy)
        assert found.samples_per_s == pytest.approx(50)
        assert (found.lost, found.sent_bytes, found.parked) == (pytest.approx(0.0), 0, ())


def test_bookkeeping_and_noise_count():
    team = team_at(100, batch_size=10, micro_batch_size=5)
    # Ten windows of 0.12 s, then ten of 0.18 s, and so on.
    rank = replace(team.ranks[0], overhead_s=0.01, noise=Noise((1.0, 1.6), (1.2, 3.0)))
    found = predict(replace(team, ranks=(rank,)), SYNC)
    assert found.window_s == pytest.approx(0.15, rel=0.02)
    assert found.bookkeeping == pytest.approx(0.02 / 0.15, rel=0.02)


def test_updates_that_ranks_divide_take_less():
    ranks = tuple(SimulatedRank(CostModel(0.0, 0.01, 0.4)) for _ in range(2))
    team = replace(team_at(1, 1, batch_size=8), ranks=ranks)
    assert predict(team, SYNC).window_s == pytest.approx(0.44)
    assert predict(replace(team, divides_updates=True), SYNC).window_s == pytest.approx(0.24)


def test_exchanges_cost_sync_most_and_async_nothing():
    found = predict_all(team_at(100, 50, link=slow_link(0.2)))
    assert found[SYNC].exchange > 0.2 > found[CADENCE].exchange > found[ASYNC].exchange == 0.0
    speeds = [found[policy].samples_per_s for policy in ApplyPolicy]
    assert speeds == sorted(speeds)


def test_very_unequal_ranks_are_simulated_in_bounded_time():
    team = team_at(200, 1)
    steps = sum(report.steps for report in simulate(team, CADENCE).run(3)[-1].reports)
    assert steps > 2000
    found = predict(team, CADENCE)
    assert found.of_ideal == pytest.approx(1.0, rel=0.01)
    assert found.samples_per_window == pytest.approx(64 * steps, rel=0.01)
    slow = predict(replace(team, link=slow_link(1e6)), CADENCE)
    assert slow.samples_per_window < 64 * 30_000, "the anchor grows less than between equals"


def dividing(team: TeamSpec) -> TeamSpec:
    """Ranks that divide the batch of SYNC between them in local steps."""
    return replace(team, local_batch_size=None)


# ── advice ───────────────────────────────────────────────────────────────────────────────────────


def test_sync_is_best_where_it_is_as_good():
    advice = advise(team_at(100, 100))
    assert advice.best is SYNC
    assert "one device" in advice.reason
    assert [one.gain for one in advice.worth] == pytest.approx([1.0, 1.0])
    assert [one.for_loss for one in advice.worth] == pytest.approx([1.0, 1.0])


def test_a_slow_network_makes_local_steps_best_and_says_why():
    advice = advise(dividing(team_at(100, 90, link=slow_link(0.08))))
    assert advice.best is SYNC, "a speed that does not make up for the loss"
    assert "but may need 35% more samples for the same loss" in advice.reason
    advice = advise(dividing(team_at(100, 90, link=slow_link(0.3))))
    assert advice.best is CADENCE
    assert "it is 74% faster than sync (42% for the same loss), which loses" in advice.reason
    assert "exchanges" in advice.reason
    one = advice.worth[1]
    assert 1 + one.for_loss == pytest.approx((1 + one.gain) / 2**0.3, rel=0.01)
    assert "(+74%, +42% for the same loss)" in one.verdict
    parked = advise(dividing(team_at(100, 50, link=slow_link(5.0))))
    assert "parks rank 1" in parked.reason
    assert parked.predictions[SYNC].parked == (1,)


def test_a_rank_without_work_is_named():
    team = team_at(100, 99, 0.3, link=Link(num_bytes=4, transfer_s=0.01, latency_s=0.002))
    advice = advise(team)
    assert advice.predictions[SYNC].parked == (2,)
    told = text(advise(replace(team, notes=("a note",))))
    assert "sync parks rank 2" in told
    assert "rank 2: not worth having" in told
    assert "rank 0: worth having" in told
    assert "note: a note" in told


@BOUNDED
@given(
    speeds=st.lists(st.floats(1.0, 20.0), min_size=1, max_size=3),
    added=st.floats(1.0, 20.0),
    link=st.sampled_from([Link(), slow_link(0.01), slow_link(1.0)]),
)
def test_another_device_never_lowers_the_best_throughput(speeds, added, link):
    """Up to 2 % for which the planner keeps its shares, and 3 % for which SYNC is preferred."""
    before, after = (
        predict_all(team_at(*speeds, link=link)),
        predict_all(team_at(*speeds, added, link=link)),
    )
    best = [found[best_policy(found)].samples_per_s for found in (before, after)]
    assert best[1] >= 0.95 * best[0]


# ── measured ─────────────────────────────────────────────────────────────────────────────────────


def events_of(team: TeamSpec, policy: ApplyPolicy, count: int, **start) -> list[dict]:
    """Events as a run of this team would write them."""
    members = [f"m{rank}" for rank in range(len(team.ranks))]
    named = {"run": "r", "members": members, "backend": "gloo", "unit": "samples"}
    sizes = {"window": 0, "num_samples": 100, "total_windows": None}
    events = [make_event("run_started", t=0.0, policy=str(policy), **named, **sizes, **start)]
    t = 0.0
    for number, window in enumerate(simulate(team, policy).run(count)):
        t += window.length_s
        rows = [
            {
                "rank": rank,
                "member": members[rank],
                "samples": report.samples,
                "weight": report.weight,
                "loss": 1.0,
                "compute_s": report.compute_s,
                "wait_s": window.waits_s[rank],
                "sync_s": window.exchanges_s[rank],
                "hidden_s": team.link.exchange_s(len(team.ranks)) - window.exchanges_s[rank],
                "micro_batches": report.micro_batches,
                "update_s": report.update_s,
                **({"steps": report.steps} if policy is not SYNC else {}),
            }
            for rank, report in enumerate(window.reports)
        ]
        place = {"window": number, "generation": 0, "epoch": 0, "committed": [[0, 1]]}
        anchor = {} if policy is SYNC else {"anchor": team.anchor}
        parts = max(report.update_parts for report in window.reports)
        events.append(make_event("window", t=t, ranks=rows, update_parts=parts, **place, **anchor))
    return events


@pytest.mark.parametrize("policy", list(ApplyPolicy))
def test_a_run_is_predicted_from_its_own_events(policy):
    team = team_at(100, 40, 30, link=Link(transfer_s=0.02, meeting_s=0.002), micro_batch_size=4)
    noises = [Noise((1.0, 1.1), (0.7, 1.5)), Noise((1.0, 1.3, 0.9), (0.4, 0.8, 1.9)), UNDISTURBED]
    ranks = [
        replace(rank, overhead_s=0.001, noise=noise, cost=rank.cost._replace(window_s=0.01))
        for rank, noise in zip(team.ranks, noises, strict=True)
    ]
    team = replace(team, ranks=tuple(ranks), divides_updates=True)
    read = measured_team(events_of(team, policy, 80, params=500), "r")
    assert [rank.name for rank in read.ranks] == [f"rank {r} (m{r})" for r in range(3)]
    assert read.ranks[0].micro_batch_size == 4
    assert read.batch_of(policy) == 64
    assert read.link.num_bytes == 2000
    again, truth = predict(read, policy), predict(team, policy)
    assert again.samples_per_s == pytest.approx(truth.samples_per_s, rel=0.03)
    assert again.lost == pytest.approx(truth.lost, abs=0.02)
    assert any("local steps" in note for note in read.notes) == (policy is not SYNC)


def test_windows_in_which_the_clock_was_set_back_do_not_count():
    events = events_of(team_at(100, 50), SYNC, 40)
    for event in events[21:]:
        event["t"] -= 1000.0
    whole = measured_team(events[:20], "r")
    assert predict(measured_team(events, "r"), SYNC).samples_per_s == pytest.approx(
        predict(whole, SYNC).samples_per_s, rel=0.01
    )
    with pytest.raises(ConfigError, match=r"0 windows .* after its warm-up"):
        measured_team([{**event, "t": 0.0} for event in events], "r")


def test_a_speed_that_changes_midway_counts_for_half_whatever_is_simulated():
    """A simulation is shorter than this run: of its first part alone it would tell too much."""
    events = events_of(team_at(100, 50, micro_batch_size=4), SYNC, 400)
    later = events_of(team_at(100, 25, micro_batch_size=4), SYNC, 400)[1:]
    moved = [{**e, "t": e["t"] + events[-1]["t"], "window": e["window"] + 400} for e in later]
    read = measured_team([*events, *moved], "r")
    assert read.measured is not None
    found = predict(read, SYNC)
    assert found.samples_per_s == pytest.approx(read.measured.estimate.speed, rel=0.02)
    assert found.of_ideal is not None
    for rank in (0, 1):
        alone = predict(read.without(1 - rank), SYNC).samples_per_s
        assert alone == pytest.approx(read.measured.estimate.alone[rank], rel=0.02)


def test_the_gain_of_local_steps_is_for_the_same_loss():
    """CADENCE needs 1.23 times as many samples with two ranks, so it must be so much faster."""
    team = team_at(200, 200, link=slow_link(0.12), batch_size=40, micro_batch_size=20)
    events = events_of(team, SYNC, 40, params=1000)
    gain = predict_changes(RunTable.of(events), events[0])
    read = measured_team(events, "r")
    faster = predict(read, CADENCE).samples_per_s / predict(read, SYNC).samples_per_s
    assert faster > 1.25
    assert gain(Change(policy=CADENCE)) == pytest.approx(faster / 2**0.3 - 1, rel=1e-3)


def test_more_ranks_need_more_samples_and_slow_ones_count_little():
    found = [
        needed(predict(dividing(team_at(*speeds)), policy))
        for policy in (SYNC, CADENCE, ASYNC)
        for speeds in ((100, 100), (100, 100, 100, 100), (100, 1))
    ]
    expected = [1.0, 1.0, 1.0, 1.23, 1.52, 1.01, 1.35, 1.67, 1.11]
    assert found == pytest.approx(expected, rel=0.02)
    whole = [needed(predict(team_at(100, 100), policy)) for policy in (SYNC, CADENCE)]
    assert whole == pytest.approx([1.0, 1.8], rel=0.02), "with a whole batch for each rank"


@pytest.mark.parametrize("never_hidden", [0.0, 0.3])
def test_a_run_that_hides_its_exchange_predicts_other_teams(never_hidden):
    """Two ranks hide more than half of the exchange, or 70 % of a shorter one."""
    seconds = 0.03 if never_hidden else 0.12
    link = replace(slow_link(seconds), hides=2 / 3, never_hidden=never_hidden)
    team = team_at(200, 200, link=link, batch_size=40, micro_batch_size=20)
    read = measured_team(events_of(team, SYNC, 40, params=1000), "r")
    assert predict(read, SYNC).window_s == pytest.approx(predict(team, SYNC).window_s)
    for ranks in (2, 3):
        for batch_size in (40, 60, 120):
            one, other = (
                replace(t, ranks=t.ranks[:1] * ranks, batch_size=batch_size) for t in (read, team)
            )
            again, truth = predict(one, SYNC), predict(other, SYNC)
            assert again.samples_per_s == pytest.approx(truth.samples_per_s, rel=0.05)
            assert again.exchange == pytest.approx(truth.exchange, abs=0.03)


@pytest.mark.parametrize("told_by", [SYNC, CADENCE])
def test_a_disturbance_lasts_as_long_as_it_did(told_by):
    """Steps that were disturbed each by itself would cancel out within a window.

    A run tells only of disturbances that last for longer than its windows.
    """
    team = team_at(90, 30, batch_size=4, anchor=3, max_anchor=3, micro_batch_size=4)
    slow = replace(team.ranks[1], noise=Noise((1.0, 1.5), (2.0, 5.0)))
    team = replace(team, ranks=(team.ranks[0], slow), batch_size=48)
    read = measured_team(events_of(team, told_by, 60), "r")
    read = replace(read, local_batch_size=4, anchor=3, max_anchor=3)
    again, truth = predict(read, CADENCE), predict(team, CADENCE)
    assert again.wait == pytest.approx(truth.wait, abs=0.01)
    assert again.samples_per_s == pytest.approx(truth.samples_per_s, rel=0.03)


def test_a_part_of_a_micro_batch_costs_more_than_its_samples():
    """Thirteen samples in micro-batches of four are three and a small one, in each window."""
    usual = SimulatedRank(CostModel(0.1, 0.225), 4)  # a tenth of a second's micro-batch is fixed
    team = replace(team_at(1, batch_size=13), ranks=(usual,), local_batch_size=4)
    read = replace(measured_team(events_of(team, SYNC, 20), "r"), local_batch_size=4)
    assert predict(read, CADENCE).samples_per_s == pytest.approx(4.0)
    assert predict(read, SYNC).samples_per_s == pytest.approx(13 / (0.4 + 13 * 0.225))


def test_rows_go_by_member_whatever_their_rank():
    events = events_of(team_at(100, 25), SYNC, 40)
    for window in events[1::2]:
        window["ranks"].reverse()
        for rank, row in enumerate(window["ranks"]):
            row["rank"] = rank
    team = measured_team(events, "r")
    assert [rank.name for rank in team.ranks] == ["rank 0 (m0)", "rank 1 (m1)"]
    found = [n / rank.cost.seconds(n, None) for rank, n in zip(team.ranks, (51, 13), strict=True)]
    assert found == pytest.approx([100, 25], rel=0.01)


def test_the_time_of_evaluations_is_nobodys():
    events = events_of(team_at(100, 50), SYNC, 20)
    t = events[10]["t"]
    for later in events[11:]:
        later["t"] += 100.0
    evaluation = make_event(
        "eval", t=t + 100.0, window=10, name="x", loss=1.0, weight=1, elapsed_s=100
    )
    team = measured_team([*events[:11], evaluation, *events[11:]], "r")
    assert max(rank.overhead_s for rank in team.ranks) < 0.001


def test_what_a_run_cannot_tell_is_refused():
    few = events_of(team_at(100, 50), SYNC, 5)
    with pytest.raises(ConfigError, match=r"r has 2 windows .* at least 5 .* --speeds"):
        measured_team(few, "r")
    with pytest.raises(ConfigError, match="r has 0 windows"):
        measured_team([], "r")
    silent = events_of(team_at(100, 50), SYNC, 20)
    for window in silent[5:]:
        del window["ranks"][1]["micro_batches"]
    with pytest.raises(ConfigError, match=r"r has 0 windows with the work of each rank"):
        measured_team(silent, "r")


def test_a_rank_that_has_computed_nothing_is_left_out():
    idle = events_of(team_at(100, 50), SYNC, 20)
    for window in idle[1:]:
        window["ranks"][1] |= {"samples": 0, "compute_s": 0.0}
    read = measured_team(idle, "r")
    assert [rank.name for rank in read.ranks] == ["rank 0 (m0)"]
    assert "rank 1 (m1) has computed nothing in these windows" in " ".join(read.notes)
    for window in idle[1:]:
        window["ranks"][0]["compute_s"] = 0.0
    with pytest.raises(ConfigError, match="no rank has computed anything in r"):
        measured_team(idle, "r")


def test_a_window_in_which_the_run_was_suspended_does_not_count():
    events = events_of(team_at(100, 50), SYNC, 40)
    for later in events[22:]:
        later["t"] += 1e6
    read = measured_team(events, "r")
    assert read.source == "r: 35 windows of policy sync"
    assert predict(read, SYNC).samples_per_s == pytest.approx(150, rel=0.03)
