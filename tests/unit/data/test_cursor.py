"""The cursor hands out every sample of an epoch exactly once, whatever happens on the way."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.data.cursor import Cursor, RangeSet, Slice, derive_seed
from evener.errors import CheckpointError, UsageError

# ── derive_seed ──────────────────────────────────────────────────────────────────────────────────


def test_derived_seeds_are_the_same_everywhere_and_for_ever():
    assert derive_seed() == 6510301506637419378
    assert derive_seed(0) == 4774516902939907285
    assert derive_seed(1, 2, "x") == 2522615864346615279


def test_derived_seeds_tell_their_parts_apart():
    numbers = [(), (0,), (0, 0), (-1,), (1, 2), (2, 1), (12,), (2**200,)]
    texts = [("0",), ("",), ("a", "bc"), ("ab", "c"), ("abc",)]
    seeds = [derive_seed(*parts) for parts in (*numbers, *texts)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


# ── RangeSet ─────────────────────────────────────────────────────────────────────────────────────


@given(pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=20))
def test_range_set_agrees_with_a_set(pairs):
    ranges, model = RangeSet(), set()
    for start, size in pairs:
        new = set(range(start, start + size))
        if not new & model:
            ranges.add(start, start + size)
            model |= new
    assert ranges.total == len(model)
    for limit in (max(model, default=-1) + 1, 45):
        missing = [number for gap in ranges.gaps(limit) for number in gap]
        assert missing == [number for number in range(limit) if number not in model]
    held = ranges.to_list()
    for (_, stop), (start, _) in itertools.pairwise(held):
        assert stop < start, "ranges must be sorted, disjoint and merged"
    assert RangeSet(json.loads(json.dumps(held))).to_list() == held


# ── Cursor ───────────────────────────────────────────────────────────────────────────────────────


def cursor_at(num_samples: int, epoch: int, committed: list[list[int]]) -> Cursor:
    cursor = Cursor(num_samples, seed=0)
    cursor.load_state_dict({**cursor.state_dict(), "epoch": epoch, "committed": committed})
    return cursor


def committed_of(cursor: Cursor) -> RangeSet:
    return RangeSet(cursor.state_dict()["committed"])


def test_windows_are_consecutive_slices():
    cursor = Cursor(10, seed=0)
    assert cursor.num_windows(4) == 3
    slices = [cursor.take(4), cursor.take(4), cursor.take(4)]
    assert slices == [Slice(0, 0, 4), Slice(0, 4, 4), Slice(0, 8, 2)]
    assert cursor.take(4) is None
    assert cursor.leases == tuple(slices)
    for lease in slices:
        cursor.commit(lease)
    assert (cursor.epoch, cursor.leases) == (1, ())
    assert cursor.take(4) is None, "planning moves to the next epoch with begin() only"
    assert cursor.begin(1) is True
    assert cursor.take(4) == Slice(1, 0, 4)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 9)),
        st.tuples(st.just("commit"), st.integers(0, 5)),
        st.just(("release", 0)),
        st.just(("reload", 0)),
    ),
    max_size=60,
)


@given(num_samples=st.integers(1, 40), actions=ACTIONS, batch_size=st.integers(1, 9))
def test_every_position_is_committed_once_whatever_happens(num_samples, actions, batch_size):
    cursor = Cursor(num_samples, seed=5)
    done: list[int] = []
    for action, argument in actions:
        if action == "take":
            lease = cursor.take(argument)
            if lease is not None:
                assert lease.size <= argument
        elif action == "commit" and cursor.leases:
            lease = cursor.leases[argument % len(cursor.leases)]
            cursor.commit(lease)
            done += range(lease.start, lease.stop)
        elif action == "release":
            cursor.release()
            assert cursor.leases == ()
        elif action == "reload" and cursor.epoch == 0:
            state = json.loads(json.dumps(cursor.state_dict()))
            cursor = Cursor(num_samples, seed=5)
            cursor.load_state_dict(state)
        leased = [position for s in cursor.leases for position in range(s.start, s.stop)]
        assert len(set(done + leased)) == len(done + leased)
        if cursor.epoch == 0:
            assert committed_of(cursor).total == len(done)
    cursor.release()
    if cursor.epoch == 0:
        while (lease := cursor.take(batch_size)) is not None:
            cursor.commit(lease)
            done += range(lease.start, lease.stop)
    assert sorted(done) == list(range(num_samples))
    assert cursor.is_committed(0)


def test_state_is_plain_and_holds_no_rank_count():
    cursor = Cursor(10, seed=3)
    cursor.commit(cursor.take(4))
    cursor.take(4)
    assert cursor.state_dict() == {
        "num_samples": 10,
        "seed": 3,
        "epoch": 0,
        "committed": [[0, 4]],
    }


def test_gaps_are_leased_first():
    cursor = cursor_at(20, epoch=2, committed=[[3, 5], [9, 20]])
    taken = [cursor.take(4) for _ in range(3)]
    assert taken == [Slice(2, 0, 3), Slice(2, 5, 4), None]


def test_a_sample_cannot_be_committed_twice():
    cursor = Cursor(10, seed=0)
    lease = cursor.take(3)
    cursor.commit(lease)
    with pytest.raises(KeyError):
        cursor.commit(lease)
    with pytest.raises(KeyError):
        cursor.commit(Slice(0, 3, 3))
    assert committed_of(cursor).to_list() == [[0, 3]]


@pytest.mark.parametrize("piece", [Slice(0, 0, 1), Slice(0, 2, 2), Slice(0, 5, 3), Slice(0, 9, 2)])
def test_what_is_leased_or_committed_cannot_be_leased(piece):
    cursor = cursor_at(10, epoch=0, committed=[[0, 3]])
    assert cursor.take(3) == Slice(0, 3, 3)
    with pytest.raises(UsageError, match="count twice"):
        cursor.lease(piece)
    cursor.lease(Slice(0, 7, 2))
    assert [cursor.take(9), cursor.take(9)] == [Slice(0, 6, 1), Slice(0, 9, 1)]


def test_begin_of_a_committed_epoch_yields_nothing():
    cursor = cursor_at(10, epoch=3, committed=[[0, 4]])
    for epoch in range(3):
        assert cursor.is_committed(epoch)
        assert cursor.begin(epoch) is False
        assert cursor.take(4) is None
    assert cursor.begin(3) is True
    assert cursor.take(4) == Slice(3, 4, 4)


@pytest.mark.parametrize("committing", [False, True])
def test_begin_names_the_unfinished_epoch(committing):
    cursor = Cursor(10, seed=0)
    lease = cursor.take(4)
    if committing:
        cursor.commit(lease)
    with pytest.raises(UsageError, match=r"epoch 1 cannot begin: epoch 0 has \d of 10 samples"):
        cursor.begin(1)
    rest = cursor.take(10)
    assert rest is not None
    assert rest.epoch == 0


def test_an_epoch_that_nobody_began_may_be_passed_over():
    cursor = Cursor(10, seed=0)
    assert cursor.begin(4) is True
    assert cursor.is_committed(3)
    assert cursor.take(4) == Slice(4, 0, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 11}, "num_samples=11 .* this run has num_samples=10"),
        ({"seed": 1}, "seed=1, this run has .* seed=0"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_state_of_another_run_is_refused(changes, message):
    cursor = Cursor(10, seed=0)
    cursor.commit(cursor.take(2))
    before = cursor.state_dict()
    with pytest.raises(CheckpointError, match=message):
        cursor.load_state_dict({**before, **changes})
    assert cursor.state_dict() == before
    missing = {name: value for name, value in before.items() if name not in changes}
    with pytest.raises(CheckpointError):
        cursor.load_state_dict(missing)
