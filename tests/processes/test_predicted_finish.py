"""How near the shares of a SYNC run come to the best ones, on processes.

Each process has a clock of its own, which moves by what the test says that a micro-batch costs,
with recorded noise: nothing rests on how fast or busy the machine is.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import torch

from helpers.ranks import Rank, run_ranks

NOISE = Path(__file__).parents[1] / "helpers" / "recorded_noise.json"
SAMPLES, BATCH, MICRO = 48 * 96, 96, 8
SPEEDS = (1.0, 1 / 2, 1 / 4)


def train(rank: Rank) -> tuple[float, float]:
    """Trains; seconds of the windows whose plans rest on measured speeds, and of the best ones."""
    import time

    from evener import Ddp
    from evener.planning.shares import fastest_shares, finish_s
    from evener.planning.speed import CostModel

    now_s = 0.0
    time.perf_counter = lambda: now_s  # type: ignore[assignment]  # also in what counts compute
    truth = [CostModel(0.004 / speed, 0.002 / speed) for speed in SPEEDS]
    noise = itertools.cycle(json.loads(NOISE.read_text())[rank.rank % 2])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 2))
    known: set[int] = set()
    windows_s = []
    with Ddp.setup(model, optimizer, quiet=True) as ddp:

        @ddp.on_commit
        def note(result: Any) -> None:
            is_warming = any(record.warmup_s for record in result.ranks)
            if result.window >= 3 and not is_warming:
                windows_s.append(max(record.compute_s for record in result.ranks))

        for (x,) in ddp.loader(data, batch_size=BATCH, micro_batch_size=MICRO).epoch(0):
            first = 1.0 if len(x) in known else 10.0  # compiling, say
            known.add(len(x))
            now_s += first * truth[rank.rank].seconds(len(x), None) * next(noise)
            ddp.backward(model(x).square().mean())
            ddp.step()
    sizes = [MICRO] * len(SPEEDS)
    best_s = finish_s(fastest_shares(BATCH, truth, sizes, least=0, idle=()), truth, sizes)
    return sum(windows_s), best_s * len(windows_s)


def test_windows_of_unequal_ranks_take_hardly_longer_than_with_the_best_shares() -> None:
    """With default options: first shares come from a calibration that knows nothing."""
    actual_s, best_s = run_ranks(train, len(SPEEDS))[0]
    assert 0 < actual_s <= 1.12 * best_s
