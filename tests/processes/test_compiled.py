"""``torch.compile`` with every policy, on two ranks."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from helpers.forking import Zygote
from helpers.ranks import Rank, run_ranks
from helpers.teams import setup

PATIENCE_S = 400.0  # each rank compiles for ten seconds of processor time and more
POLICIES = ("sync", "cadence", "async")


class Net(nn.Module):
    """Of a class of its own: torch leaves ``nn.Sequential`` alone in ``model.compile()``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.outer(self.inner(x).tanh())


def train(rank: Rank, backend: str | None) -> list[tuple[int, list[Tensor]]]:
    """Returns for each policy how many graphs were compiled, and the team's parameters."""
    # torch's own modules, which are imported when something is compiled.
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    found = []
    team = rank.connect() if rank.world_size > 1 else None
    for policy in POLICIES:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model: Any = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = list(torch.randn(24, 6))
        # A wrapper, made before the set-up, or in place and afterwards.
        wraps = backend is not None and policy == "cadence"
        forward = torch.compile(model, backend=backend) if wraps else model
        comm = Communicator() if team is None else team.split([0, 1], name=policy)
        # Equal shares in SYNC: a rank that is held up for so long would be parked.
        fixed = {"partition_ratios": (1.0,) * rank.world_size} if policy == "sync" else {}
        with setup(comm, forward, optimizer, policy=policy, **fixed) as ddp:
            if backend is not None and forward is model:
                model.compile(backend=backend)
            loader = ddp.loader(data, batch_size=4, micro_batch_size=1)  # one shape to compile for
            for epoch in range(2):
                for batch in loader.epoch(epoch):
                    ddp.backward(forward(batch).square().mean())
                    ddp.step()
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((graphs, [p.detach().clone() for p in model.parameters()]))
    return found


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_S + 60)
def test_compiled_models_train_as_others(tmp_path: Path) -> None:
    """Traced and differentiated; torch's default backend calls a C++ compiler in tests/numerics."""
    Zygote.get().preload("torch._dynamo.utils", "torch._functorch.aot_autograd")
    env = {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the rank itself, without further processes
    }
    ranks = run_ranks(train, 2, "aot_eager", timeout_s=PATIENCE_S, env=env)
    (plain,) = run_ranks(train, 1, None)
    assert all(graphs > 0 for results in ranks for graphs, _ in results)
    assert not any(graphs for graphs, _ in plain)
    for policy, results, (_, expected) in zip(
        POLICIES, zip(*ranks, strict=True), plain, strict=True
    ):
        for _, own in results:
            if policy == "sync":
                # 12 steps of 0.01 each; compiled sums round differently in the last digits.
                torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(own, results[0][1], rtol=0.0, atol=0.0)
