"""The progress line of the terminal: progress, speed, and each rank's share and wait."""

import math
import os
import shutil
from collections import deque
from contextlib import suppress
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

from evener.observe.events import Event, Sink
from evener.observe.numbers import human_count, human_duration
from evener.observe.sentences import steps_before, terminal_line
from evener.observe.table import VOIDING, RunTable, wait_parts
from evener.observe.team_change import TeamChange

_LIVE_INTERVAL_S = 0.25  # of event time, between updates of the live line
_PLAIN_INTERVAL_S = 10.0  # of event time, between plain lines
_NUM_FIRST_LINES = 3
SPEED_WINDOWS: Final = 20
"""Windows over which speeds and waits are averaged."""

_LOSS_KEPT = 0.8  # of the smoothed loss; the rest is the new one
_BAR_WIDTH = 20
_MAX_RANKS_IN_LINE = 4


class ProgressSink(Sink):
    """Shows progress on a stream: one live line on a terminal, now and then a line elsewhere.

    It has no thread, reads no clock (time is the ``t`` of events) and hides no cursor, so a killed
    run leaves the terminal usable. After an error of the stream, nothing is written any more.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to ``stream``, which stays open; usually standard error."""
        self._stream = stream
        self._live = stream.isatty()
        self._bar = "━─" if (stream.encoding or "").lower().startswith("utf") else "=-"
        self._start: Event = {}
        #: The newest windows, and what makes windows void.
        self._recent: deque[Event] = deque(maxlen=SPEED_WINDOWS)
        self._newest: Event | None = None
        self._change: TeamChange | None = None
        self._num_lines = 0
        self._last_plain = ""
        self._last_shown_t = float("-inf")
        self._has_begun = False  # whether a window was committed
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
                self._describe_change()
                self._end_live()
                self._stream.flush()
        self._usable = False

    def _take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "run_started":
            self._start = event
        if kind in TeamChange.KINDS:
            self._take_change(event)
        if kind == "window" or kind in VOIDING:
            self._recent.append(event)
        if kind == "window":
            self._has_begun, self._newest = True, event
            self._show_window(event["t"])
        elif kind not in TeamChange.KINDS:
            if kind == "run_finished":
                self._describe_change()
                self._end_live()
            text = terminal_line(event, steps_before(event, self._start, self._newest))
            if text is not None:
                self._print_above(text)
            if kind == "eval" and not self._live and self._has_begun:
                self._print_plain(event["t"])

    def _take_change(self, event: Event) -> None:
        """Gather the events of a change of the team, which is printed with the next window."""
        if self._change is not None and not self._change.takes(event):
            self._describe_change()
        if self._change is None and event["type"] != "window":
            self._change = TeamChange()
        if self._change is not None:
            self._change.add(event)
            if event["type"] == "window":
                self._describe_change()

    def _describe_change(self) -> None:
        change, self._change = self._change, None
        if change is not None:
            self._print_above(change.summary()["text"])

    def _show_window(self, t: float) -> None:
        if self._live:
            if t - self._last_shown_t >= _LIVE_INTERVAL_S:
                self._last_shown_t = t
                self._show_live()
        elif self._num_lines < _NUM_FIRST_LINES or t - self._last_shown_t >= _PLAIN_INTERVAL_S:
            self._print_plain(t)

    def _print_plain(self, t: float) -> None:
        self._last_shown_t = t
        line = progress_line(RunTable.of(self._recent), self._start)
        if line != self._last_plain:  # an evaluation may follow the window of the last line
            self._num_lines += 1
            self._last_plain = line
            self._write(line + "\n")

    def _print_above(self, text: str) -> None:
        self._write(text + "\n")
        if self._live and self._has_begun:
            self._show_live()

    def _show_live(self) -> None:
        # Written without rich's console, which ends the process when a pipe breaks.
        from rich.cells import cell_len, chop_cells

        # A line as wide as the terminal would wrap when the cursor moves.
        most = max(1, _width(self._stream) - 1)
        table = RunTable.of(self._recent)
        # Drop the least important parts first; shares and waits matter more than the bar.
        for bar, brief in ((self._bar, 0), ("", 0), ("", 1), ("", 2), ("", 3)):
            line = progress_line(table, self._start, bar=bar, brief=brief)
            if cell_len(line) <= most:
                break
        self._write(chop_cells(line, most)[0])
        self._shown = True

    def _end_live(self) -> None:
        """Leave the line as it is; later output appears below it."""
        if self._live and self._has_begun:
            self._show_live()
            self._stream.write("\n")
        self._live = self._shown = False

    def _write(self, text: str) -> None:
        """Write in place of the live line, if that is on the screen."""
        self._stream.write("\r\x1b[2K" * self._shown + text)
        self._stream.flush()
        self._shown = False


def progress_line(table: RunTable, start: Event, *, bar: str = "", brief: int = 0) -> str:
    """Return the line; an empty one without windows.

    Args:
        table: The windows, at least the newest ``SPEED_WINDOWS``.
        start: The newest ``run_started``.
        bar: Show a bar of these two signs, for the completed and the remaining part.
        brief: What to leave out for a narrow terminal: from 1 on the ranks' names and a second
            speed, from 2 on the remaining time, from 3 on also the loss.
    """
    if not len(table):
        return ""
    total, unit = start.get("total_windows"), start.get("unit") or "samples"
    counted = np.arange(len(table)) >= len(table) - SPEED_WINDOWS
    # The time between two sessions is not that of a window.
    counted &= table.rows()["session"] == table.rows()["session"][-1]
    rows = {name: values[counted] for name, values in table.rows().items()}
    steps = rows["optimizer_steps"]
    step, losses = int(steps[-1]), rows["loss"][rows["weight"] > 0].tolist()
    parts = [f"step {step:,}" + (f"/{total:,}" if total is not None else "")]
    if bar and total:
        done = min(1.0, step / total)
        full, empty = int(done * _BAR_WIDTH) * bar[0], _BAR_WIDTH * bar[1]
        parts.append(f"{full}{empty[len(full) :]} {int(done * 100)}%")
    if losses and brief < 3:  # windows without weight have none
        parts.append(f"loss {_smoothed(losses):.4g}")
    # Speed is measured from the oldest of these commits to the newest.
    seconds = float(rows["end_s"][-1] - rows["end_s"][0])
    if seconds > 0:
        if unit != "samples":
            parts.append(f"{human_count(rows['weight'][1:].sum() / seconds)} {unit}/s")
        if unit == "samples" or not brief:
            parts.append(f"{human_count(rows['samples'][1:].sum() / seconds)} samples/s")
        if total is not None and total > step and brief < 2:
            left_s = (total - step) * seconds / max(1.0, float(steps[-1] - steps[0]))
            parts.append(f"ETA {human_duration(left_s)}")
    return "  ".join(parts) + _ranks(table, counted, brief=brief > 0)


def _smoothed(losses: list[float]) -> float:
    """Return a smoothed loss; one that is not finite is shown once, without smoothing."""
    smooth = losses[0]
    for loss in losses[1:]:
        is_usable = math.isfinite(smooth) and math.isfinite(loss)
        smooth = loss + _LOSS_KEPT * (smooth - loss) if is_usable else loss
    return smooth


def _ranks(table: RunTable, counted: NDArray[np.bool_], *, brief: bool) -> str:
    """Return each rank's share of the newest window, and its wait as a fraction of recent time."""
    lanes = table.present
    if len(lanes) < 2:
        return ""
    samples = table.parts()["samples"][-len(lanes) :]
    shares = 100 * samples / (samples.sum() or 1)
    waits = 100 * np.nan_to_num(wait_parts(table.lane_sums(counted))[lanes])
    ranks = [table.ranks[lane] for lane in lanes]
    if len(ranks) > _MAX_RANKS_IN_LINE:
        most = int(waits.argmax())
        return f"  | {len(ranks)} ranks, rank {ranks[most]} waits most: {waits[most]:.0f}%"
    if brief:
        one, other = ("/".join(f"{part:.0f}" for part in parts) for parts in (shares, waits))
        return f"  | share {one}% wait {other}%"
    return "".join(
        f"  | rank {rank}: {share:.0f}% wait {wait:.0f}%"
        for rank, share, wait in zip(ranks, shares, waits, strict=True)
    )


def _width(stream: TextIO) -> int:
    """Return the columns of the terminal that the stream writes to."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
