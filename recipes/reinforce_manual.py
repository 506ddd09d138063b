"""REINFORCE balances a pole on a cart, on several devices.

    evener launch --nproc 2 recipes/reinforce_manual.py [--updates 150] [--smoke]

Each process plays some of the episodes. These differ in length, so processes have unequal numbers
of steps: gradients are averaged with the number of steps as weight, and so are the numbers behind
the advantages. The result is that of `recipes/plain/reinforce_manual.py`.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from evener import Ddp

EPISODES = 16
MAX_STEPS = 200
DISCOUNT = 0.99


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, state: Tensor) -> Tensor:
        """States (..., 4) to log-odds (...) of pushing to the right."""
        logits: Tensor = self.layers(state).squeeze(-1)
        return logits


def push(state: Tensor, right: Tensor) -> Tensor:
    """The cart and its pole 0.02 s later; states (E, 4), pushes (E,)."""
    _, speed, angle, turn = state.unbind(1)
    force = torch.where(right, 10.0, -10.0)
    pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
    lean = 9.8 * angle.sin() - angle.cos() * pull
    turning = lean / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    moving = pull - 0.05 * turning * angle.cos() / 1.1
    rates = torch.stack([speed, moving, turn, turning], dim=1)
    return state + 0.02 * rates


def play(policy: nn.Module, update: int, episodes: range) -> tuple[Tensor, Tensor]:
    """Log-probabilities and discounted returns (N,) of the N steps of some of the episodes.

    An episode has random numbers of its own, so it goes the same way wherever it is played.
    """
    luck = [torch.Generator().manual_seed(10_000 * update + e) for e in episodes]
    state = torch.stack([0.1 * torch.rand(4, generator=g) - 0.05 for g in luck])
    chance = torch.stack([torch.rand(MAX_STEPS, generator=g) for g in luck])
    alive = torch.ones(len(episodes), dtype=torch.bool)
    log_probabilities, lived = [], []
    for step in range(MAX_STEPS):
        logits = policy(state)
        right = chance[:, step] < torch.sigmoid(logits.detach())
        log_probabilities.append(nn.functional.logsigmoid(torch.where(right, logits, -logits)))
        lived.append(alive)
        state = push(state, right)
        alive = alive & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < math.pi / 15)
        if not alive.any():
            break
    lives = torch.stack(lived)
    returns = torch.zeros(lives.shape)
    future = torch.zeros(len(episodes))
    for step in reversed(range(len(lived))):
        future = lives[step] * (1 + DISCOUNT * future)
        returns[step] = future
    return torch.stack(log_probabilities)[lives], returns[lives]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--smoke", action="store_true", help="a few updates, to see that it runs")
    args = parser.parse_args()
    updates = 10 if args.smoke else args.updates

    torch.manual_seed(0)
    policy = Policy()
    policies = Ddp.wrap(policy)
    policies.sync_params()
    mine = range(policies.rank, EPISODES, policies.world_size)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    for update in range(updates):
        log_probabilities, returns = play(policy, update, mine)
        num_steps = len(returns)
        mean = policies.weighted_mean([float(returns.mean())], [num_steps])
        variance = policies.weighted_mean([float((returns - mean).square().mean())], [num_steps])
        advantages = (returns - mean) / (variance + 1e-6) ** 0.5
        loss = -(advantages * log_probabilities).mean()
        optimizer.zero_grad()
        loss.backward()
        policies.weighted_all_reduce_gradients([num_steps])
        optimizer.step()

        # The same number everywhere, so that all processes stop together.
        length = policies.weighted_mean([num_steps / len(mine)], [len(mine)])
        if (update + 1) % max(1, updates // 10) == 0 and policies.is_main_process:
            print(f"update {update + 1}: {length:.2f} steps an episode", flush=True)
        if length >= 0.975 * MAX_STEPS:
            if policies.is_main_process:
                print(f"balanced after {update + 1} updates", flush=True)
            break


if __name__ == "__main__":
    main()
