"""A line in the terminal that says how far the run is, how fast, and who waits for whom."""

import math
import os
import shutil
from collections import deque
from typing import Any, TextIO

from evener.observe.events import Event, Sink, mean_loss
from evener.observe.wording import human_bytes, human_count, human_duration

_LIVE_INTERVAL_S = 0.25  # of event time, between updates of the live line
_PLAIN_INTERVAL_S = 10.0  # of event time, between plain lines
_NUM_FIRST_LINES = 3
_SPEED_WINDOWS = 20
_LOSS_KEPT = 0.8  # of the smoothed loss; the rest is the new one
_BAR_WIDTH = 20
_MAX_RANKS_IN_LINE = 4


class ProgressSink(Sink):
    """Shows progress on a stream: one live line on a terminal, now and then a line elsewhere.

    It has no thread, reads no clock (time is the ``t`` of events) and hides no cursor, so a killed
    run leaves the terminal usable. A stream that breaks is left alone from then on.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_windows: int | None = None,
        unit: str | None = None,
        live: bool | None = None,
    ) -> None:
        """Write to ``stream``, which stays open.

        Args:
            stream: Usually standard error.
            total_windows: Windows until the planned end; else taken from ``run_started``.
            unit: What a weight counts; else taken from ``run_started``.
            live: Whether to keep one line up to date; by default, if the stream is a terminal.
        """
        self._stream = stream
        self._total = total_windows
        self._unit = unit
        self._live = stream.isatty() if live is None else live
        self._unicode = (stream.encoding or "").lower().startswith("utf")
        self._state = _Progress()
        self._num_lines = 0
        self._last_shown_t = float("-inf")
        self._shown = False  # whether the live line is on the screen now
        self._usable = True

    def emit(self, event: Event) -> None:
        """Take note of an event and show it if it is due."""
        if not self._usable:
            return
        try:
            self._take(event)
        except (OSError, ValueError):  # a closed pipe or file: nobody reads any more
            self._usable = False

    def close(self) -> None:
        """Leave the last state on the stream, with a line end."""
        if not self._usable:
            return
        try:
            self._end_live()
            self._stream.flush()
        except (OSError, ValueError):
            pass
        self._usable = False

    def _take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "run_started":
            self._total = event["total_windows"] if self._total is None else self._total
            self._unit = event["unit"] if self._unit is None else self._unit
        elif kind == "window":
            self._state.add(event)
            self._show_window(event["t"])
        else:
            if kind in {"run_resumed", "reformed"}:
                self._state.restart()
            elif kind == "run_finished":
                self._end_live()
            text = describe(event)
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
        self._stream.write(self._line() + "\n")
        self._stream.flush()

    def _print_above(self, text: str) -> None:
        self._clear_live()
        self._stream.write(text + "\n")
        if self._live and self._state.windows:
            self._show_live()
        self._stream.flush()

    def _show_live(self) -> None:
        # Written without rich's console, which ends the process when a pipe breaks.
        from rich.cells import cell_len, chop_cells

        self._clear_live()
        # A line as wide as the terminal would wrap when the cursor moves on.
        most = max(1, _width(self._stream) - 1)
        bar = _bar(self._state.step, self._total, unicode=self._unicode)
        # What is least missed goes first; a share and a wait are worth more than a bar.
        for line in (self._line(bar), self._line(), self._line(brief=True)):
            if cell_len(line) <= most:
                break
        self._stream.write(chop_cells(line, most)[0])
        self._stream.flush()
        self._shown = True

    def _end_live(self) -> None:
        """Leaves the line as it is; what is said from now on stands below it."""
        if self._live and self._state.windows:
            self._show_live()
            self._stream.write("\n")
        self._live = self._shown = False

    def _line(self, bar: str = "", *, brief: bool = False) -> str:
        return self._state.line(self._total, self._unit or "samples", bar=bar, brief=brief)

    def _clear_live(self) -> None:
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._shown = False


class _Progress:
    """The figures of the line, kept up window by window."""

    def __init__(self) -> None:
        self.step = 0
        self.windows = 0  # that were seen here
        self._loss: float | None = None
        self._recent: deque[tuple[float, int, float, list[Any]]] = deque(maxlen=_SPEED_WINDOWS)
        self._recent_steps: deque[int] = deque(maxlen=_SPEED_WINDOWS)

    def add(self, event: Event) -> None:
        rows = event["ranks"]
        # A window of local steps says how many optimizer steps there have been.
        self.step = event.get("turns", event["window"] + 1)
        self.windows += 1
        weight = sum(row["weight"] for row in rows)
        samples = sum(row["samples"] for row in rows)
        self._recent.append((event["t"], samples, weight, rows))
        self._recent_steps.append(self.step)
        loss = mean_loss(event)
        if loss is not None:
            # One loss that is not finite is shown, and does not stay for ever.
            smooth = self._loss is not None and math.isfinite(self._loss) and math.isfinite(loss)
            self._loss = loss + _LOSS_KEPT * ((self._loss or 0.0) - loss) if smooth else loss

    def restart(self) -> None:
        """Forget speeds: the time until the next window is not that of a window."""
        self._recent.clear()
        self._recent_steps.clear()

    def line(self, total: int | None, unit: str, *, bar: str, brief: bool) -> str:
        parts = [f"step {self.step:,}" + (f"/{total:,}" if total is not None else "")]
        if bar:
            parts.append(bar)
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        seconds, samples, weight = self._span()
        if seconds > 0:
            if unit != "samples":
                parts.append(f"{human_count(weight / seconds)} {unit}/s")
            if unit == "samples" or not brief:
                parts.append(f"{human_count(samples / seconds)} samples/s")
            if total is not None and total > self.step:
                num_steps = max(1, self._recent_steps[-1] - self._recent_steps[0])
                left_s = (total - self.step) * seconds / num_steps
                parts.append(f"ETA {human_duration(left_s)}")
        return "  ".join(parts) + self._ranks(brief=brief)

    def _span(self) -> tuple[float, int, float]:
        """Seconds, samples and weight from the oldest remembered commit to the newest."""
        if len(self._recent) < 2:
            return 0.0, 0, 0.0
        after_first = list(self._recent)[1:]
        seconds = self._recent[-1][0] - self._recent[0][0]
        return seconds, sum(r[1] for r in after_first), sum(r[2] for r in after_first)

    def _ranks(self, *, brief: bool) -> str:
        """Share of the newest window and part of recent time spent waiting, for each rank."""
        rows = self._recent[-1][3] if self._recent else []
        if len(rows) < 2:
            return ""
        waits = self._waits()
        if len(rows) > _MAX_RANKS_IN_LINE:
            worst = max(rows, key=lambda row: waits[row["member"]])
            wait = waits[worst["member"]]
            return f"  | {len(rows)} ranks, rank {worst['rank']} waits most: {wait:.0%}"
        size = sum(row["samples"] for row in rows) or 1
        shares = [100 * row["samples"] / size for row in rows]
        waited = [100 * waits[row["member"]] for row in rows]
        if brief:
            one, other = ("/".join(f"{part:.0f}" for part in parts) for parts in (shares, waited))
            return f"  | share {one}% wait {other}%"
        return "".join(
            f"  | rank {row['rank']}: {share:.0f}% wait {wait:.0f}%"
            for row, share, wait in zip(rows, shares, waited, strict=True)
        )

    def _waits(self) -> dict[str, float]:
        """Part of recent time that each member waited."""
        wait_s: dict[str, float] = {}
        total_s: dict[str, float] = {}
        for _, _, _, rows in self._recent:
            for row in rows:
                member, waited_s = row["member"], row["wait_s"]
                spent_s = row["compute_s"] + waited_s + row["sync_s"]
                wait_s[member] = wait_s.get(member, 0.0) + waited_s
                total_s[member] = total_s.get(member, 0.0) + spent_s
        return {
            member: wait_s[member] / spent_s if spent_s > 0 else 0.0
            for member, spent_s in total_s.items()
        }


def describe(event: Event) -> str | None:
    """Return the line for a person about an event; ``None`` for those that get no line."""
    kind = event["type"]
    if kind == "eval":
        return f"eval after step {event['window']:,}: {event['name']} loss {_loss(event['loss'])}"
    if kind == "checkpoint":
        return (
            f"checkpoint {event['path']} ({human_bytes(event['num_bytes'])}, "
            f"written in {human_duration(event['write_s'])})"
        )
    if kind == "straggler":
        return (
            f"straggler: rank {event['rank']} ({event['member']}) took "
            f"{human_duration(event['compute_s'])} for step {event['window'] + 1:,} "
            f"instead of {human_duration(event['expected_s'])}"
        )
    if kind == "worker_lost":
        return f"lost rank {event['rank']} ({event['member']}): {event['reason']}"
    if kind == "worker_joined":
        return f"rank {event['rank']} ({event['member']}) joined"
    if kind == "run_resumed":
        source = f" from {event['path']}" if event["path"] is not None else ""
        return f"resumed after step {event['window']:,}{source}"
    # A failure is told, with its cause, by whoever sees all ranks; here it might be a follow-up.
    if kind == "run_finished" and event["reason"] != "failed":
        message = f": {event['message']}" if event["message"] else ""
        return f"{event['reason']} after step {event['window']:,}{message}"
    return None


def _loss(loss: float | None) -> str:
    return f"{loss:.4g}" if loss is not None else "not finite"


def _bar(step: int, total: int | None, *, unicode: bool) -> str:
    if not total:
        return ""
    done = min(1.0, step / total)
    full, empty = ("━", "─") if unicode else ("=", "-")
    filled = int(done * _BAR_WIDTH)
    return full * filled + empty * (_BAR_WIDTH - filled) + f" {int(done * 100)}%"


def _width(stream: TextIO) -> int:
    """Columns of the terminal that the stream writes to."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return shutil.get_terminal_size().columns
