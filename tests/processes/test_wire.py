"""Training whose gradients travel in bfloat16: near to exact training, the same on all ranks."""

import hashlib

import pytest
import torch

from evener import Ddp, DdpConfig
from helpers.ranks import Rank, run_ranks

WINDOWS = 8


def train(rank: Rank, wire: str, policy: str, overlap: str) -> tuple[str, int, torch.Tensor]:
    """Digest of the replica, bytes sent in the windows, and the replica."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.Tanh(), torch.nn.Linear(300, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(3)
    samples = torch.randn(16 * WINDOWS, 64, generator=generator)
    shares = [1, 1] if policy == "sync" else None  # so that no rank is parked
    config = DdpConfig(
        wire=wire, overlap=overlap, verify_every=1, partition_ratios=shares, quiet=True
    )
    with Ddp.setup(
        model, optimizer, devices="cpu", backend="gloo", policy=policy, config=config
    ) as ddp:
        loader = ddp.loader(samples, batch_size=16, seed=1)
        before = 0
        for epoch in range(2):
            for x in loader.epoch(epoch):
                ddp.backward((model(x) - x[:, :9]).square().sum(1).mean())
                ddp.step()
            if epoch == 0:
                before = ddp.assembly.team.sent_bytes
        sent = ddp.assembly.team.sent_bytes - before
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), sent, flat


@pytest.mark.parametrize(
    ("policy", "overlap"), [("sync", "off"), ("sync", "on"), ("cadence", "off")]
)
def test_replicas_are_equal_and_half_the_bytes_are_sent(policy: str, overlap: str) -> None:
    exact = run_ranks(train, 2, "float32", policy, overlap)
    rounded = run_ranks(train, 2, "bfloat16", policy, overlap)
    assert exact[0][0] == exact[1][0]
    assert rounded[0][0] == rounded[1][0] != exact[0][0]
    if policy == "cadence":
        return  # how many windows there are depends on speeds
    difference = (rounded[0][2] - exact[0][2]).norm() / exact[0][2].norm()
    assert difference < 1e-3
    assert rounded[0][1] < 0.6 * exact[0][1]  # the rest are rows and comparisons
