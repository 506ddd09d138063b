"""A GAN that learns eight points on a circle, on several devices of unequal speed.

    evener launch --nproc 2 recipes/gan_manual.py --shares 3,1 [--steps 3000] [--smoke]

Two networks that train in turns fit no common step, so their gradients are averaged by hand:
`Ddp.wrap` for each. Every process computes its part of each batch, whose size is given by
`--shares`, and passes that size on; the result is that of `recipes/plain/gan_manual.py`.
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evener import Ddp, Replicas

NOISE = 8
BATCH = 128


def network(num_inputs: int, num_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, num_outputs),
    )


def draw(step: int, salt: int) -> tuple[Tensor, Tensor]:
    """Real points (BATCH, 2) and noise (BATCH, NOISE) of a step, the same wherever it is drawn."""
    generator = torch.Generator().manual_seed(1000 * step + salt)
    angles = torch.randint(8, (BATCH,), generator=generator) * (math.pi / 4)
    points = torch.stack([angles.cos(), angles.sin()], dim=1)
    points += 0.05 * torch.randn(BATCH, 2, generator=generator)
    return points, torch.randn(BATCH, NOISE, generator=generator)


def distance(generator: nn.Module) -> float:
    """Mean distance of generated points from the circle; 0.05 or so is as good as the data."""
    with torch.no_grad():
        noise = torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(7))
        points = generator(noise.to(next(generator.parameters()).device))
    return float((points.norm(dim=1) - 1).abs().mean())


def part(total: int, replicas: Replicas, shares: list[float]) -> range:
    """This process's places in a batch of ``total`` samples, in proportion to ``shares``."""
    ends = [round(total * sum(shares[:r]) / sum(shares)) for r in range(replicas.world_size + 1)]
    return range(ends[replicas.rank], ends[replicas.rank + 1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--shares", help="work of each process, such as 3,1; else the same")
    args = parser.parse_args()
    steps = 40 if args.smoke else args.steps

    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    generators, critics = Ddp.wrap(generator), Ddp.wrap(critic, quiet=True)
    generators.sync_params()
    critics.sync_params()
    device = generators.devices[0]
    shares = [float(s) for s in args.shares.split(",")] if args.shares else [1.0] * 64
    if len(shares) < generators.world_size:
        parser.error(f"--shares names {len(shares)} of {generators.world_size} processes")
    mine = part(BATCH, generators, shares[: generators.world_size])
    own = slice(mine.start, mine.stop)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    for step in range(steps):
        # The critic learns to tell real points from generated ones.
        real, noise = (t[own].to(device) for t in draw(step, 0))
        with torch.no_grad():
            fake = generator(noise)
        critic.requires_grad_(True)
        critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critics.weighted_all_reduce_gradients([len(mine)])
        critic_optimizer.step()

        # The generator learns to be taken for real; the critic only passes gradients on.
        _, noise = (t[own].to(device) for t in draw(step, 1))
        critic.requires_grad_(False)
        generator_loss = F.softplus(-critic(generator(noise))).mean()
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generators.weighted_all_reduce_gradients([len(mine)])
        generator_optimizer.step()

        if (step + 1) % max(1, steps // 10) == 0:
            losses = [
                critics.weighted_mean([critic_loss.item()], [len(mine)]),
                generators.weighted_mean([generator_loss.item()], [len(mine)]),
            ]
            if generators.is_main_process:
                print(
                    f"step {step + 1}: critic {losses[0]:.4f}, generator {losses[1]:.4f}, "
                    f"distance {distance(generator):.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
