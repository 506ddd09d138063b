"""What ranks tell of a window: how long its spans were, when they began, what was sent."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from evener.observe.events import SPANS, Sink
from helpers.teams import run_team, setup

NUM_PARAMETERS = 4
SAMPLE_S = 3e-4


class SlowData(Dataset[torch.Tensor]):
    """Each sample takes ``SAMPLE_S`` at least."""

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(SAMPLE_S)
        return torch.ones(NUM_PARAMETERS)


class SlowStream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        for _ in range(24):
            time.sleep(SAMPLE_S)
            yield torch.ones(NUM_PARAMETERS)


class Kept(Sink):
    def __init__(self) -> None:
        self.windows = []

    def emit(self, event) -> None:
        if event["type"] == "window":
            self.windows.append(event)

    def close(self) -> None:
        pass


def windows_of(policy: str, data: str) -> list[dict]:
    """The windows of two ranks that train for an epoch."""
    kept = Kept()

    def body(comm):
        model = nn.Linear(NUM_PARAMETERS, 1, bias=False)
        ddp = setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
        ddp.events.report_to([lambda: kept])
        with ddp:
            if data == "own":
                for _ in range(4):
                    ddp.backward(ddp_loss(model, torch.ones(4, NUM_PARAMETERS)))
                    ddp.step()
                return
            given = SlowData() if data == "map" else SlowStream()
            for batch in ddp.loader(given, batch_size=8, prefetch="inline"):
                ddp.backward(ddp_loss(model, batch))
                ddp.step()

    def ddp_loss(model, batch):
        return model(batch).square().mean()

    run_team(2, body)
    return kept.windows


@pytest.mark.parametrize(
    ("policy", "data"),
    [("sync", "stream"), ("cadence", "map")],
)
def test_spans_have_a_begin_and_a_length_and_what_was_sent_is_counted(policy: str, data: str):
    windows = windows_of(policy, data)
    assert len(windows) >= 2
    for event in windows:
        for row in event["ranks"]:
            begins = {span: row[f"{span}_ago_s"] for span in ("work", "wait", "sync")}
            if row["samples"]:
                assert begins["work"] - row["data_s"] > -1e-5
                assert begins["work"] >= begins["wait"] >= begins["sync"] >= 0
                # All its parts lie between the begin of the work and the end of the window.
                parts = sum(row[f"{span}_s"] for span in SPANS)
                if policy == "sync":
                    assert begins["work"] <= row["elapsed_s"] + 1e-4
                    assert begins["work"] >= row["data_s"] - 1e-4
                assert parts > 0
                assert data == "own" or row["data_s"] >= SAMPLE_S
            # Two ranks send half of the gradient twice, and their rows.
            assert event["parked"] or row["sent_bytes"] > 4 * NUM_PARAMETERS
