"""A change of an elastic team: its events as one sentence, with what it cost. Pure."""

from typing import Any, Final

from evener.observe.events import Event
from evener.observe.numbers import human_duration

_STEPS: Final = {
    "detect_s": "until it was noticed",
    "reform_s": "until the team had formed again",
    "recover_s": "to send the state",
    "redo_s": "until the next window was committed",
}
"""Seconds that a change takes, in their order; events lack unknown ones."""

_NAMED: Final = 3


class TeamChange:
    """Collects the events of one change: losses, the re-formed team, its states, and joins.

    It ends with the next window.
    """

    KINDS: Final = frozenset(
        {"worker_lost", "worker_left", "reformed", "recovered", "worker_joined", "window"}
    )
    """The types of these events, in the order in which they come."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[Event]] = {kind: [] for kind in self.KINDS}

    def takes(self, event: Event) -> bool:
        """Return whether an event may belong to this change."""
        begun = self._by_kind["reformed"]
        is_first = event["type"] in ("worker_lost", "worker_left", "reformed")
        return not self._by_kind["window"] and not (begun and is_first)

    def add(self, event: Event) -> None:
        """Take an event."""
        self._by_kind[event["type"]].append(event)

    def summary(self) -> dict[str, Any]:
        """Return the kind of the change, its cost in seconds, and the sentence."""
        lost, left, joined = (
            self._by_kind[kind] for kind in ("worker_lost", "worker_left", "worker_joined")
        )
        parts = []
        if lost:
            why = f": {lost[0]['reason']}" if lost[0].get("reason") else ""
            parts.append(f"lost {_who(lost)}{why}")
        if left:
            parts.append(f"{_who(left)} left")
        parts += [
            f"the team formed again with {_count(event['members'])}"
            for event in self._by_kind["reformed"][-1:]
        ]
        if joined:
            source = next((event["source"] for event in self._by_kind["recovered"]), None)
            state = f" with the state of {source}" if source else ""
            parts.append(f"{_who(joined)} joined{state}")
        spent = self._spent()
        cost_s = sum(spent.values()) if spent else None
        text = "; ".join(parts)
        if cost_s is not None:
            steps = ", ".join(f"{human_duration(s)} {_STEPS[name]}" for name, s in spent.items())
            text += f"; it cost {human_duration(cost_s)} ({steps})"
        kind = "loss" if lost else "leave" if left else "join"
        first = next(iter([*lost, *left, *joined]), {})
        return {
            "type": "team_changed",
            "kind": kind,
            "rank": first.get("rank"),
            "member": first.get("member"),
            "cost_s": cost_s,
            "text": text,
        }

    def _spent(self) -> dict[str, float]:
        events = [*self._by_kind["reformed"], *self._by_kind["window"]]
        found: dict[str, float] = {}
        for name in _STEPS:
            for event in events:
                if event.get(name):
                    found[name] = found.get(name, 0.0) + event[name]
        return found


def _who(events: list[Event]) -> str:
    named = [f"rank {event['rank']} ({event['member']})" for event in events[:_NAMED]]
    further = len(events) - len(named)
    return " and ".join([*named, *([f"{further} more"] if further else [])])


def _count(members: list[str]) -> str:
    return f"{len(members)} rank{'s' if len(members) != 1 else ''}"
