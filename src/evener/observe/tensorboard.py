"""Event files for TensorBoard; needs the extra ``evener[tensorboard]``."""

import contextlib
import math
from pathlib import Path
from typing import Any, Final

from evener.errors import ConfigError
from evener.observe.events import Event, Sink, mean_loss, wait_fraction

_MOST_WAITING: Final = 100_000  # scalars


class TensorBoardSink(Sink):
    """Writes scalars by window, under the names that other trainers use.

    ``train/loss``, ``train/learning_rate``, ``train/grad_norm``, ``train/epoch``,
    ``train/samples_per_second`` (and ``train/tokens_per_second``), ``eval/loss``; and for each
    rank ``share/rank_0``, ``wait/rank_0``, ``compute_s/rank_0``, ``data_s/rank_0`` and
    ``sent_mb/rank_0``.
    """

    def __init__(self, folder: Path) -> None:
        """Open an event file in ``folder``, which is created if needed.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"TensorBoard files need the package tensorboard, which is missing ({error}): "
                "pip install 'evener[tensorboard]', or switch TensorBoard off"
            ) from error
        # Adding more scalars than that blocks until the disk has caught up.
        self._writer: Any = SummaryWriter(str(folder), max_queue=_MOST_WAITING)
        self._unit = "tokens"
        self._last_t: float | None = None

    def emit(self, event: Event) -> None:
        """Write the scalars of one event; a full disk ends the file and does not raise."""
        if self._writer is None:
            return
        try:
            self._write(event)
        except (OSError, RuntimeError):
            self._writer = None

    def close(self) -> None:
        """Flush and close the file; may be called again."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def _write(self, event: Event) -> None:
        kind = event["type"]
        if kind == "run_started":
            self._unit = event["unit"]
        if kind in {"run_started", "run_resumed", "reformed"}:
            self._last_t = None
        elif kind == "window":
            self._write_window(event)
        elif kind == "eval" and event["loss"] is not None:
            name = "loss" if event["name"] == "heldout" else f"{event['name']}_loss"
            self._scalar(f"eval/{name}", event["loss"], event["window"], event["t"])

    def _write_window(self, event: Event) -> None:
        t, rows, step = event["t"], event["ranks"], event["window"] + 1
        samples = sum(row["samples"] for row in rows)
        weight = sum(row["weight"] for row in rows)
        if (loss := mean_loss(event)) is not None:
            self._scalar("train/loss", loss, step, t)
        self._scalar("train/epoch", event["epoch"], step, t)
        for key, name in (("lr", "learning_rate"), ("grad_norm", "grad_norm")):
            value = event.get(key)
            if value is not None and math.isfinite(value):
                self._scalar(f"train/{name}", value, step, t)
        if self._last_t is not None and t > self._last_t:
            speeds = {"samples": samples, self._unit: weight}
            for unit, amount in speeds.items():
                self._scalar(f"train/{unit}_per_second", amount / (t - self._last_t), step, t)
        self._last_t = t
        for row in rows:
            name = f"rank_{row['rank']}"
            self._scalar(f"share/{name}", row["samples"] / (samples or 1), step, t)
            self._scalar(f"compute_s/{name}", row["compute_s"], step, t)
            self._scalar(f"wait/{name}", wait_fraction([row]), step, t)
            if "data_s" in row:
                self._scalar(f"data_s/{name}", row["data_s"], step, t)
                self._scalar(f"sent_mb/{name}", row["sent_bytes"] / 1e6, step, t)

    def _scalar(self, tag: str, value: float, step: int, t: float) -> None:
        self._writer.add_scalar(tag, value, step, walltime=t)
