"""``Ddp.wrap`` in real processes, each with two replicas of two networks."""

from typing import Any

import pytest
import torch

from evener import Ddp, PeerLostError
from helpers.models import mlp, regression_data
from helpers.ranks import Rank, run_ranks


def two_networks(rank: Rank) -> Any:
    x, y = regression_data(24)
    networks = [[mlp(seed=10 * n + 2 * rank.rank + i) for i in range(2)] for n in range(2)]
    found = []
    wrapped = [Ddp.wrap(n, ["cpu", "cpu"], quiet=True) for n in networks]
    for replicas in wrapped:
        assert (replicas.world_size, replicas.first) == (4, 2 * rank.rank)
        replicas.sync_params()
    counts = [3, 7, 5, 9]
    for form, replicas in enumerate(reversed(wrapped)):
        own = counts[replicas.first : replicas.first + 2]
        for i, model in enumerate(replicas.models):
            start = sum(counts[: replicas.first + i])
            part = slice(start, start + own[i])
            torch.nn.functional.mse_loss(model(x[part]), y[part]).backward()
        # Of this process's replicas, or of all of them.
        replicas.weighted_all_reduce_gradients(counts if form else own)
        found.append([[p.grad for p in model.parameters()] for model in replicas.models])
    if rank.rank == 1:
        return found  # and dies
    with pytest.raises(PeerLostError, match="sync_buffers"):
        wrapped[0].sync_buffers()  # rank 1 never comes
    return found


def test_replicas_in_processes_average_like_one_process():
    x, y = regression_data(24)
    results = run_ranks(two_networks, 2)
    for place, network in enumerate((1, 0)):
        alone = mlp(seed=10 * network)
        torch.nn.functional.mse_loss(alone(x), y).backward()
        for rank in range(2):
            for replica in results[rank][place]:
                for mine, parameter in zip(replica, alone.parameters(), strict=True):
                    error = torch.linalg.vector_norm(mine - parameter.grad)
                    assert error <= 1e-6 * torch.linalg.vector_norm(parameter.grad)
