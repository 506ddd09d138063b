"""Several models and optimizers: stepped together, or taking turns as in a GAN."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener.comm.base import Communicator
from evener.data.order import Permutation
from evener.engine.results import WindowResult
from evener.errors import UsageError
from helpers.loops import flatten
from helpers.models import mlp
from helpers.teams import run_team, setup

SAMPLES, BATCH, EPOCHS = 40, 8, 2
REAL = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)).double()
NOISE = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2)).double()
DATA = torch.utils.data.TensorDataset(REAL, NOISE)


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    return mlp(3, 8, 6, dtype=torch.float64), mlp(6, 8, 1, dtype=torch.float64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999))


def score(logits: Tensor, label: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))


def plain_gan(critic_steps: int = 1) -> Tensor:
    """The loop as it stands in every tutorial, over the same batches."""
    generator, discriminator = networks()
    opt_g, opt_d = adam(generator), adam(discriminator)
    step = 0
    for epoch in range(EPOCHS):
        order = Permutation(SAMPLES, 0, epoch)
        for start in range(0, SAMPLES, BATCH):
            rows = [order[p] for p in range(start, start + BATCH)]
            real, noise = REAL[rows], NOISE[rows]
            opt_d.zero_grad()
            fake = generator(noise)
            score(discriminator(real), 1.0).backward()
            score(discriminator(fake.detach()), 0.0).backward()
            opt_d.step()
            if step % critic_steps == 0:
                opt_g.zero_grad()
                score(discriminator(fake), 1.0).backward()
                opt_g.step()
            step += 1
    return flatten(generator, discriminator)


def team_gan(
    comm: Communicator, shares: Any, critic_steps: int = 1
) -> tuple[Tensor, list[WindowResult], list[int]]:
    generator, discriminator = networks()
    opt_g, opt_d = adam(generator), adam(discriminator)
    committed: list[int] = []
    turns = []
    models = {"generator": generator, "discriminator": discriminator}
    with setup(comm, models, [opt_g, opt_d], shares=shares) as ddp:
        ddp.on_commit(lambda result: committed.append(result.window))
        loader = ddp.loader(DATA, batch_size=BATCH)
        for epoch in range(EPOCHS):
            for real, noise in loader.epoch(epoch):
                opt_d.zero_grad()
                fake = generator(noise)
                ddp.backward(score(discriminator(real), 1.0), optimizer=opt_d)
                ddp.backward(score(discriminator(fake.detach()), 0.0), optimizer=opt_d)
                turns.append(ddp.step(opt_d))
                if ddp.window % critic_steps == 0:
                    opt_g.zero_grad()
                    ddp.backward(score(discriminator(fake), 1.0), optimizer=opt_g)
                    turns.append(ddp.step(opt_g))
        assert ddp.window == EPOCHS * len(loader)
        assert ddp.progress.samples == EPOCHS * SAMPLES
    assert all(turn is not None for turn in turns)
    return flatten(generator, discriminator), turns, committed


def wandering(window: int, size: int) -> list[int]:
    return [[size, 0, 0], [0, size - 1, 1], [3, 2, size - 5]][window % 3]


@pytest.mark.parametrize("critic_steps", [1, 3])
@pytest.mark.parametrize(
    ("world_size", "shares"),
    [(1, (1,)), (3, wandering)],
)
def test_a_gan_is_that_of_one_process(world_size: int, shares: Any, critic_steps: int) -> None:
    expected = plain_gan(critic_steps)
    results = run_team(world_size, lambda comm: team_gan(comm, shares, critic_steps))
    for parameters, _, committed in results:
        assert float((parameters - expected).norm() / expected.norm()) < 1e-11
        assert torch.equal(parameters, results[0][0])
        assert committed == list(range(EPOCHS * SAMPLES // BATCH))


def test_optimizers_of_one_model_are_stepped_together() -> None:
    def run(comm: Communicator) -> Tensor:
        model = networks()[0]
        optimizers = [
            torch.optim.SGD([model[0].weight, model[2].weight], lr=0.1, momentum=0.9),
            torch.optim.AdamW([model[0].bias, model[2].bias], lr=0.01),
        ]
        schedules = [torch.optim.lr_scheduler.StepLR(o, 2) for o in optimizers]
        with setup(comm, model, optimizers, schedules, shares=(4, 2, 1)[: comm.world_size]) as ddp:
            for _, noise in ddp.loader(DATA, batch_size=BATCH, micro_batch_size=2).epoch(0):
                ddp.backward(model(noise).square().mean())
                ddp.step()
        assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([1e-3, 1e-4])
        return flatten(model)

    expected = run(Communicator())
    for parameters in run_team(3, run):
        assert torch.allclose(parameters, expected, rtol=1e-12, atol=0)


def test_a_scheduler_follows_the_turns_of_its_optimizer() -> None:
    generator, discriminator = networks()
    opt_g, opt_d = adam(generator), adam(discriminator)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (opt_g, opt_d)]
    models = [generator, discriminator]
    with setup(Communicator(), models, [opt_g, opt_d], schedules) as ddp:
        for real, noise in ddp.loader(DATA, batch_size=10).epoch(0):
            ddp.backward(score(discriminator(real), 1.0), optimizer=opt_d)
            ddp.step(opt_d)
            if ddp.window == 3:
                ddp.backward(score(discriminator(generator(noise)), 1.0), optimizer=opt_g)
                ddp.step(opt_g)
    assert opt_g.param_groups[0]["lr"] == 0.005
    assert opt_d.param_groups[0]["lr"] == 0.01 / 16


def gan_error(comm: Communicator, body: Any, **options: Any) -> str:
    generator, discriminator = networks()
    optimizers = [adam(generator), adam(discriminator)]
    with setup(comm, [generator, discriminator], optimizers, shares=(1, 1)) as ddp:
        loader = ddp.loader(DATA, batch_size=BATCH, **options)

        def loop() -> None:
            for real, _ in loader.epoch(0):
                body(ddp, score(discriminator(real), 1.0), optimizers)

        with pytest.raises(UsageError) as caught:
            loop()
        return str(caught.value)


def turn(*steps: str) -> Any:
    """A loop's body: backward and step, each for one of the optimizers or for none."""

    def body(ddp: Any, loss: Tensor, optimizers: Sequence[Any]) -> None:
        chosen = {
            "discriminator": {"optimizer": optimizers[1]},
            "foreign": {"optimizer": adam(nn.Linear(1, 1))},
            "by rank": {"optimizer": optimizers[ddp.rank]},
            "all": {},
        }
        for step in steps:
            call, _, whose = step.partition(" ")
            ddp.backward(loss, **chosen[whose]) if call == "backward" else ddp.step(**chosen[whose])

    return body


@pytest.mark.parametrize(
    ("body", "options", "named"),
    [
        (
            turn("backward all", "step discriminator"),
            {},
            r"ddp.backward\(loss, optimizer=optimizer\)",
        ),
        (turn("backward discriminator", "backward all"), {}, "for every loss, or for none"),
        (turn("backward foreign"), {}, "this Adam was not given to Ddp.setup"),
        (turn("backward discriminator", "step all"), {}, r"ddp.step\(optimizer\) for that"),
        (
            turn("backward discriminator", "step discriminator"),
            {"micro_batch_size": 2},
            "micro_batch_size='share'",
        ),
        (
            turn("backward by rank", "step by rank"),
            {},
            "rank 0 steps optimizer 0, rank 1 optimizer 1",
        ),
    ],
)
def test_turns_in_the_wrong_form(body: Any, options: Any, named: str) -> None:
    for message in run_team(2, lambda comm: gan_error(comm, body, **options)):
        assert re.search(named, message), message


@pytest.mark.parametrize("shares", [(4, 3, 1), (5, 3, 0)])
def test_a_loop_that_is_left_between_turns_goes_on_after_that_window(
    shares: tuple[int, ...],
) -> None:
    """The window has changed a model, so it is closed; a rank without a share goes along."""

    def program(comm: Communicator) -> list[tuple[int, int]]:
        generator, discriminator = networks()
        opt_g, opt_d = adam(generator), adam(discriminator)
        done: list[tuple[int, int]] = []
        with setup(
            comm, [generator, discriminator], [opt_g, opt_d], shares=list(shares), verify_every=1
        ) as ddp:
            ddp.on_commit(lambda result: done.append((result.start, result.size)))
            loader = ddp.loader(DATA, batch_size=BATCH)
            for leave in (True, False):
                for real, noise in loader.epoch(0):
                    ddp.backward(score(discriminator(real), 1.0), optimizer=opt_d)
                    ddp.step(opt_d)
                    if leave and ddp.window == 1:
                        break
                    ddp.backward(score(discriminator(generator(noise)), 1.0), optimizer=opt_g)
                    ddp.step(opt_g)
                ddp.weighted_mean(1.0)
        return done

    expected = [(start, BATCH) for start in range(0, SAMPLES, BATCH)]
    assert run_team(len(shares), program) == [expected] * len(shares)
