"""A hint is compared with measured speeds once for each rank, when these are solid."""

import pytest

from evener.planning.hints import Contradiction, HintWatch


def windows(watch: HintWatch, number: int, worked: list[bool], speeds: list[float]):
    return [found for _ in range(number) for found in watch.observe(worked, speeds)]


def test_a_hint_the_wrong_way_round_is_told_once_for_each_rank_with_both_numbers():
    watch = HintWatch((1.0, 3.0))
    assert windows(watch, 4, [True, True], [30.0, 10.0]) == [], "not yet solid"
    assert windows(watch, 30, [True, True], [30.0, 10.0]) == [
        Contradiction(0, pytest.approx(0.25), pytest.approx(0.75), 5),
        Contradiction(1, pytest.approx(0.75), pytest.approx(0.25), 5),
    ]
    assert watch.is_done


@pytest.mark.parametrize("speeds", [[10.0, 4.35], [10.0, 1.4], [10.0, 6.5], [1.0, 0.4]])
def test_a_hint_that_is_roughly_right_is_not(speeds: list[float]):
    watch = HintWatch((2.3, 1.0))
    assert windows(watch, 30, [True, True], speeds) == []
    assert watch.is_done


def test_a_rank_far_slower_than_hinted_is_told():
    watch = HintWatch((2.0, 1.0))
    assert [found.rank for found in windows(watch, 5, [True, True], [100.0, 2.0])] == [1]


def test_a_rank_without_work_is_compared_when_it_has_had_some():
    watch = HintWatch((1.0, 1.0, 0.01))
    assert windows(watch, 20, [True, True, False], [10.0, 10.0, 0.0]) == []
    assert not watch.is_done
    (found,) = windows(watch, 20, [True, True, True], [10.0, 10.0, 10.0])
    assert (found.rank, found.windows) == (2, 5)
    assert found.measured == pytest.approx(1 / 3)
    alone = HintWatch((1.0, 1.0))
    assert windows(alone, 20, [True, False], [10.0, 0.0]) == [], "nothing to compare it with"
    assert not alone.is_done
    windows(alone, 80, [True, False], [10.0, 0.0])
    assert alone.is_done
