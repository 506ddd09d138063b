"""What a loop with default options sees: every micro-batch counts, once, on any number of ranks.

No rank is given batches that do not count, so counters, meters, copies of the weights and
``i == 0`` are those of the samples that were trained on.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from helpers.ranks import Rank, run_ranks

SAMPLES, BATCH, EPOCHS = 609, 29, 2


def train(rank: Rank, policy: str) -> dict[str, Any]:
    from evener import Ddp, WindowResult

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 2))
    seen: list[list[int]] = []
    firsts: dict[int, int] = {}
    forwards, committed = 0, [[0] * rank.world_size for _ in range(EPOCHS)]
    copy: list[torch.Tensor] = []
    unmoved = 0
    opened: dict[int, tuple[int, list[int]]] = {}

    def count(result: WindowResult) -> None:
        work = [record.micro_batches for record in result.ranks]
        opened.setdefault(result.epoch, (result.window, work))
        for i, record in enumerate(result.ranks):
            committed[result.epoch][i] += record.micro_batches

    with Ddp.setup(model, optimizer, policy=policy, quiet=True) as ddp:
        ddp.on_commit(count)
        loader = ddp.loader(data, batch_size=BATCH)
        for epoch in range(EPOCHS):
            seen.append([])
            for i, (ids, x) in enumerate(loader.epoch(epoch)):
                if i == 0:
                    firsts[epoch] = ddp.window
                    if epoch == 0:
                        copy = [p.detach().clone() for p in model.parameters()]
                        unmoved = int(model[1].num_batches_tracked)
                seen[-1] += ids.tolist()
                forwards += 1
                ddp.backward(model(x).square().mean())
                ddp.step()
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    return {
        "seen": seen,
        "firsts": firsts,
        "opened": opened,
        "forwards": forwards,
        "micro_batches": [epoch[rank.rank] for epoch in committed],
        "starts_alike": all(map(torch.equal, copy, start.parameters())),
        "unmoved": unmoved,
        "tracked": int(model[1].num_batches_tracked),
    }


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loop_sees_each_sample_once_an_epoch(world_size: int, policy: str) -> None:
    found = run_ranks(train, world_size, policy)
    for epoch in range(EPOCHS):
        ids = Counter(i for rank in found for i in rank["seen"][epoch])
        assert ids == dict.fromkeys(range(SAMPLES), 1)
        # A parked rank may have missed the first window, and a rank may have no share of it.
        _, work = min(rank["opened"][epoch] for rank in found if epoch in rank["opened"])
        begins = {rank["firsts"][epoch] for rank, own in zip(found, work, strict=True) if own}
        assert len(begins) == 1, "an epoch begins at one window"
        for rank in found:
            assert rank["firsts"].get(epoch, max(begins)) >= max(begins)
    for rank in found:
        # With so small a model the team may do best without a rank that the machine holds up.
        worked = [epoch for epoch in range(EPOCHS) if rank["micro_batches"][epoch]]
        assert list(rank["firsts"]) == worked, "a rank begins the epochs in which it has work"
        counted = sum(rank["micro_batches"])
        assert rank["forwards"] == counted, "a batch was handed out and did not count"
        assert rank["starts_alike"]
        assert rank["unmoved"] == 0
        # A counter reads what one process would have counted.
        assert rank["tracked"] == sum(r["forwards"] for r in found)


def train_small_batches(rank: Rank) -> list[list[int]]:
    """Sizes of the micro-batches, by size of the batch."""
    from evener import Ddp

    found = []
    for batch_size in (2, 3, 5):
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.randn(4 * batch_size, 2)
        found.append([])
        with Ddp.setup(model, optimizer, quiet=True) as ddp:
            for x in ddp.loader(data, batch_size=batch_size):
                found[-1].append(len(x))
                ddp.backward(model(x).square().mean())
                ddp.step()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_small_batches_reach_batch_statistics_in_more_than_one_sample(world_size: int) -> None:
    """As on one rank: BatchNorm refuses a single sample."""
    found = run_ranks(train_small_batches, world_size)
    for number, batch_size in enumerate((2, 3, 5)):
        assert sum(sum(rank[number]) for rank in found) == 4 * batch_size
        assert all(size > 1 for rank in found for size in rank[number])
