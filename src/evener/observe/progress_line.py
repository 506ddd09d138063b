"""The progress line of the terminal: progress, speed, and each rank's share and wait."""

import math
import os
import shutil
from collections import deque
from contextlib import suppress
from typing import Any, Final, NamedTuple, TextIO

from evener.observe.events import Event, Sink, Totals, mean_loss
from evener.observe.numbers import human_bytes, human_count, human_duration

_LIVE_INTERVAL_S = 0.25  # of event time, between updates of the live line
_PLAIN_INTERVAL_S = 10.0  # of event time, between plain lines
_NUM_FIRST_LINES = 3
SPEED_WINDOWS: Final = 20
"""Windows over which speeds and waits are averaged, and on which the line depends."""

_LOSS_KEPT = 0.8  # of the smoothed loss; the rest is the new one
_BAR_WIDTH = 20
_MAX_RANKS_IN_LINE = 4


class ProgressSink(Sink):
    """Shows progress on a stream: one live line on a terminal, now and then a line elsewhere.

    It has no thread, reads no clock (time is the ``t`` of events) and hides no cursor, so a killed
    run leaves the terminal usable. A stream that breaks is left alone from then on.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to ``stream``, which stays open; usually standard error."""
        self._stream = stream
        self._live = stream.isatty()
        self._state = ProgressFigures(unicode=(stream.encoding or "").lower().startswith("utf"))
        self._num_lines = 0
        self._last_shown_t = float("-inf")
        self._shown = False  # whether the live line is on the screen now
        self._usable = True

    def emit(self, event: Event) -> None:
        """Record an event, and show it if it is due."""
        if not self._usable:
            return
        try:
            self._take(event)
        except (OSError, ValueError):  # a closed pipe or file
            self._usable = False

    def close(self) -> None:
        """Leave the last state on the stream, with a line end."""
        if self._usable:
            with suppress(OSError, ValueError):
                self._end_live()
                self._stream.flush()
        self._usable = False

    def _take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "run_started":
            self._state.start(event["total_windows"], event["unit"])
        elif kind == "window":
            self._state.add(event)
            self._show_window(event["t"])
        else:
            if kind in {"run_resumed", "reformed"}:
                self._state.restart()
            elif kind == "run_finished":
                self._end_live()
            # The engine itself warns of stragglers, even if this line is not shown.
            text = None if kind in {"straggler", "straggler_over"} else describe(event)
            if text is not None:
                self._print_above(text)
            if kind == "eval" and not self._live and self._state.windows:
                self._print_plain(event["t"])

    def _show_window(self, t: float) -> None:
        if self._live:
            if t - self._last_shown_t >= _LIVE_INTERVAL_S:
                self._last_shown_t = t
                self._show_live()
        elif self._num_lines < _NUM_FIRST_LINES or t - self._last_shown_t >= _PLAIN_INTERVAL_S:
            self._print_plain(t)

    def _print_plain(self, t: float) -> None:
        self._num_lines += 1
        self._last_shown_t = t
        self._write(self._state.line() + "\n")

    def _print_above(self, text: str) -> None:
        self._write(text + "\n")
        if self._live and self._state.windows:
            self._show_live()

    def _show_live(self) -> None:
        # Written without rich's console, which ends the process when a pipe breaks.
        from rich.cells import cell_len, chop_cells

        # A line as wide as the terminal would wrap when the cursor moves on.
        most = max(1, _width(self._stream) - 1)
        # Drop the least important parts first; shares and waits matter more than the bar.
        for options in ({"bar": True}, {}, {"brief": True}):
            line = self._state.line(**options)
            if cell_len(line) <= most:
                break
        self._write(chop_cells(line, most)[0])
        self._shown = True

    def _end_live(self) -> None:
        """Leave the line as it is; later output appears below it."""
        if self._live and self._state.windows:
            self._show_live()
            self._stream.write("\n")
        self._live = self._shown = False

    def _write(self, text: str) -> None:
        """Write in place of the live line, if that is on the screen."""
        self._stream.write("\r\x1b[2K" * self._shown + text)
        self._stream.flush()
        self._shown = False


class _Window(NamedTuple):
    """A window that was seen not long ago."""

    t: float
    step: int
    rows: list[Any]
    done: Totals


class ProgressFigures:
    """The figures of the line, kept up window by window.

    Attributes:
        windows: Windows that were seen.
    """

    def __init__(self, *, unicode: bool) -> None:
        """Begin without any; ``unicode`` says whether the bar may have signs beyond ASCII."""
        self._bar = "━─" if unicode else "=-"
        self._total: int | None = None
        self._unit = "samples"
        self._step = 0
        self.windows = 0
        self._loss: float | None = None
        self._recent: deque[_Window] = deque(maxlen=SPEED_WINDOWS)

    def start(self, total: int | None, unit: str) -> None:
        """Record the number of planned windows, and the unit of weights."""
        self._total, self._unit = total, unit

    def add(self, event: Event) -> None:
        """Add a ``window`` event."""
        rows = event["ranks"]
        # A window of local steps says how many optimizer steps there have been.
        self._step = event.get("turns", event["window"] + 1)
        self.windows += 1
        self._recent.append(_Window(event["t"], self._step, rows, Totals().add(rows)))
        loss = mean_loss(event)
        if loss is not None:
            # Show a loss that is not finite once, and do not keep it in the smoothed loss.
            smooth = self._loss is not None and math.isfinite(self._loss) and math.isfinite(loss)
            self._loss = loss + _LOSS_KEPT * ((self._loss or 0.0) - loss) if smooth else loss

    def restart(self) -> None:
        """Forget speeds: the time until the next window is not that of a window."""
        self._recent.clear()

    def line(self, *, bar: bool = False, brief: bool = False) -> str:
        """Return the line, with a bar, or with as little as a narrow terminal has room for."""
        total, unit = self._total, self._unit
        parts = [f"step {self._step:,}" + (f"/{total:,}" if total is not None else "")]
        if bar and total:
            done = min(1.0, self._step / total)
            full, empty = int(done * _BAR_WIDTH) * self._bar[0], _BAR_WIDTH * self._bar[1]
            parts.append(f"{full}{empty[len(full) :]} {int(done * 100)}%")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        # Speed is measured from the oldest remembered commit to the newest.
        recent = list(self._recent)
        seconds, later = recent[-1].t - recent[0].t if recent else 0.0, recent[1:]
        if seconds > 0:
            if unit != "samples":
                weight = sum(window.done.weight for window in later)
                parts.append(f"{human_count(weight / seconds)} {unit}/s")
            if unit == "samples" or not brief:
                samples = sum(window.done.samples for window in later)
                parts.append(f"{human_count(samples / seconds)} samples/s")
            if total is not None and total > self._step:
                num_steps = max(1, self._step - recent[0].step)
                left_s = (total - self._step) * seconds / num_steps
                parts.append(f"ETA {human_duration(left_s)}")
        return "  ".join(parts) + self._ranks(brief=brief)

    def _ranks(self, *, brief: bool) -> str:
        """Share of the newest window and part of recent time spent waiting, for each rank."""
        newest = self._recent[-1] if self._recent else None
        if newest is None or len(newest.rows) < 2:
            return ""
        by_member: dict[str, Totals] = {}
        for window in self._recent:
            for row in window.rows:
                by_member.setdefault(row["member"], Totals()).add([row])
        size = newest.done.samples or 1
        shares = [100 * row["samples"] / size for row in newest.rows]
        waits = [100 * by_member[row["member"]].wait_fraction for row in newest.rows]
        ranks = [row["rank"] for row in newest.rows]
        if len(ranks) > _MAX_RANKS_IN_LINE:
            wait = max(waits)
            return (
                f"  | {len(ranks)} ranks, rank {ranks[waits.index(wait)]} waits most: {wait:.0f}%"
            )
        if brief:
            one, other = ("/".join(f"{part:.0f}" for part in parts) for parts in (shares, waits))
            return f"  | share {one}% wait {other}%"
        return "".join(
            f"  | rank {rank}: {share:.0f}% wait {wait:.0f}%"
            for rank, share, wait in zip(ranks, shares, waits, strict=True)
        )


def describe(event: Event) -> str | None:
    """Return the line for a person about an event; ``None`` for those that get no line."""
    kind = event["type"]
    if kind == "eval":
        return f"eval {after_windows(event)}: {event['name']} loss {_loss(event['loss'])}"
    if kind == "checkpoint":
        return (
            f"checkpoint {event['path']} ({human_bytes(event['num_bytes'])}, "
            f"written in {human_duration(event['write_s'])})"
        )
    if kind == "straggler":
        since = f", since window {event['since']:,}" if "since" in event else ""
        cause = f": {event['cause']}" if event.get("cause") else ""
        return (
            f"straggler: rank {event['rank']} ({event['member']}) took "
            f"{human_duration(event['compute_s'])} for window {event['window']:,} "
            f"instead of {human_duration(event['expected_s'])}{since}{cause}"
        )
    if kind == "straggler_over":
        return (
            f"rank {event['rank']} ({event['member']}) is as fast as before window "
            f"{event['since']:,} again; windows would have ended "
            f"{human_duration(event['delay_s'])} sooner"
        )
    if kind == "worker_lost":
        return f"lost rank {event['rank']} ({event['member']}): {event['reason']}"
    if kind == "worker_left":
        return f"rank {event['rank']} ({event['member']}) left"
    if kind == "worker_joined":
        return f"rank {event['rank']} ({event['member']}) joined"
    if kind == "run_resumed":
        source = f" from {event['path']}" if event["path"] is not None else ""
        return f"resumed {after_windows(event)}{source}"
    # The supervisor reports a failure with its cause; a failure seen here might be a consequence.
    if kind == "run_finished" and event["reason"] != "failed":
        message = f": {event['message']}" if event["message"] else ""
        return f"{event['reason']} {after_windows(event)}{message}"
    return None


def after_windows(event: Event) -> str:
    """Return after how many windows an event happened; a local policy has more steps."""
    return f"after {event['window']:,} window{'s' if event['window'] != 1 else ''}"


def _loss(loss: float | None) -> str:
    return f"{loss:.4g}" if loss is not None else "not finite"


def _width(stream: TextIO) -> int:
    """Return the columns of the terminal that the stream writes to."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
