"""Queues of batches: exactly once, whatever is done of them and however they are handed on."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evener.data.cursor import Cursor, RangeSet
from evener.data.leases import LeaseBook
from evener.errors import ProtocolError


@given(
    num_samples=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 4),
    holes=st.lists(st.integers(0, 199), max_size=5),
    seed=st.integers(0, 10**6),
)
def test_every_sample_is_retired_once(num_samples, batch_size, world_size, holes, seed):
    assume(len({h for h in holes if h < num_samples}) < num_samples)
    draw = random.Random(seed)
    committed = RangeSet()
    for start in {h for h in holes if h < num_samples}:
        committed.add(start, start + 1)
    cursor = Cursor(num_samples, 0)
    cursor.load_state_dict({**cursor.state_dict(), "committed": committed.to_list()})
    book = LeaseBook(cursor, batch_size, range(world_size))
    seen: list[int] = []
    while book.num_left:
        before = book.num_left
        sizes = [draw.randint(0, 6) for _ in range(world_size)]
        book.fill([max(1, s) for s in sizes], hand_on=draw.random() < 0.3)
        assert book.num_left == before
        for rank in range(world_size):
            queue = book.queue(rank)
            done = queue[: draw.randint(0, len(queue))]
            pieces = book.retire(rank, len(done), sum(p.size for p in done))
            assert tuple(pieces) == done
            for piece in pieces:
                seen += range(piece.start, piece.stop)
                cursor.commit(piece)
    assert sorted(seen) == [i for i in range(num_samples) if i not in holes]
    assert cursor.epoch == 1


def test_queues_are_filled_evenly_for_their_sizes():
    book = LeaseBook(Cursor(60, 0), 2, range(2))
    book.fill([9, 3])
    assert [len(book.queue(r)) for r in range(2)] == [9, 3]
    assert book.queue(1)[0].start < 8, "a short queue is not filled last"
    assert book.num_left == 30


def test_what_is_undone_stays_in_front():
    book = LeaseBook(Cursor(60, 0), 2, range(2))
    book.fill([4, 4])
    queue = book.queue(0)
    book.retire(0, 1, 2)
    book.fill([4, 4])
    assert book.queue(0)[:3] == queue[1:]


def test_only_the_back_of_a_queue_is_handed_on_and_only_when_asked():
    book = LeaseBook(Cursor(24, 0), 2, range(2))
    book.fill([8, 4])
    mine, other = book.queue(0), book.queue(1)
    book.fill([2, 10])
    assert (book.queue(0), book.queue(1)) == (mine, other)
    book.fill([2, 10], hand_on=True)
    assert book.queue(0) == mine[:2]
    assert book.queue(1)[:4] == other
    assert len(book.queue(1)) == 10
    book.fill([1, 1], hand_on=True)
    assert sum(len(book.queue(r)) for r in range(2)) == 12, "nothing is dropped"


def test_a_rank_that_should_hold_nothing_gets_nothing_back():
    book = LeaseBook(Cursor(2, 0), 2, range(3))
    book.fill([1, 0, 0])
    book.fill([0, 0, 1], hand_on=True)
    assert [len(book.queue(r)) for r in range(3)] == [0, 0, 1]


@pytest.mark.parametrize(("num_samples", "sizes"), [(9, [4, 5]), (10, [4, 4, 2]), (1, [1])])
def test_a_single_sample_goes_into_the_batch_before(num_samples, sizes):
    book = LeaseBook(Cursor(num_samples, 0), 4, range(1), avoid_ones=True)
    assert book.num_left == len(sizes)
    book.fill([9])
    assert [p.size for p in book.queue(0)] == sizes
    assert book.num_left == len(sizes)


def test_work_that_was_not_given_is_refused():
    book = LeaseBook(Cursor(10, 0), 4, range(2))
    book.fill([1, 1])
    with pytest.raises(ProtocolError, match="rank 0 has done 2 batches"):
        book.retire(0, 2, 8)
    with pytest.raises(ProtocolError, match="rank 1 has done 1 batches with 3 samples"):
        book.retire(1, 1, 3)


def test_a_rank_that_is_absent_gets_nothing_not_even_what_fits_nowhere():
    book = LeaseBook(Cursor(20, 0), 2, (0, 2))
    book.fill([4, 9, 4])
    book.fill([0, 0, 0], hand_on=True)
    pieces = [piece for rank in (0, 2) for piece in book.queue(rank)]
    assert len(set(pieces)) == 8
    assert book.num_left == 10
