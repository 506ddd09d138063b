"""Events as a run would emit them, with as little said as the test needs."""

from collections.abc import Mapping, Sequence
from typing import Any

from evener.observe.event_lines import to_line as to_line
from evener.observe.events import RankRow, make_event

#: What the fields of events may be, in whatever type of event they stand; the others are numbers.
WHOLE = [
    "rank",
    "pid",
    "num_samples",
    "total_windows",
    "window",
    "generation",
    "epoch",
    "start",
    "size",
    "num_bytes",
    "samples",
    "turns",
    "num_events",
    "sent_bytes",
    "since",
    "steps",
]
TEXT = [
    "type",
    "run",
    "member",
    "policy",
    "backend",
    "unit",
    "host",
    "device",
    "path",
    "reason",
    "name",
    "message",
    "donor",
]
LIST = ["members", "shares", "committed", "ranks"]
NUMBER = [
    "t",
    "loss",
    "avg_loss",
    "weight",
    "elapsed_s",
    "write_s",
    "compute_s",
    "wait_s",
    "sync_s",
    "expected_s",
    "data_s",
    "copy_s",
    "delay_s",
    "begin_t",
]
OPTIONAL = ["total_windows", "loss", "avg_loss", "message", "path"]
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(WHOLE, (int,)),
    **dict.fromkeys(TEXT, (str,)),
    **dict.fromkeys(LIST, (list,)),
    **dict.fromkeys(NUMBER, (int, float)),
    **dict.fromkeys(["new_data", "complete"], (bool,)),
    **dict.fromkeys(["scalars", "eval"], (dict,)),
}


def check_kinds(fields: Mapping[str, Any]) -> None:
    """Check that the fields of an event, and of the rows in it, are of the kinds named above."""
    for name, value in fields.items():
        if name in KINDS and not (value is None and name in OPTIONAL):
            assert type(value) in KINDS[name], f"{name} is {value!r} in {fields}"
    shares = fields.get("shares", [])
    bounds = [bound for part in fields.get("committed", []) for bound in part]
    assert all(type(number) is int for number in [*shares, *bounds]), fields
    assert all(type(name) is str for name in fields.get("members", [])), fields
    if fields.get("type") == "window":
        for row in fields["ranks"]:
            assert set(row) >= RankRow.__required_keys__
            check_kinds(row)


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
