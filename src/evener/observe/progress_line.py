"""The progress line of the terminal: progress, speed, and each rank's share and wait."""

import math
import os
import shutil
from collections import deque
from contextlib import suppress
from typing import Final, TextIO

from evener.observe.events import Event, Sink, mean_loss
from evener.observe.numbers import human_count, human_duration
from evener.observe.sentences import terminal_line
from evener.observe.table import RunTable, wait_parts

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
        self._state.add(event)
        if kind == "window":
            self._show_window(event["t"])
        else:
            if kind == "run_finished":
                self._end_live()
            text = terminal_line(event)
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


class ProgressFigures:
    """The figures of the line, from the newest windows.

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
        self._recent: deque[Event] = deque(maxlen=SPEED_WINDOWS)

    def add(self, event: Event) -> None:
        """Take an event."""
        kind = event["type"]
        if kind == "run_started":
            self._total, self._unit = event["total_windows"], event["unit"]
        elif kind in {"run_resumed", "reformed"}:
            # The time until the next window is not that of a window.
            self._recent.clear()
        elif kind == "window":
            self.windows += 1
            self._step = _steps(event)
            self._recent.append(event)
            loss = mean_loss(event)
            if loss is not None:
                # Show a loss that is not finite once, and do not keep it in the smoothed loss.
                known = loss if self._loss is None else self._loss
                smooth = math.isfinite(known) and math.isfinite(loss)
                self._loss = loss + _LOSS_KEPT * (known - loss) if smooth else loss

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
        seconds = self._recent[-1]["t"] - self._recent[0]["t"] if self._recent else 0.0
        if seconds > 0:
            work = RunTable.of(self._recent).parts()
            later = work["row"] > 0
            if unit != "samples":
                weight = float(work["weight"][later].sum())
                parts.append(f"{human_count(weight / seconds)} {unit}/s")
            if unit == "samples" or not brief:
                samples = float(work["samples"][later].sum())
                parts.append(f"{human_count(samples / seconds)} samples/s")
            if total is not None and total > self._step:
                num_steps = max(1, self._step - _steps(self._recent[0]))
                left_s = (total - self._step) * seconds / num_steps
                parts.append(f"ETA {human_duration(left_s)}")
        return "  ".join(parts) + self._ranks(brief=brief)

    def _ranks(self, *, brief: bool) -> str:
        """Share of the newest window and part of recent time spent waiting, for each rank."""
        rows = self._recent[-1]["ranks"] if self._recent else []
        if len(rows) < 2:
            return ""
        table = RunTable.of(self._recent)
        spent = table.lane_sums()
        wait_of = dict(zip(table.members, 100 * wait_parts(spent), strict=True))
        size = sum(row["samples"] for row in rows) or 1
        shares = [100 * row["samples"] / size for row in rows]
        waits = [wait_of[row["member"]] for row in rows]
        ranks = [row["rank"] for row in rows]
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


def _steps(window: Event) -> int:
    """Return the optimizer steps so far; a window of local steps has several."""
    steps: int = window.get("turns", window["window"] + 1)
    return steps


def _width(stream: TextIO) -> int:
    """Return the columns of the terminal that the stream writes to."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
