"""Teams under virtual time: small ones worked out by hand, and what holds for all of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import NoGuard
from evener.planning.policies import ApplyPolicy
from evener.planning.speed import CostModel
from evener.planning.sync import SyncPolicy
from evener.simulation.simulated_local import SimulatedLocal
from evener.simulation.simulated_rank import Link, Noise, SimulatedRank
from evener.simulation.simulated_sync import SimulatedSync

BOUNDED = settings(deadline=None, derandomize=True, max_examples=25, database=None)


def ranks_at(*speeds: float, **options) -> list[SimulatedRank]:
    """Ranks that do so many samples per second."""
    return [SimulatedRank(CostModel(0.0, 1.0 / speed), **options) for speed in speeds]


def sync_team(ranks, link=None, *, batch_size, **options) -> SimulatedSync:
    policy = SyncPolicy(list(map(str, range(len(ranks)))), [r.micro_batch_size for r in ranks])
    policy.calibrate([1.0 / rank.cost.per_sample_s for rank in ranks])
    return SimulatedSync(ranks, link or Link(), policy, batch_size=batch_size, **options)


def local_team(ranks, link=None, *, anchor=3, late=False) -> SimulatedLocal:
    members = list(map(str, range(len(ranks))))
    elche = ElChe(len(ranks), anchor).with_max_anchor(0)
    way = ApplyPolicy.ASYNC if late else ApplyPolicy.CADENCE
    policy = CadencePolicy(members, elche, NoGuard(), way=way)
    return SimulatedLocal(ranks, link or Link(), policy, batch_size=1)


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────


def test_an_exchange_is_a_ring():
    link = Link(num_bytes=80, transfer_s=1.0, latency_s=0.1, meeting_s=0.01)
    assert [link.exchange_s(n) for n in (1, 2, 4)] == pytest.approx([0.0, 1.2, 2.1])
    assert [link.sent_bytes(n) for n in (1, 2, 4)] == [0, 80, 120]
    assert [link.wait_s(n) for n in (1, 2, 4)] == [0.0, 0.01, 0.01]


def test_ranks_wait_for_what_backward_does_not_hide():
    link = Link(transfer_s=1.0, hides=0.5, never_hidden=0.1)
    exposed_s = [link.exposed_s(2, micro_batch_s) for micro_batch_s in (0.0, 1.0, 9.0)]
    assert exposed_s == pytest.approx([1.0, 0.5, 0.1])
    window = sync_team(ranks_at(10, 10, micro_batch_size=4), link, batch_size=10).window()
    assert window.exchanges_s == pytest.approx((0.95, 0.95)), "the last micro-batch has one sample"


def test_a_share_takes_what_its_parts_take():
    noise = Noise((1.0, 2.0), (3.0, 5.0))  # seconds 0 to 3, 3 to 5, and so on from 5
    rank = SimulatedRank(CostModel(0.1, 0.01, 0.5), 4, overhead_s=0.001, noise=noise)
    usual, slow = rank.share(10, 6.0), rank.share(10, 3.0, update_parts=2)
    assert usual.compute_s == pytest.approx(3 * 0.1 + 10 * 0.01 + 0.5)
    assert usual.busy_s == pytest.approx(usual.compute_s + 3 * 0.001)
    assert slow.compute_s == pytest.approx(2 * (3 * 0.1 + 10 * 0.01 + 0.25))
    assert (slow.update_s, slow.update_parts) == (pytest.approx(0.5), 2)


@pytest.mark.parametrize("plain_s", [0.3, 1.5, 7.0, 40.0])
def test_a_disturbance_ends_when_it_has_ended(plain_s):
    """One second's work takes ten of every nineteen seconds, however it is cut into steps."""
    noise = Noise((1.0, 10.0), (9.0, 19.0))
    rank, now_s, count = SimulatedRank(CostModel(0.0, plain_s), noise=noise), 0.0, 0
    while now_s < 1900:
        now_s, count = now_s + rank.step(1, now_s).compute_s, count + 1
    assert now_s == pytest.approx(count * plain_s * 1.9, rel=0.01)


def test_sync_divides_a_batch_by_speed():
    team = sync_team(ranks_at(100, 50), Link(transfer_s=0.01, meeting_s=0.001), batch_size=6)
    for window in team.run(20)[2:]:
        assert [report.samples for report in window.reports] == [4, 2]
        assert window.elapsed_s == pytest.approx((0.051, 0.051))
        assert window.exchanges_s == pytest.approx((0.01, 0.01))
        assert window.waits_s == pytest.approx((0.001, 0.001))


def test_sync_waits_for_the_last_rank():
    team = sync_team(ranks_at(100, 50), batch_size=7)
    window = team.run(20)[-1]
    # Five samples and two: whoever has the odd one is 10 ms later.
    assert [report.samples for report in window.reports] == [5, 2]
    assert window.waits_s == pytest.approx((0.0, 0.01))


def test_a_rank_that_is_too_slow_is_parked():
    team = sync_team(ranks_at(1000, 900, 1), Link(transfer_s=0.001), batch_size=64)
    windows = team.run(40)
    assert team.parked == {2}
    assert windows[-1].present == (0, 1)
    assert windows[-1].elapsed_s[2] == 0.0
    assert windows[-1].length_s < windows[0].length_s


def test_cadence_gives_the_slowest_rank_its_anchor():
    team = local_team(ranks_at(100, 50), Link(transfer_s=0.01), anchor=3)
    for window in team.run(10)[3:]:
        assert [report.steps for report in window.reports] == [6, 3]
        assert window.length_s == pytest.approx(0.07)
        assert window.exchanges_s == pytest.approx((0.01, 0.01))
        assert window.waits_s == pytest.approx((0.0, 0.0))


def test_async_exchanges_while_ranks_compute():
    windows = local_team(ranks_at(100, 50), Link(transfer_s=0.01), anchor=3, late=True).run(20)[3:]
    steps = sum(report.steps for window in windows for report in window.reports)
    assert sum(sum(window.exchanges_s) for window in windows) == 0.0
    assert sum(sum(window.waits_s) for window in windows) == pytest.approx(0.0)
    assert steps / sum(window.length_s for window in windows) == pytest.approx(150, rel=0.05)


def test_async_waits_for_an_exchange_that_takes_longer_than_a_window():
    windows = local_team(ranks_at(100, 50), Link(transfer_s=1.0), anchor=3, late=True).run(20)[3:]
    assert min(min(window.waits_s) for window in windows) > 0.5


# ── in general ───────────────────────────────────────────────────────────────────────────────────


def speeds_within(powers: float) -> st.SearchStrategy[list[float]]:
    one = st.floats(-powers, powers).map(lambda power: 10.0**power)
    return st.lists(one, min_size=1, max_size=4)


LINKS = st.sampled_from([Link(), Link(transfer_s=0.01), Link(transfer_s=1.0, latency_s=0.1)])


@BOUNDED
@given(speeds=speeds_within(0.5), link=LINKS, late=st.booleans())
def test_times_of_ranks_add_up(speeds, link, late):
    teams = (
        sync_team(ranks_at(*speeds, overhead_s=0.001), link, batch_size=16),
        local_team(ranks_at(*speeds, overhead_s=0.001), link, late=late),
    )
    for team in teams:
        windows = team.run(12)
        for rank in range(len(speeds)):
            busy_s = sum(w.reports[rank].busy_s for w in windows)
            idle_s = sum(w.waits_s[rank] + w.exchanges_s[rank] for w in windows)
            elapsed_s = sum(w.elapsed_s[rank] for w in windows)
            # In ASYNC a rank may be in the middle of the next window.
            assert busy_s + idle_s <= elapsed_s * (1 + 1e-9)
            assert late or busy_s + idle_s == pytest.approx(elapsed_s)
