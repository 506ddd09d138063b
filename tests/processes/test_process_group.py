"""``Ddp.setup`` for those who have a process group already."""

from typing import Any

import torch
import torch.distributed as dist

from evener import Ddp
from helpers.ranks import Rank, run_ranks


def train(process_group: Any) -> tuple[int, int, float, list[float], str]:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if process_group is None else {"process_group": process_group}
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True, **options) as ddp:
        for batch in ddp.loader(torch.arange(24.0).view(8, 3) / 24, batch_size=4).epoch(0):
            ddp.backward(model(batch).square().mean())
            ddp.step()
        mean = ddp.weighted_mean(dist.get_rank())
        return ddp.rank, ddp.world_size, mean, model.weight.flatten().tolist(), ddp.devices[-1]


def all_and_some(rank: Rank, address: str) -> list[Any]:
    dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)
    some = dist.new_group([2, 0])
    results: list[Any] = [train(None)]
    if rank.rank != 1:
        results.append(train(some))
    total = torch.ones(1)
    dist.all_reduce(total)  # the user's own group is as it was
    results.append(total.item())
    dist.destroy_process_group()
    return results


def test_the_default_group_and_a_part_of_it(tmp_path: Any) -> None:
    results = run_ranks(all_and_some, 3, f"file://{tmp_path}/store")
    for number, (whole, *_, total) in enumerate(results):
        assert whole[:3] == (number, 3, 1.0)
        assert whole[3] == results[0][0][3]
        assert total == 3.0
    parts = [results[0][1], results[2][1]]
    assert [part[1:3] for part in parts] == [(2, 1.0), (2, 1.0)]
    assert sorted(part[0] for part in parts) == [0, 1]
    assert parts[0][3] == parts[1][3]
