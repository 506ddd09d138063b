"""A team of threads that grows from one rank to four and shrinks to one again."""

import time

import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig, WindowResult
from helpers.elastic import Died, ElasticThreads, ThreadMembership
from helpers.elastic_runs import SEEDED
from helpers.limits import PATIENCE_S

BATCH, EPOCHS, COUNT = 8, 3, 64
#: By window, who joins with it.
JOINS = {3: ["j1"], 7: ["j2", "j3"]}
#: By window, who dies with it: nobody of those who began is left.
DEATHS = {12: ["w0"], 17: ["j1", "j2"]}


def samples(seed: int) -> list[tuple[Tensor, Tensor]]:
    inputs = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(seed))
    return [(x, (x.sum() + x[0] * x[1]).reshape(1)) for x in inputs]


def train(membership: ThreadMembership, *, changes: bool) -> tuple[list[int], list[int], float]:
    """First positions of the committed windows, samples handed out, and the held-out loss."""
    with SEEDED:
        torch.manual_seed(1 + membership.number)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
    starts, sizes, team = [], [], membership.team

    def commit(result: WindowResult) -> None:
        starts.append(result.committed[0])
        if changes and ddp.is_main_process and result.window in JOINS:
            for member in JOINS[result.window]:
                team.start(member)
            while not team.waiting.issuperset(JOINS[result.window]):
                time.sleep(0.001)
        if changes and membership.member in DEATHS.get(result.window, ()):
            team.die(membership.member)

    with Ddp.setup(model, optimizer, devices="cpu", elastic=membership, config=config) as ddp:
        ddp.on_commit(commit)
        loader = ddp.loader(samples(0), batch_size=BATCH, seed=3, micro_batch_size=2)
        for epoch in ddp.epochs(EPOCHS):
            for x, y in loader.epoch(epoch):
                sizes.append(len(x))
                ddp.backward(((model(x) - y) ** 2).mean())
                ddp.step()
    held_out = samples(1)
    with torch.no_grad():
        losses = [float((model(x) - y) ** 2) for x, y in held_out]
    return starts, sizes, sum(losses) / len(losses)


def test_growing_and_shrinking_trains_as_one_rank_alone() -> None:
    team = ElasticThreads(1, most=4)
    fates = team.run(lambda membership: train(membership, changes=True))
    errors = [fate.error for fate in fates if fate.error is not None]
    assert all(isinstance(error, Died) for error in errors), errors
    sizes = [len(formation.members) for formation in team.formations]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 4, 1)
    assert sizes.index(2) < sizes.index(4) < sizes.index(3)
    assert team.formations[-1].members == ("j3",)
    starts, handed_out, loss = team.fate("j3").value
    everything = [*range(0, COUNT, BATCH)] * EPOCHS
    assert starts == everything[len(everything) - len(starts) :]
    assert sum(handed_out) > 0

    (alone,) = ElasticThreads(1).run(lambda membership: train(membership, changes=False))
    assert alone.error is None
    assert alone.value[0] == everything
    assert abs(loss - alone.value[2]) <= 1e-4
