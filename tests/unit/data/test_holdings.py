"""What a cache keeps and lets go, as a function of sizes, uses and free memory."""

from hypothesis import given
from hypothesis import strategies as st

from evener.data.holdings import Holdings


def test_nothing_is_held_before_free_memory_is_known():
    held = Holdings()
    assert not held.admit(1, 10)
    assert 1 not in held
    assert held.is_full


def test_the_least_used_go_first_and_only_as_many_as_needed():
    held = Holdings()
    held.fit(1000)
    for index in range(4):
        assert held.admit(index, 100)
    for index in (0, 0, 1, 3, 3):
        held.use(index)
    assert held.fit(400) == []
    assert not held.is_full
    assert held.fit(299) == [2, 1]
    assert held.is_full
    assert (len(held), held.num_bytes) == (2, 200)
    assert 0 in held
    assert 3 in held


@given(st.integers(1, 5), st.integers(1000, 100_000), st.integers(1, 50))
def test_caches_that_share_memory_leave_as_much_free_as_each_holds(num_caches, total, size):
    caches = [Holdings() for _ in range(num_caches)]

    def free():
        return total - sum(held.num_bytes for held in caches)

    for index in range(2 * total // size):
        for held in caches:
            assert held.fit(free()) == []
            held.admit(index, size)
            assert held.num_bytes <= free()
    for held in caches:
        assert held.is_full
        assert held.num_bytes > total / (num_caches + 1) - 2 * num_caches * size


@given(st.lists(st.integers(0, 500), min_size=1))
def test_whatever_others_take_no_more_is_held_than_is_free(measured):
    held = Holdings()
    for index, free_bytes in enumerate(measured):
        gone = held.fit(free_bytes)
        assert held.num_bytes <= free_bytes
        assert not [one for one in gone if one in held]
        held.admit(index, 7)
