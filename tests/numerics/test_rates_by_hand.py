"""A learning rate that is set in the loop from ``ddp.window``, as nanoGPT does.

The reference is a plain loop on the whole batch. Ranks without a share of a window do not run the
loop's body, so they must adopt what the others have set.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener import Ddp, DdpConfig, UsageError
from helpers.ranks import Rank, run_ranks, run_ranks_to_end

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 13, 4, 3  # an epoch's last window has one sample
TOLERANCE = 1e-12  # float64; sums in another order


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(1)).double()
    return [(row, row.sum().reshape(1)) for row in x]


def rate(window: int) -> float:
    return 0.05 / (1 + window)


def parts(kind: str) -> tuple[list[nn.Linear], list[torch.optim.Optimizer]]:
    """Two layers and their optimizers: one with two groups, or two that take turns."""
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3).double(), nn.Linear(3, 1).double()]
    groups: list[Any] = [{"params": list(layer.parameters())} for layer in layers]
    if kind == "turns":
        return layers, [torch.optim.SGD(group["params"], lr=1.0) for group in groups]
    return layers, [torch.optim.Adam(groups, lr=1.0, foreach=False)]


def set_rates(optimizers: list[torch.optim.Optimizer], window: int) -> None:
    """Another rate for each group, or optimizer."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        group["lr"] = rate(window) * (number + 1)


def plain_batches() -> Iterator[tuple[Tensor, Tensor]]:
    samples = data()
    for _ in range(NUM_EPOCHS):
        for start in range(0, NUM_SAMPLES, BATCH_SIZE):
            piece = samples[start : start + BATCH_SIZE]
            yield torch.stack([x for x, _ in piece]), torch.stack([y for _, y in piece])


def train_plainly(kind: str) -> Tensor:
    layers, optimizers = parts(kind)
    model = nn.Sequential(*layers)
    for window, (x, y) in enumerate(plain_batches()):
        set_rates(optimizers, window)
        for optimizer in optimizers:
            for other in optimizers:
                other.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train(rank: Rank, kind: str) -> tuple[Tensor, int]:
    layers, optimizers = parts(kind)
    model = nn.Sequential(*layers)
    config = DdpConfig(partition_ratios=(2, 1, 1)[: rank.world_size], verify_every=1)
    num_batches = 0
    with Ddp.setup(layers, optimizers, devices="cpu", config=config, quiet=True) as ddp:
        loader = ddp.loader(data(), batch_size=BATCH_SIZE, shuffle=False, micro_batch_size="share")
        for epoch in range(NUM_EPOCHS):
            for x, y in loader.epoch(epoch):
                num_batches += 1
                set_rates(optimizers, ddp.window)
                if kind == "turns":
                    for optimizer in optimizers:
                        ddp.backward(F.mse_loss(model(x), y), optimizer=optimizer)
                        ddp.step(optimizer)
                else:
                    ddp.backward(F.mse_loss(model(x), y))
                    ddp.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), num_batches


@pytest.mark.parametrize("kind", ["groups", "turns"])
def test_a_rate_set_by_hand_ends_as_on_one_process(kind: str) -> None:
    expected = train_plainly(kind)
    found = run_ranks(train, 3, kind)
    for vector, _ in found:
        assert float((vector - expected).norm() / expected.norm()) <= TOLERANCE
    assert found[1][1] < found[0][1], "rank 1 was to be without a share now and then"


def loop(
    rank: Rank,
    policy: str,
    adjust: Callable[[Ddp, torch.optim.Optimizer, Rank], None],
) -> None:
    layers, optimizers = parts("groups")
    model = nn.Sequential(*layers)
    ratios = (2, 1, 1)[: rank.world_size] if policy == "sync" else None
    config = DdpConfig(partition_ratios=ratios)
    with Ddp.setup(
        model, optimizers, policy=policy, devices="cpu", config=config, quiet=True
    ) as ddp:
        loader = ddp.loader(data(), batch_size=BATCH_SIZE, shuffle=False)
        for epoch in range(NUM_EPOCHS):
            for x, y in loader.epoch(epoch):
                adjust(ddp, optimizers[0], rank)
                ddp.backward(F.mse_loss(model(x), y))
                ddp.step()


def refusals(world_size: int, *job: Any) -> list[str]:
    outcomes = run_ranks_to_end(loop, world_size, *job)
    print(*(outcome.story() for outcome in outcomes))
    return [str(o.exception) for o in outcomes if isinstance(o.exception, UsageError)]


def test_ranks_with_shares_that_disagree_are_named_with_group_and_values() -> None:
    def adjust(ddp: Ddp, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
        optimizer.param_groups[1]["lr"] = 0.5 if rank.rank == 2 and ddp.window == 1 else 0.25

    said = refusals(3, "sync", adjust)
    assert len(said) == 3
    for text in said:
        assert "that of parameter group 1 is 0.25 on rank 0 and 0.5 on rank 2" in text
        assert "compute it from ddp.window" in text


@pytest.mark.parametrize("policy", ["cadence", "async"])
def test_local_steps_refuse_a_rate_set_by_hand_and_name_the_scheduler(policy: str) -> None:
    def adjust(ddp: Ddp, optimizer: torch.optim.Optimizer, rank: Rank) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(ddp.window)

    said = refusals(2, policy, adjust)
    assert said
    assert all("scheduler=lambda progress:" in text for text in said)
    assert "learning rate of parameter group 0 was set from 1 to 0.05" in said[0]
