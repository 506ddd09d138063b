"""A hint is compared with measured speeds once for each rank, when these are solid."""

import pytest

from evener.planning.hints import HintWatch


def windows(watch: HintWatch, number: int, worked: list[bool], speeds: list[float]):
    return [found for _ in range(number) for found in watch.observe(worked, speeds)]


def test_a_hint_the_wrong_way_round_is_told_once_for_each_rank_with_both_numbers():
    watch = HintWatch((1.0, 3.0))
    assert windows(watch, 4, [True, True], [30.0, 10.0]) == [], "not yet solid"
    first, second = windows(watch, 30, [True, True], [30.0, 10.0])
    assert "gives rank 0 25% of the speed" in first
    assert "it has 75% (5 windows)" in first
    assert "gives rank 1 75% of the speed" in second
    assert "it has 25% (5 windows)" in second
    assert watch.is_done


@pytest.mark.parametrize("speeds", [[10.0, 4.35], [10.0, 1.4], [10.0, 6.5], [1.0, 0.4]])
def test_a_hint_that_is_roughly_right_is_not(speeds: list[float]):
    watch = HintWatch((2.3, 1.0))
    assert windows(watch, 30, [True, True], speeds) == []
    assert watch.is_done


def test_a_rank_far_slower_than_hinted_is_told():
    watch = HintWatch((2.0, 1.0))
    (found,) = windows(watch, 5, [True, True], [100.0, 2.0])
    assert "gives rank 1 " in found


def test_a_rank_without_work_is_compared_when_it_has_had_some():
    watch = HintWatch((1.0, 1.0, 0.01))
    assert windows(watch, 20, [True, True, False], [10.0, 10.0, 0.0]) == []
    assert not watch.is_done
    (found,) = windows(watch, 20, [True, True, True], [10.0, 10.0, 10.0])
    assert "gives rank 2 " in found
    assert "it has 33% (5 windows)" in found
    alone = HintWatch((1.0, 1.0))
    assert windows(alone, 20, [True, False], [10.0, 0.0]) == [], "nothing to compare it with"
    assert not alone.is_done
    windows(alone, 80, [True, False], [10.0, 0.0])
    assert alone.is_done
