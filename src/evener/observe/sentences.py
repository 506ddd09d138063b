"""Events as sentences for people: in the terminal, in reports and on the dashboard. Pure."""

from typing import Final

from evener.observe.events import Event
from evener.observe.numbers import human_bytes, human_duration

#: The engine itself warns of stragglers; of the others, other lines say enough.
_NOT_IN_TERMINAL: Final = frozenset(
    {"straggler", "straggler_over", "reformed", "healed", "checkpoint_missed", "events_dropped"}
)


def terminal_line(event: Event) -> str | None:
    """Return the line of the terminal about an event; ``None`` for those that get none."""
    # The supervisor reports a failure with its cause; a failure seen here might be a consequence.
    is_failure = event["type"] == "run_finished" and event["reason"] == "failed"
    return None if event["type"] in _NOT_IN_TERMINAL or is_failure else describe(event)


def describe(event: Event) -> str | None:
    """Return what has happened; ``None`` for types of events that are not told one by one."""
    match event["type"]:
        case "eval":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4g}"
            return f"eval {_after_windows(event)}: {event['name']} loss {loss}"
        case "checkpoint":
            return (
                f"checkpoint {event['path']} ({human_bytes(event['num_bytes'])}, "
                f"written in {human_duration(event['write_s'])})"
            )
        case "checkpoint_missed":
            return f"no checkpoint {_after_windows(event)}: {event['reason']}"
        case "straggler":
            since = f", since window {event['since']:,}" if "since" in event else ""
            cause = f": {event['cause']}" if event.get("cause") else ""
            took, usual = (human_duration(event[name]) for name in ("compute_s", "expected_s"))
            return (
                f"straggler: {_who(event)} took {took} for window {event['window']:,} "
                f"instead of {usual}{since}{cause}"
            )
        case "straggler_over":
            return (
                f"{_who(event)} is as fast as before window {event['since']:,} again; windows "
                f"would have ended {human_duration(event['delay_s'])} sooner"
            )
        case "worker_lost":
            return f"lost {_who(event)}: {event['reason']}"
        case "worker_left":
            return f"{_who(event)} left"
        case "worker_joined":
            return f"{_who(event)} joined"
        case "healed":
            return f"{_who(event)} took the state of {event['donor']}"
        case "reformed":
            took = f" in {human_duration(event['reform_s'])}" if "reform_s" in event else ""
            count = len(event["members"])
            return f"the team formed again with {count} rank{'s' if count != 1 else ''}{took}"
        case "parked":
            return f"{_who(event)} is parked: {event['reason']}"
        case "recalled":
            return f"{_who(event)} is back at work: {event['reason']}"
        case "join_refused":
            return f"{event['member']} was refused: {event['reason']}"
        case "events_dropped":
            return f"{event['num_events']:,} events are missing, as the disk was too slow for them"
        case "run_resumed":
            source = f" from {event['path']}" if event["path"] is not None else ""
            return f"resumed {_after_windows(event)}{source}"
        case "run_finished":
            message = f": {event['message']}" if event.get("message") else ""
            return f"{event['reason']} {_after_windows(event)}{message}"
    return None


def _who(event: Event) -> str:
    return f"rank {event['rank']} ({event['member']})"


def _after_windows(event: Event) -> str:
    """Return after how many windows an event happened; a local policy has more steps."""
    return f"after {event['window']:,} window{'s' if event['window'] != 1 else ''}"
