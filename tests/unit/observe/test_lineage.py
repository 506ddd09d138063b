import pytest

from evener.observe.events import make_event
from helpers.event_cases import committed_window, started
from helpers.lineage import check_exactly_once, effective


def test_ranges_may_come_in_any_order() -> None:
    events = [
        started(),
        committed_window(0, committed=[(0, 10)]),
        committed_window(1, committed=[(12, 20), (10, 12)]),
        committed_window(2, epoch=1, committed=[(0, 4), (8, 10)]),
    ]
    assert check_exactly_once(events, 20) == []
    assert check_exactly_once([], 20) == []


@pytest.mark.parametrize(
    "void",
    [
        make_event("run_resumed", t=9.0, window=1, path="step-1", new_data=False),
        make_event("reformed", t=9.0, window=1, generation=2, members=["a"]),
    ],
)
def test_windows_that_were_lost_are_void(void: dict[str, object]) -> None:
    events = [
        committed_window(0, committed=[(0, 10)]),
        committed_window(1, committed=[(10, 20)]),
        committed_window(2, epoch=1, committed=[(0, 10)]),
        void,
        committed_window(1, committed=[(10, 15)]),
        committed_window(2, committed=[(15, 20)]),
    ]
    assert check_exactly_once(events, 20, whole_epochs=1) == []
    assert [event["type"] for event in effective(events)].count("window") == 3


def test_samples_committed_twice_are_named_with_their_windows() -> None:
    events = [committed_window(0, committed=[(0, 10)]), committed_window(1, committed=[(8, 20)])]
    assert check_exactly_once(events, 20) == [
        "epoch 0: [8, 10) is committed twice, by windows 0 and 1"
    ]


def test_gaps_count_in_whole_epochs_only() -> None:
    events = [
        committed_window(0, committed=[(2, 6), (7, 9)]),
        committed_window(1, epoch=1, committed=[(5, 6)]),
    ]
    assert check_exactly_once(events, 10) == [
        "epoch 0: [0, 2) is never committed",
        "epoch 0: [6, 7) is never committed",
        "epoch 0: [9, 10) is never committed",
    ]
    assert check_exactly_once(events, 10, whole_epochs=0) == []
    assert len(check_exactly_once(events, 10, whole_epochs=2)) == 5
    assert check_exactly_once([], 10, whole_epochs=1) == ["epoch 0: [0, 10) is never committed"]


@pytest.mark.parametrize("bad", [(-1, 3), (3, 3), (5, 4), (8, 11)])
def test_ranges_that_cannot_be_are_named(bad: tuple[int, int]) -> None:
    (problem, *_) = check_exactly_once([committed_window(0, committed=[bad])], 10)
    assert f"[{bad[0]}, {bad[1]}), which is no range within 10 samples" in problem


def test_windows_without_an_event_are_named() -> None:
    events = [committed_window(0, committed=[(0, 5)]), committed_window(3, committed=[(5, 10)])]
    assert check_exactly_once(events, 10) == ["windows 1 to 2 are missing"]
