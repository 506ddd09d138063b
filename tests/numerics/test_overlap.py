"""Gradients that travel during backward: every sum is right, whatever the modules do.

In float64, so that 1e-12 of the whole vector is some roundings. Pieces are a parameter each, so
that some have left while others are being computed.
"""

import random
import threading
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from evener import NonFiniteGradientError
from evener.comm.base import Communicator
from evener.devices import Cpu
from evener.engine import sync
from evener.planning.pieces import Pieces
from helpers.queued import give_milestones
from helpers.teams import run_team, setup

SAMPLES, WIDTH, BATCH = 26, 5, 8
SEEDS = range(12)


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "choose_pieces", lambda *known: Pieces(1, 0.0, 0.0))


class Tangle(nn.Module):
    """A random graph: layers that are shared, used twice, late, checkpointed, or not at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        count = draw.randint(3, 6)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(count)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
                )
        #: Which layer each node applies, to which earlier node, and whether it is checkpointed.
        self.nodes = [
            (draw.randrange(count), draw.randint(0, k), draw.choice(["", "", "again", "reentrant"]))
            for k in range(draw.randint(3, 8))
        ]
        #: A layer that only some windows use.
        self.rare = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.rare.weight.fill_(0.1)
            self.rare.bias.fill_(0.2)

    def forward(self, x: Tensor, *, with_rare: bool) -> Tensor:
        values = [x]
        for layer, source, how in self.nodes:
            module, given = self.layers[layer], values[source]
            if how and given.requires_grad:
                value = torch.utils.checkpoint.checkpoint(
                    module, given, use_reentrant=how == "reentrant"
                )
            else:
                value = module(given)
            values.append(torch.tanh(value))
        if with_rare:
            values.append(self.rare(values[-1]))
        return torch.stack(values).sum(0)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(SAMPLES, 2, WIDTH, generator=generator, dtype=torch.float64)
    return [(x, y) for x, y in rows]


def losses(model: Any, x: Tensor, y: Tensor, window: int, extra: bool) -> list[Tensor]:
    """The loss of a batch; in some windows also a second one, of a backward of its own."""
    found = [(model(x, with_rare=window % 3 == 2) - y).pow(2).mean()]
    if extra and window % 2:
        found.append(model(x, with_rare=False).abs().mean() / 7)
    return found


def plain(seed: int, extra: bool) -> Tensor:
    model = Tangle(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    rows = data()
    window = 0
    for _ in range(2):
        for start in range(0, SAMPLES, BATCH):
            x, y = (torch.stack(part) for part in zip(*rows[start : start + BATCH], strict=True))
            for loss in losses(model, x, y, window, extra):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            window += 1
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def on_team(comm: Communicator, seed: int, extra: bool, shares: Any, size: int) -> Tensor:
    model = Tangle(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    ddp = setup(comm, model, optimizer, shares=shares, overlap="on")
    loader = ddp.loader(data(), batch_size=BATCH, shuffle=False, micro_batch_size=size)
    for epoch in range(2):
        for x, y in loader.epoch(epoch):
            for loss in losses(model, x, y, ddp.window, extra):
                ddp.backward(loss)
            ddp.step()
    result = torch.cat([p.detach().flatten() for p in model.parameters()])
    ddp.close()
    return result


@pytest.fixture(params=["host", "queue"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor, and one that looks like a device with a queue."""
    if request.param == "queue":
        give_milestones(monkeypatch, Cpu)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs_train_as_in_one_process(seed: int) -> None:
    draw = random.Random(100 + seed)
    world_size, extra, size = draw.choice([2, 3]), draw.random() < 0.5, draw.choice([1, 2, BATCH])
    shares = [draw.choice([0.0, 1.0, 2.0]) for _ in range(world_size)]
    shares[draw.randrange(world_size)] = 1.0
    wanted = plain(seed, extra)
    for found in run_team(world_size, lambda comm: on_team(comm, seed, extra, shares, size)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * float(wanted.norm()))


class Waits(torch.autograd.Function):
    """The identity, whose backward does what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Any) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.act()
        return grads[0], None


@pytest.mark.parametrize("order", [("first", "last"), ("last", "first")])
def test_a_layer_is_summed_before_the_backward_of_an_earlier_one_is_over(
    order: tuple[str, str],
) -> None:
    """The first rank's backward waits for what only a finished exchange can bring.

    Pieces leave in the order of backward, whatever that of the modules is.
    """

    def train(comm: Communicator) -> bool:
        layers = {name: nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for name in order}
        first, last, model = layers["first"], layers["last"], nn.ModuleDict(layers)
        ddp = setup(
            comm, model, torch.optim.SGD(model.parameters(), 0.0), overlap="on", shares=[1, 1]
        )
        was_summed = []

        def look() -> None:
            if ddp.window == 0 or comm.rank:
                return
            flat, ended = ddp.assembly.flat, threading.Event()
            index = flat.names.index("last.bias")
            for _ in range(2000):
                if float(flat.order_of(index)[0]) > 10.0:  # this rank's own is below 2
                    was_summed.append(True)
                    return
                ended.wait(0.01)

        for x in ddp.loader([torch.ones(WIDTH, dtype=torch.float64)] * 8, batch_size=2):
            out = last(Waits.apply(first(x), look))
            ddp.backward(out.sum() * 1000.0**comm.rank, reduction="sum")
            ddp.step()
        ddp.close()
        return len(was_summed) == 3

    assert run_team(2, train)[0]


@pytest.mark.usefixtures("device")
def test_what_is_not_finite_is_named_and_training_can_go_on() -> None:
    def train(comm: Communicator) -> tuple[str, int]:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        ddp = setup(
            comm, model, torch.optim.SGD(model.parameters(), 0.1), overlap="on", shares=[1, 1]
        )
        told, rows = "", [torch.ones(WIDTH)] * 8
        bad = ddp.loader(rows, batch_size=2)
        try:
            for x in bad:
                hook = None
                if ddp.window == 2 and comm.rank == 1:
                    hook = model[1].weight.register_hook(lambda grad: grad * float("nan"))
                ddp.backward(model(x).mean())
                if hook is not None:
                    hook.remove()
                ddp.step()
        except NonFiniteGradientError as error:
            told = str(error)
        before = ddp.window
        for x in ddp.loader(rows, batch_size=2).epoch(1):
            ddp.backward(model(x).mean())
            ddp.step()
        done = ddp.window - before
        ddp.close()
        return told, done

    for told, done in run_team(2, train):
        assert "'1.weight'" in told
        assert "rank 1" in told
        assert done == 4


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_loop_that_is_left_gives_nothing_and_the_next_one_is_right(where: str) -> None:
    """A break before the last micro-batch, before its step, or after it."""

    def train(comm: Communicator) -> Tensor:
        model = nn.Linear(WIDTH, 1, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        ddp = setup(
            comm, model, torch.optim.SGD(model.parameters(), 0.1), overlap="on", shares=[2, 1]
        )
        rows = [torch.full((WIDTH,), float(k), dtype=torch.float64) for k in range(12)]
        loader = ddp.loader(rows, batch_size=3, shuffle=False, micro_batch_size=2)
        for x in loader.epoch(0):
            leaves = ddp.window == 2
            if leaves and where == "before":
                break
            ddp.backward(model(x).mean() / 10)
            if leaves and where == "between":
                break
            if ddp.step() and ddp.window == 3 and where == "after":
                break
        for x in loader.epoch(1):
            ddp.backward(model(x).mean() / 10)
            ddp.step()
        ddp.close()
        return model.weight.detach().clone()

    one, other = run_team(2, train)
    assert torch.equal(one, other)
    # Each window of the first epoch that was applied, and four of the second.
    sums = [3 * k + 1 for k in range({"before": 2, "between": 2, "after": 3}[where])]
    sums += [3 * k + 1 for k in range(4)]
    wanted = 0.5 - 0.1 * sum(sums) / 10
    torch.testing.assert_close(one, torch.full_like(one, wanted), rtol=1e-12, atol=0)


def test_the_host_does_not_wait_for_a_device_before_backward_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = give_milestones(monkeypatch, Cpu)

    def train(comm: Communicator) -> int:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        ddp = setup(
            comm, model, torch.optim.SGD(model.parameters(), 0.1), overlap="on", shares=[1, 1]
        )
        waits = 0
        for x in ddp.loader([torch.ones(WIDTH)] * 8, batch_size=2):
            comm.barrier(what="before backward")
            before = queue.waited
            comm.barrier(what="this rank has looked")
            ddp.backward(model(x).mean())
            comm.barrier(what="after backward")
            waits += queue.waited - before
            comm.barrier(what="this rank has looked")
            ddp.step()
        ddp.close()
        return waits

    assert run_team(2, train) == [0, 0]
    assert queue.waited
