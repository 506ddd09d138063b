"""What happens in a run, as plain dicts: one schema for files, terminal, TensorBoard and reports.

Every event has ``t`` (unix seconds, handed in: nothing here reads a clock) and ``type``, and where
it has them ``rank`` and ``member``. New fields may be added; none changes its meaning.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from evener.parsing import Fields, short, whole

Event = Mapping[str, Any]


class Sink(ABC):
    """Takes events and shows or stores them.

    A sink runs on the training thread: it is quick, and it never raises into training.
    """

    @abstractmethod
    def emit(self, event: Event) -> None:
        """Take one event; events come in the order of their ``t``."""

    @abstractmethod
    def close(self) -> None:
        """Write out what is held back and let go of the output; may be called again."""

    def __enter__(self) -> "Sink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_fields(value: Any) -> None:
    """Check the fields that readers of events rely on; types and fields that are new pass.

    Raises:
        ValueError: It is not an event, or a field is missing or of the wrong kind.
    """
    event = Fields(value)
    kind = event.text("type")
    event.number("t")
    if kind in ("eval", "reformed", "run_finished", "run_resumed", "window"):
        event.whole("window")
    if kind == "window":
        _check_window(event)
    elif kind == "eval":
        event.number("elapsed_s")
        _check_loss(event)
    elif kind == "run_started":
        event.texts("members")
    elif kind == "run_finished":
        event.text("reason")


def _check_window(event: Fields) -> None:
    event.whole("epoch")
    for part in event.items("committed"):
        if not isinstance(part, list) or len(part) != 2:
            raise ValueError(f"committed holds {short(part)}, not two positions")
        for bound in part:
            whole(bound, "a position of committed")
    for row in event.tables("ranks"):
        row.whole("rank")
        row.text("member")
        row.whole("samples")
        for key in ("weight", "compute_s", "wait_s", "sync_s"):
            row.number(key)
        _check_loss(row)


def _check_loss(fields: Fields) -> None:
    if fields["loss"] is not None:  # what is not finite is written as null
        fields.number("loss")


@final
class Fanout(Sink):
    """Hands events to several sinks; one that raises is left out from then on.

    Args:
        on_warning: Told of a sink that has raised.
    """

    def __init__(self, on_warning: Callable[[str], None]) -> None:
        self._sinks: list[Sink] = []
        self._on_warning = on_warning

    def add(self, sink: Sink) -> None:
        """Hand every further event to this sink, too."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Hand the event to every sink."""
        for sink in self._sinks.copy():
            try:
                sink.emit(event)
            except Exception as error:
                self._sinks.remove(sink)
                self._fail(sink, error)

    def close(self) -> None:
        """Close every sink."""
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                self._fail(sink, error)

    def _fail(self, sink: Sink, error: Exception) -> None:
        self._on_warning(
            f"the sink {type(sink).__name__} raised {type(error).__name__} ({error}) and gets no "
            "more events; the run continues"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank's part of a committed window.

    Attributes:
        rank: Its rank in that window's generation.
        member: Its id, which stays the same when ranks are numbered anew.
        samples: Samples that it did.
        weight: Their weight (tokens, or samples).
        loss: Its mean loss by weight; ``None`` without work.
        compute_s: Seconds of compute, without waiting.
        wait_s: Seconds in which it waited for other ranks.
        sync_s: Seconds of exchange after all had arrived.
    """

    rank: int
    member: str
    samples: int
    weight: float
    loss: float | None
    compute_s: float
    wait_s: float
    sync_s: float

    def to_json(self) -> dict[str, Any]:
        """Return the row as it stands in a ``window`` event."""
        return {
            "rank": self.rank,
            "member": self.member,
            "samples": self.samples,
            "weight": self.weight,
            "loss": self.loss,
            "compute_s": self.compute_s,
            "wait_s": self.wait_s,
            "sync_s": self.sync_s,
        }


def run_started_event(
    *,
    t: float,
    run: str,
    members: Sequence[str],
    policy: str,
    backend: str,
    unit: str,
    num_samples: int,
    total_windows: int | None,
    **details: Any,
) -> dict[str, Any]:
    """A run begins, also one that resumes.

    Args:
        t: Unix seconds.
        run: Name of the run.
        members: Member ids in rank order.
        policy: Apply policy, such as ``sync``.
        backend: What carries the exchange, such as ``gloo``.
        unit: What a weight counts, such as ``tokens``.
        num_samples: Samples of one epoch.
        total_windows: Windows until the planned end, if that is known.
        **details: Anything else that describes the run (JSON).
    """
    return {
        "t": t,
        "type": "run_started",
        "run": run,
        "members": list(members),
        "policy": policy,
        "backend": backend,
        "unit": unit,
        "num_samples": num_samples,
        "total_windows": total_windows,
        **details,
    }


def worker_started_event(
    *, t: float, rank: int, member: str, pid: int, host: str, device: str
) -> dict[str, Any]:
    """A worker process is ready; ``device`` is its name for people, such as ``cuda:0 (L40S)``."""
    return {
        "t": t,
        "type": "worker_started",
        "rank": rank,
        "member": member,
        "pid": pid,
        "host": host,
        "device": device,
    }


def plan_event(
    *,
    t: float,
    window: int,
    generation: int,
    epoch: int,
    start: int,
    size: int,
    shares: Sequence[int],
) -> dict[str, Any]:
    """A window is planned: ``shares`` are whole samples per rank and sum to ``size``."""
    return {
        "t": t,
        "type": "plan",
        "window": window,
        "generation": generation,
        "epoch": epoch,
        "start": start,
        "size": size,
        "shares": list(shares),
    }


def window_event(
    *,
    t: float,
    window: int,
    generation: int,
    epoch: int,
    committed: Sequence[tuple[int, int]],
    ranks: Sequence[RankRow],
) -> dict[str, Any]:
    """A window is committed: it is known that every rank applied it.

    Args:
        t: Unix seconds at which that was known.
        window: Its number over the whole run.
        generation: Period in which membership did not change.
        epoch: The epoch its samples are of.
        committed: Ranges ``(start, stop)`` of the epoch's permutation that it holds.
        ranks: One row per rank.
    """
    return {
        "t": t,
        "type": "window",
        "window": window,
        "generation": generation,
        "epoch": epoch,
        "committed": [list(part) for part in committed],
        "ranks": [row.to_json() for row in ranks],
    }


def mean_loss(event: Event) -> float | None:
    """Return the mean loss of a ``window`` event by weight, over all ranks.

    Returns:
        ``None`` without any weight, or when a rank's loss was lost as it was not finite.
    """
    total, weight = 0.0, 0.0
    for row in event["ranks"]:
        if row["weight"] > 0:
            if row["loss"] is None:
                return None
            total += row["loss"] * row["weight"]
            weight += row["weight"]
    return total / weight if weight > 0 else None


def eval_event(
    *, t: float, window: int, loss: float, weight: float, elapsed_s: float, name: str = "heldout"
) -> dict[str, Any]:
    """An evaluation after ``window`` windows: mean loss over ``weight`` units of set ``name``."""
    return {
        "t": t,
        "type": "eval",
        "window": window,
        "name": name,
        "loss": loss,
        "weight": weight,
        "elapsed_s": elapsed_s,
    }


def checkpoint_event(
    *, t: float, window: int, path: str, num_bytes: int, write_s: float
) -> dict[str, Any]:
    """A checkpoint of the state after ``window`` windows is whole on disk."""
    return {
        "t": t,
        "type": "checkpoint",
        "window": window,
        "path": path,
        "num_bytes": num_bytes,
        "write_s": write_s,
    }


def checkpoint_missed_event(*, t: float, window: int, reason: str) -> dict[str, Any]:
    """The state after ``window`` windows was not written: the attempt failed, or was left out."""
    return {"t": t, "type": "checkpoint_missed", "window": window, "reason": reason}


def worker_lost_event(
    *, t: float, rank: int, member: str, window: int, reason: str
) -> dict[str, Any]:
    """A member is gone; ``window`` is the one that was under way."""
    return {
        "t": t,
        "type": "worker_lost",
        "rank": rank,
        "member": member,
        "window": window,
        "reason": reason,
    }


def worker_joined_event(
    *, t: float, rank: int, member: str, window: int, generation: int
) -> dict[str, Any]:
    """A member contributes from ``window`` on, in a new generation."""
    return {
        "t": t,
        "type": "worker_joined",
        "rank": rank,
        "member": member,
        "window": window,
        "generation": generation,
    }


def healed_event(
    *, t: float, rank: int, member: str, window: int, donor: str, num_bytes: int, elapsed_s: float
) -> dict[str, Any]:
    """A member took the live state of member ``donor``, as it was before ``window``."""
    return {
        "t": t,
        "type": "healed",
        "rank": rank,
        "member": member,
        "window": window,
        "donor": donor,
        "num_bytes": num_bytes,
        "elapsed_s": elapsed_s,
    }


def run_resumed_event(
    *, t: float, window: int, path: str | None, new_data: bool = False
) -> dict[str, Any]:
    """The run goes on with ``window``; earlier events of it and of later windows are void.

    Args:
        t: Unix seconds.
        window: The first window of this session.
        path: The checkpoint.
        new_data: It goes on with other data, from its epoch 0 on.
    """
    return {"t": t, "type": "run_resumed", "window": window, "path": path, "new_data": new_data}


def reformed_event(
    *, t: float, window: int, generation: int, members: Sequence[str]
) -> dict[str, Any]:
    """The team formed anew and goes on with ``window``; earlier events from there on are void."""
    return {
        "t": t,
        "type": "reformed",
        "window": window,
        "generation": generation,
        "members": list(members),
    }


def straggler_event(
    *, t: float, rank: int, member: str, window: int, compute_s: float, expected_s: float
) -> dict[str, Any]:
    """A rank needed ``compute_s`` for a share for which ``expected_s`` were planned."""
    return {
        "t": t,
        "type": "straggler",
        "rank": rank,
        "member": member,
        "window": window,
        "compute_s": compute_s,
        "expected_s": expected_s,
    }


def run_finished_event(
    *, t: float, window: int, reason: str, message: str | None = None
) -> dict[str, Any]:
    """The run ends after ``window`` windows: ``completed``, ``stopped`` or ``failed``."""
    return {
        "t": t,
        "type": "run_finished",
        "window": window,
        "reason": reason,
        "message": message,
    }
