"""Events as sentences, for the terminal, reports and the dashboard. Pure."""

from typing import Final

from evener.observe.events import Event
from evener.observe.numbers import human_bytes, human_duration

#: Events that the terminal does not print: the engine warns of stragglers and parked ranks, the
#: coordinator of refused workers, and other lines report the rest.
_NOT_IN_TERMINAL: Final = frozenset(
    {"straggler", "straggler_over", "parked", "recalled", "join_refused"}
    | {"checkpoint_missed", "events_dropped"}
)


def terminal_line(event: Event, steps: int | None = None) -> str | None:
    """Return the terminal's line about an event; ``None`` if it is not printed.

    Args:
        event: The event.
        steps: See ``describe``.
    """
    # The supervisor reports a failure with its cause; a failure seen here might be a consequence.
    is_failure = event["type"] == "run_finished" and event["reason"] == "failed"
    return None if event["type"] in _NOT_IN_TERMINAL or is_failure else describe(event, steps)


def steps_before(event: Event, start: Event, newest: Event | None) -> int | None:
    """Return the optimizer steps before an event, if they are known.

    Args:
        event: The event.
        start: The ``run_started`` of its session.
        newest: The newest ``window`` event before it.
    """
    window = event.get("window")
    if start.get("policy") == "sync":
        return window
    is_newest = newest is not None and newest["window"] + 1 == window
    return newest.get("optimizer_steps") if newest is not None and is_newest else None


def describe(event: Event, steps: int | None = None) -> str | None:
    """Return an event as a sentence; ``None`` for types that have none.

    Args:
        event: The event.
        steps: Optimizer steps before it, which users count; by default, windows are named.
    """
    after = _after(event, steps)
    match event["type"]:
        case "eval":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4g}"
            return f"eval {after}: {event['name']} loss {loss}"
        case "checkpoint":
            return (
                f"checkpoint {event['path']} ({human_bytes(event['num_bytes'])}, "
                f"written in {human_duration(event['write_s'])})"
            )
        case "checkpoint_missed":
            return f"no checkpoint {after}: {event['reason']}"
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
            return f"resumed {after}{source}"
        case "run_finished":
            message = f": {event['message']}" if event.get("message") else ""
            return f"{event['reason']} {after}{message}"
    return None


def _who(event: Event) -> str:
    return f"rank {event['rank']} ({event['member']})"


def _after(event: Event, steps: int | None) -> str:
    if steps is not None:
        return f"after step {steps:,}"
    window = event.get("window", 0)
    return f"after {window:,} window{'s' if window != 1 else ''}"
