"""Events as a run would emit them, with as little said as the test needs."""

from collections.abc import Sequence
from typing import Any

from evener.observe.event_lines import to_line as to_line
from evener.observe.events import RankRow, make_event


def started(t: float = 0.0, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "run": "test",
        "window": 0,
        "members": ["a", "b"],
        "policy": "sync",
        "backend": "gloo",
        "unit": "tokens",
        "num_samples": 100,
        "total_windows": None,
    }
    return make_event("run_started", t=t, **{**options, **changes})


def committed_window(
    window: int,
    *,
    t: float | None = None,
    epoch: int = 0,
    committed: Sequence[tuple[int, int]] | None = None,
    samples: Sequence[int] = (6, 4),
    losses: Sequence[float | None] = (2.0, 2.0),
    times_s: Sequence[tuple[float, float, float]] = ((0.7, 0.2, 0.1), (0.9, 0.0, 0.1)),
    weight_per_sample: float = 10.0,
) -> dict[str, Any]:
    """A window of ten samples by default; second ``window`` unless ``t`` says otherwise."""
    size = sum(samples)
    rows = [
        RankRow(
            rank=rank,
            member="abcdefghij"[rank],
            samples=count,
            weight=count * weight_per_sample,
            loss=loss,
            compute_s=compute_s,
            wait_s=wait_s,
            sync_s=sync_s,
        )
        for rank, (count, loss, (compute_s, wait_s, sync_s)) in enumerate(
            zip(samples, losses, times_s, strict=True)
        )
    ]
    parts = [(window * size, (window + 1) * size)] if committed is None else committed
    return make_event(
        "window",
        t=float(window) if t is None else t,
        window=window,
        generation=0,
        epoch=epoch,
        committed=[list(part) for part in parts],
        ranks=rows,
    )
