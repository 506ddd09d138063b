"""What ranks tell of a window: how long its spans were, when they began, what was sent."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from evener.comm.base import Communicator
from evener.observe.events import SPANS
from helpers.sinks import Kept
from helpers.teams import run_team, setup

NUM_PARAMETERS, SAMPLE_S = 4, 3e-4


class Slow(IterableDataset[Tensor]):
    """Each sample takes ``SAMPLE_S`` at least."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(24):
            yield self[index]

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SAMPLE_S)
        return torch.ones(NUM_PARAMETERS)


class SlowMap(list[int]):
    """The same, by index."""

    def __getitem__(self, index: Any) -> Any:
        return Slow()[index]


@pytest.mark.parametrize(
    ("policy", "data"), [("sync", Slow()), ("cadence", SlowMap(range(480)))], ids=["sync", "local"]
)
def test_spans_have_a_begin_and_a_length_and_what_was_sent_is_counted(
    policy: str, data: Any
) -> None:
    kept = Kept()

    def body(comm: Communicator) -> None:
        model = nn.Linear(NUM_PARAMETERS, 1, bias=False)
        ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        ddp.events.report_to([lambda: kept])
        with ddp:
            for batch in ddp.loader(data, batch_size=8, prefetch="inline"):
                ddp.backward(model(batch).square().mean())
                ddp.step()

    run_team(2, body)
    windows = [event for event in kept.events if event["type"] == "window"]
    assert len(windows) >= 2
    for event in windows:
        for row in event["ranks"]:
            # Two ranks send half of the gradient twice, and their rows.
            assert event["parked"] or row["sent_bytes"] > 4 * NUM_PARAMETERS
            if not row["samples"]:
                continue
            work, wait, sync = (row[f"{span}_ago_s"] for span in ("work", "wait", "sync"))
            assert work >= wait >= sync >= 0
            assert work - row["data_s"] > -1e-5
            assert row["data_s"] >= SAMPLE_S
            assert sum(row[f"{span}_s"] for span in SPANS) > 0
            if policy == "sync":
                assert row["data_s"] - 1e-4 <= work <= row["elapsed_s"] + 1e-4
