import inspect
import json
import math

import pytest

from evener.observe import events
from evener.observe.events import RankRow, mean_loss
from helpers.event_cases import committed_window, started

# DESIGN §8: every event has `t` and `type`; these fields besides.
FIELDS = {
    "run_started": {
        "run",
        "members",
        "policy",
        "backend",
        "unit",
        "num_samples",
        "total_windows",
    },
    "worker_started": {"rank", "member", "pid", "host", "device"},
    "plan": {"window", "generation", "epoch", "start", "size", "shares"},
    "window": {"window", "generation", "epoch", "committed", "ranks"},
    "eval": {"window", "name", "loss", "weight", "elapsed_s"},
    "checkpoint": {"window", "path", "num_bytes", "write_s"},
    "checkpoint_missed": {"window", "reason"},
    "worker_lost": {"rank", "member", "window", "reason"},
    "worker_joined": {"rank", "member", "window", "generation"},
    "healed": {"rank", "member", "window", "donor", "num_bytes", "elapsed_s"},
    "run_resumed": {"window", "path", "new_data"},
    "reformed": {"window", "generation", "members"},
    "straggler": {"rank", "member", "window", "compute_s", "expected_s"},
    "run_finished": {"window", "reason", "message"},
}
VALUES = {
    "t": 5.0,
    "members": ("a", "b"),
    "shares": (3, 1),
    "committed": [(0, 4)],
    "ranks": [
        RankRow(
            rank=0,
            member="a",
            samples=4,
            weight=40.0,
            loss=1.5,
            compute_s=0.5,
            wait_s=0.25,
            sync_s=0.125,
        )
    ],
}


def test_there_is_a_constructor_for_every_type() -> None:
    assert {name for name in dir(events) if name.endswith("_event")} == {
        f"{kind}_event" for kind in FIELDS
    }


@pytest.mark.parametrize("kind", FIELDS)
def test_event_has_exactly_the_fields_of_its_type(kind: str) -> None:
    build = getattr(events, f"{kind}_event")
    names = [
        parameter.name
        for parameter in inspect.signature(build).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    event = build(**{name: VALUES.get(name, name) for name in names})
    assert set(event) == {"t", "type"} | FIELDS[kind]
    assert event["type"] == kind
    assert event["t"] == 5.0
    assert json.loads(json.dumps(event)) == event, "lists, not tuples: it reads back as it is"


def test_window_event_lists_each_rank() -> None:
    event = events.window_event(
        t=1.0, window=3, generation=0, epoch=0, committed=[(0, 4)], ranks=VALUES["ranks"]
    )
    assert event["committed"] == [[0, 4]]
    assert event["ranks"] == [
        {
            "rank": 0,
            "member": "a",
            "samples": 4,
            "weight": 40.0,
            "loss": 1.5,
            "compute_s": 0.5,
            "wait_s": 0.25,
            "sync_s": 0.125,
        }
    ]


def test_run_started_takes_further_details() -> None:
    assert started(seed=7)["seed"] == 7


def test_mean_loss_is_by_weight_over_ranks_with_work() -> None:
    assert mean_loss(committed_window(0, samples=(6, 4), losses=(1.0, 2.0))) == pytest.approx(1.4)
    assert mean_loss(committed_window(0, samples=(6, 0), losses=(1.0, None))) == 1.0
    assert mean_loss(committed_window(0, samples=(0, 0), losses=(None, None))) is None
    assert mean_loss(committed_window(0, losses=(1.0, None))) is None, "it was not finite"
    assert math.isnan(mean_loss(committed_window(0, losses=(1.0, math.nan))) or 0.0)
