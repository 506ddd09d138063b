"""Events of a run, as plain dicts: one schema for files, terminal, TensorBoard and reports.

Every event has ``t`` (unix seconds, passed in: no clock is read here) and ``type``. Some have
``rank`` and ``member``. New fields may be added; none changes its meaning.
"""

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Final, NotRequired, final

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from evener.closing import Closing

Event = Mapping[str, Any]

Whole = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(ge=-1e150, le=1e150)]  # products of two are finite
Amount = Annotated[float, Field(ge=0, le=1e150)]

#: The fields of each type of event besides ``t`` and ``type``.
FIELDS: Final = {
    # A run begins with ``window``, also one that resumes; earlier events of it and of later windows
    # are void. ``members`` are in rank order. ``policy`` is such as ``sync`` and ``backend`` such
    # as ``gloo``; ``unit`` is what a weight counts, such as ``tokens``; ``num_samples`` are those
    # of an epoch, ``total_windows`` may be null. The further field ``params`` counts trainable
    # elements, and ``backend_reason`` says why the backend is not the requested one.
    "run_started": "run window members policy backend unit num_samples total_windows",
    # A worker process is ready; ``device`` is a text such as ``cuda:0 (L40S)``. The further field
    # ``emulated`` is the factor by which it is slowed on purpose, if it is.
    "worker_started": "rank member pid host device",
    # The first plan, or one that differs from that before: ``shares`` are whole samples per rank
    # and sum to ``size``. The further field ``reason`` is a text that says why, if that is known.
    "plan": "window generation epoch start size shares",
    # It is known that every rank applied a window. ``window`` is its number over the whole run,
    # ``committed`` are the ranges [start, stop] of the epoch's permutation that it holds, and
    # ``ranks`` has a ``RankRow`` for each rank. Further fields: ``loss``, ``lr``, ``grad_norm``,
    # whether it was ``skipped``, into how many ``update_parts`` ranks divided the update, and which
    # are ``parked``; of local steps also ``anchor``, ``window_s``, ``divergence``, ``guard`` and
    # the ``optimizer_steps`` of the run so far. In a file, the event of a long run may be of
    # several windows (``thinning``): then ``windows`` is how many, and ``window`` the last of them.
    "window": "window generation epoch committed ranks",
    # An evaluation after ``window`` windows: mean loss over ``weight`` units of the set ``name``:
    # ``heldout``, or ``heldout_all`` if that is a part, and all of it is evaluated at the end.
    "eval": "window name loss weight elapsed_s",
    # A managed run has trained an epoch: the fields are those of ``EpochMetrics``.
    "epoch": "window epoch complete avg_loss scalars eval samples steps",
    # A checkpoint of the state after ``window`` windows is complete on disk. Further fields: a
    # thread began to write it at ``begin_t`` (unix seconds) on rank ``rank``, whose training had
    # paused for ``copy_s`` before.
    "checkpoint": "window path num_bytes write_s",
    # The state after ``window`` windows was not written: the attempt failed, or was skipped.
    "checkpoint_missed": "window reason",
    # A member was lost; ``window`` is the one that was under way.
    "worker_lost": "rank member window reason",
    # A member has left on request; its last contribution was to the window before ``window``.
    "worker_left": "rank member window",
    # A member contributes from ``window`` on, in a new generation.
    "worker_joined": "rank member window generation",
    # A member has received the live state of member ``source``, as it was before ``window``.
    "recovered": "rank member window source num_bytes elapsed_s",
    # From ``window`` on a rank has no share, as the planner expects the team to be faster without
    # it; and from ``window`` on it has one again.
    "parked": "rank member window reason",
    "recalled": "rank member window reason",
    # The coordinator has refused a worker, which is not in the team, before ``window``.
    "join_refused": "member window reason",
    # The run resumes with ``window`` from the checkpoint ``path``. With ``new_data`` it continues
    # with other data, from its epoch 0. ``run_started`` follows.
    "run_resumed": "window path new_data",
    # The team formed again and continues with ``window``; earlier events from there on are void.
    # Further fields: ``backend`` and ``backend_reason``, as of ``run_started``; and in seconds,
    # ``detect_s`` from the last heartbeat of a lost member to the end of its generation,
    # ``reform_s`` until the new one was connected, ``recover_s`` until all of its members held the
    # same state. The next ``window`` has ``redo_s``: from there to its commit.
    "reformed": "window generation members",
    # A rank has become slow: it needed ``compute_s`` instead of ``expected_s``. Further fields:
    # ``factor`` times as slow as in its own past, from the window ``since`` on, on ``host`` and
    # ``device``, with the likely ``cause`` as a text; ``delay_s`` are the seconds by which windows
    # would have ended sooner so far.
    "straggler": "rank member window compute_s expected_s",
    # It is as fast as before again, from ``window`` on. It has the further fields of ``straggler``.
    "straggler_over": "rank member window since delay_s",
    # ``num_events`` events were not written here, because the disk was too slow.
    "events_dropped": "num_events",
    # The run ends after ``window`` windows: ``completed``, ``stopped`` or ``failed``.
    "run_finished": "window reason message",
}


class Sink(Closing):
    """Receives events and shows or stores them.

    A sink runs on the training thread, so it must be fast. It must not raise.

    Attributes:
        continues: Whether it appends to what a sink of another process has written. If another rank
            becomes the main process, it emits ``run_started`` again to sinks that do not append.
        on_warning: Prints a warning; set by the team that the sink is given to, unless it has one.
    """

    continues: ClassVar[bool] = False
    on_warning: Callable[[str], None] | None = None

    @abstractmethod
    def emit(self, event: Event) -> None:
        """Receive one event; events come in the order of their ``t``."""

    def pending(self) -> list[threading.Event]:
        """Return events that are set once everything emitted so far is written; do not wait."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Flush and close the output; may be called again."""


def make_event(kind: str, *, t: float, **fields: Any) -> dict[str, Any]:
    """Return an event of a type of ``FIELDS``, with its fields and any others that describe it.

    Args:
        kind: The type of event.
        t: Unix seconds.
        **fields: Its fields (JSON).

    Raises:
        ValueError: A field of its type is missing.
    """
    event = {"t": t, "type": kind, **fields}
    check_complete(event)
    return event


def check_complete(event: Event) -> None:
    """Check that an event has the fields of its type; unknown types are accepted.

    Raises:
        ValueError: One is missing.
    """
    needed = FIELDS.get(event["type"], "").split()
    if missing := [name for name in needed if name not in event]:
        raise ValueError(f"the event {event['type']} lacks {', '.join(missing)}")


@final
class Fanout(Sink):
    """Passes events to several sinks; a sink that raises gets no further ones.

    Args:
        on_warning: Called for a sink that has raised.
    """

    def __init__(self, on_warning: Callable[[str], None]) -> None:
        self._sinks: list[Sink] = []
        self._on_warning = on_warning

    def add(self, sink: Sink) -> None:
        """Pass every further event to this sink, too."""
        sink.on_warning = sink.on_warning or self._on_warning
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Pass the event to every sink."""
        for sink in self._sinks.copy():
            with self._guarding(sink):
                sink.emit(event)

    def introduce(self, start: Event) -> None:
        """Emit ``run_started`` to sinks that are opened during the run, in another process."""
        for sink in self._sinks.copy():
            if not sink.continues:
                with self._guarding(sink):
                    sink.emit(start)

    def pending(self) -> list[threading.Event]:
        """Return the events that all sinks will set."""
        found = []
        for sink in self._sinks.copy():
            with self._guarding(sink):
                found += sink.pending()
        return found

    def close(self) -> None:
        """Close every sink."""
        while self._sinks:
            with self._guarding(self._sinks[-1]) as sink:
                sink.close()
                self._sinks.remove(sink)

    @contextmanager
    def _guarding(self, sink: Sink) -> Iterator[Sink]:
        try:
            yield sink
        except Exception as error:
            self._sinks.remove(sink)
            self._on_warning(
                f"the sink {type(sink).__name__} raised {type(error).__name__} ({error}) and gets "
                "no more events; the run continues"
            )


#: The spans of a rank in a window, in the order in which they begin.
SPANS: Final = ("data", "compute", "wait", "sync")


@with_config(ConfigDict(strict=True, extra="allow", allow_inf_nan=False))
class RankRow(TypedDict):
    """One rank's part of a committed window, in memory and in files.

    Attributes:
        rank: Its rank in that window's generation.
        member: Its id, which stays the same when ranks get new numbers.
        samples: Samples that it processed.
        weight: Their weight (tokens, or samples).
        loss: Its mean loss by weight; ``None`` without work.
        compute_s: Seconds of compute, without waiting.
        wait_s: Seconds in which it waited for other ranks.
        sync_s: Seconds of exchange after all had arrived.
        hidden_s: Seconds for which its gradients travelled during its backward, before that.
        elapsed_s: Seconds on its clock from applying the previous window, or from the beginning of
            the epoch, to applying this one. What is in none of the three times above is
            bookkeeping: fetching data, planning, events, and the rest of the user's loop.
        data_s: Seconds for which it waited for data.
        sent_bytes: Bytes that it sent to other ranks since it applied the previous window.
        work_ago_s: When it requested its first data, in seconds before the ``t`` of the event. It
            computes after ``data_s``; both may consist of several pieces, such as one for each
            micro-batch, and are sums.
        wait_ago_s: When it began to wait for others.
        sync_ago_s: When it began to exchange.
        micro_batches: Number of its micro-batches.
        update_s: Seconds of ``compute_s`` that the optimizer's update took in SYNC. If ranks
            divide the update (``update_parts`` of the event is above 1), those of its own part.
    """

    rank: Whole
    member: str
    samples: Whole
    weight: Amount
    loss: Number | None
    compute_s: Amount
    wait_s: Amount
    sync_s: Amount
    hidden_s: NotRequired[Amount]
    elapsed_s: NotRequired[Amount]  # optional, like the fields after it
    data_s: NotRequired[Amount]
    sent_bytes: NotRequired[Whole]
    work_ago_s: NotRequired[Amount]
    wait_ago_s: NotRequired[Amount]
    sync_ago_s: NotRequired[Amount]
    micro_batches: NotRequired[Whole]
    update_s: NotRequired[Amount]


def wait_fraction(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the fraction of the time of these rows that was spent waiting, from 0 to 1."""
    wait_s = total_s = 0.0
    for row in rows:
        wait_s += row["wait_s"]
        total_s += sum(row.get(f"{span}_s", 0.0) for span in SPANS)
    return wait_s / total_s if total_s > 0 else 0.0


def mean_loss(event: Event) -> float | None:
    """Return the mean loss of a ``window`` event by weight, over all ranks.

    Returns:
        ``None`` without any weight, or if a rank's loss was not finite.
    """
    total, weight = 0.0, 0.0
    for row in event["ranks"]:
        if row["weight"] > 0:
            if row["loss"] is None:
                return None
            total += row["loss"] * row["weight"]
            weight += row["weight"]
    return total / weight if weight > 0 else None
