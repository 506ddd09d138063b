"""Which samples are in the final parameters, read from the events of a run."""

from collections.abc import Iterable, Sequence

from evener.observe.events import Event
from evener.observe.table import VOIDING


def effective(events: Iterable[Event]) -> list[Event]:
    """Return the events of a run without ``window`` events that a later one made void."""
    kept: list[Event] = []
    for event in events:
        if event["type"] in VOIDING:
            kept = [
                one for one in kept if one["type"] != "window" or one["window"] < event["window"]
            ]
        kept.append(event)
    return kept


def check_exactly_once(
    events: Iterable[Event], num_samples: int, *, whole_epochs: int | None = None
) -> list[str]:
    """Say what is wrong with the data that a run has seen.

    Args:
        events: All events of a run, in the order they were written; ranges are checked from the
            last resume with other data on.
        num_samples: Samples of one epoch.
        whole_epochs: So many epochs, from epoch 0, must be whole. By default all but the last one
            that was begun, in which a run may have been stopped.

    Returns:
        One sentence per problem: samples committed twice, never, or that do not exist; windows
        that are missing or there twice, or that name a generation in which other members were.
        Empty when every sample was seen exactly once.
    """
    counted = effective(events)
    problems = _window_problems(
        [
            number
            for event in counted
            if event["type"] == "window"
            for number in range(event["window"] - event.get("windows", 1) + 1, event["window"] + 1)
        ]
    )
    problems += _member_problems(counted)
    by_epoch = _ranges_by_epoch(counted)
    if whole_epochs is None:
        whole_epochs = max(by_epoch, default=0)
    for epoch in sorted({*by_epoch, *range(whole_epochs)}):
        ranges = sorted(by_epoch.get(epoch, []))
        problems += _range_problems(epoch, ranges, num_samples, whole=epoch < whole_epochs)
    return problems


def _ranges_by_epoch(events: Iterable[Event]) -> dict[int, list[tuple[int, int, int]]]:
    """Return ``(start, stop, window)`` by epoch of the last data."""
    by_epoch: dict[int, list[tuple[int, int, int]]] = {}
    for event in events:
        if event.get("new_data"):
            by_epoch.clear()
        if event["type"] == "window":
            ranges = by_epoch.setdefault(event["epoch"], [])
            ranges += [(start, stop, event["window"]) for start, stop in event["committed"]]
    return by_epoch


def _window_problems(numbers: Sequence[int]) -> list[str]:
    problems: list[str] = []
    expected = 0
    for number in sorted(numbers):
        if number < expected:
            problems.append(f"window {number} is committed twice")
        elif number > expected:
            problems.append(f"windows {expected} to {number - 1} are missing")
        expected = max(expected, number + 1)
    return problems


def _member_problems(events: Iterable[Event]) -> list[str]:
    problems: list[str] = []
    members: dict[int, set[str]] = {}
    for event in events:
        if event["type"] == "reformed":
            members[event["generation"]] = set(event["members"])
        elif event["type"] == "window" and event.get("generation") in members:
            rows = {row["member"] for row in event.get("ranks", ())}
            if others := sorted(rows - members[event["generation"]]):
                problems.append(
                    f"window {event['window']} names generation {event['generation']}, to which "
                    f"{', '.join(others)} did not belong"
                )
    return problems


def _range_problems(
    epoch: int, ranges: Sequence[tuple[int, int, int]], num_samples: int, *, whole: bool
) -> list[str]:
    problems: list[str] = []
    reached, reached_by = 0, -1
    for start, stop, window in ranges:
        if not 0 <= start < stop <= num_samples:
            problems.append(
                f"epoch {epoch}: window {window} committed [{start}, {stop}), "
                f"which is no range within {num_samples} samples"
            )
        if start < reached:
            problems.append(
                f"epoch {epoch}: [{start}, {min(stop, reached)}) is committed twice, "
                f"by windows {reached_by} and {window}"
            )
        elif start > reached and whole:
            problems.append(f"epoch {epoch}: [{reached}, {start}) is never committed")
        if stop > reached:
            reached, reached_by = stop, window
    if whole and reached < num_samples:
        problems.append(f"epoch {epoch}: [{reached}, {num_samples}) is never committed")
    return problems
