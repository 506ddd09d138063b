"""What the planner predicts of a window, and what the window then takes, on processes.

Each process has a clock of its own, which moves by what the test says that a micro-batch costs,
with recorded noise: nothing rests on how fast or busy the machine is.
"""

import itertools
import json
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest
import torch

from helpers.ranks import Rank, run_ranks

NOISE = Path(__file__).parents[1] / "helpers" / "recorded_noise.json"
SAMPLES, BATCH, MICRO = 48 * 96, 96, 8


def train(rank: Rank, speeds: tuple[float, ...]) -> list[tuple[float, float, float]]:
    """Trains; (predicted seconds, actual seconds, those of the best shares) by window."""
    import time

    from evener import Ddp
    from evener.planning.shares import fastest_shares, finish_s
    from evener.planning.speed import CostModel

    now_s = 0.0
    time.perf_counter = lambda: now_s  # type: ignore[assignment]  # also in what counts compute
    truth = [CostModel(0.004 / speed, 0.002 / speed) for speed in speeds]
    noise = itertools.cycle(json.loads(NOISE.read_text())[rank.rank % 2])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 2))
    sizes = [MICRO] * len(speeds)
    known: set[int] = set()
    forecasts: dict[int, Any] = {}
    found = []
    with Ddp.setup(model, optimizer, quiet=True) as ddp:

        def note(result: Any) -> None:
            shares = [record.samples for record in result.ranks]
            warm = any(record.warmup_s for record in result.ranks)
            costs = forecasts.pop(result.window, None)
            if costs is not None and not warm and result.size == BATCH:
                actual_s = max(record.compute_s for record in result.ranks)
                best = fastest_shares(BATCH, truth, sizes, least=0, idle=())
                found.append(
                    (finish_s(shares, costs, sizes), actual_s, finish_s(best, truth, sizes))
                )
            # The plan of the third window from here rests on what is known now.
            forecasts[result.window + 3] = ddp.assembly.engine.policy.costs  # type: ignore[attr-defined]

        ddp.on_commit(note)
        for (x,) in ddp.loader(data, batch_size=BATCH, micro_batch_size=MICRO).epoch(0):
            first = 1.0 if len(x) in known else 10.0  # compiling, say
            known.add(len(x))
            now_s += first * truth[rank.rank].seconds(len(x), None) * next(noise)
            ddp.backward(model(x).square().mean())
            ddp.step()
    return found


@pytest.mark.parametrize("speeds", [(1.0, 1 / 3), (1.0, 1 / 2, 1 / 4)])
def test_the_predicted_finish_is_that_of_the_window(speeds: tuple[float, ...]) -> None:
    """With default options: first shares come from a calibration that knows nothing."""
    windows = run_ranks(train, len(speeds), speeds)[0]
    assert len(windows) >= 35
    errors = [abs(predicted_s / actual_s - 1.0) for predicted_s, actual_s, _ in windows]
    assert median(errors) <= 0.10
    assert mean(errors) <= 0.10
    predicted_s, actual_s, best_s = (sum(column) for column in zip(*windows, strict=True))
    assert predicted_s == pytest.approx(actual_s, rel=0.10)
    assert actual_s <= 1.12 * best_s
