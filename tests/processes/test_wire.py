"""Training whose gradients travel in few bits: near to exact training, the same on all ranks."""

import hashlib
from pathlib import Path

import pytest
import torch

from evener import Ddp, DdpConfig
from evener.comm import host_leaders
from evener.planning.policies import Parking
from helpers.ranks import Rank, run_ranks

WINDOWS = 8


def train(rank: Rank, wire: str, policy: str, overlap: str) -> tuple[str, float, torch.Tensor]:
    """Digest of the replica, bytes sent in a window of the second epoch, and the replica."""
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
        before = windows = 0
        for epoch in range(2):
            for x in loader.epoch(epoch):
                ddp.backward((model(x) - x[:, :9]).square().sum(1).mean())
                ddp.step()
            if epoch == 0:
                before, windows = ddp.assembly.team.sent_bytes, ddp.window
        sent = (ddp.assembly.team.sent_bytes - before) / (ddp.window - windows)
    flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest(), sent, flat


@pytest.mark.parametrize(
    ("policy", "overlap", "wire", "part"),
    [
        ("sync", "off", "bfloat16", 0.6),
        ("sync", "on", "bfloat16", 0.6),
        ("cadence", "off", "int4", 0.2),
    ],
)
def test_replicas_are_equal_and_few_bytes_are_sent(
    policy: str, overlap: str, wire: str, part: float
) -> None:
    exact = run_ranks(train, 2, "float32", policy, overlap)
    rounded = run_ranks(train, 2, wire, policy, overlap)
    assert exact[0][0] == exact[1][0]
    assert rounded[0][0] == rounded[1][0] != exact[0][0]
    assert rounded[0][1] < part * exact[0][1]  # the rest are rows and comparisons
    if policy == "cadence":
        return  # how many windows there are depends on speeds
    difference = (rounded[0][2] - exact[0][2]).norm() / exact[0][2].norm()
    assert difference < 1e-3


def load_twice(rank: Rank, policy: str, folder: str) -> list[list[float]]:
    """The model after an epoch from a checkpoint, and after the same one from it once more."""
    torch.manual_seed(5)
    model = torch.nn.Linear(64, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    samples = torch.randn(16 * WINDOWS, 64, generator=torch.Generator().manual_seed(3))
    lockstep = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0}
    options = {"partition_ratios": [1, 1]} if policy == "sync" else lockstep
    config = DdpConfig(wire="bfloat16", overlap="off", quiet=True, **options)
    ends = []
    with Ddp.setup(
        model, optimizer, devices="cpu", backend="gloo", policy=policy, config=config
    ) as ddp:
        loader = ddp.loader(samples, batch_size=16)
        ddp.save(folder)
        for _ in range(2):
            ddp.load(folder)
            for x in loader.epoch(0):
                ddp.backward(model(x).square().sum(1).mean())
                ddp.step()
            ends.append(model.weight.flatten().tolist())
    return ends


@pytest.mark.parametrize("policy", ["sync", "cadence"])
def test_a_load_forgets_what_rounding_took_before(policy: str, tmp_path: Path) -> None:
    for first, again in run_ranks(load_twice, 2, policy, str(tmp_path / "saved")):
        assert first == again


def train_without_rank_0(rank: Rank) -> tuple[set[str], list[float]]:
    """How ranks were joined, and the model; ranks 0 and 1 are on one host, 2 is on another.

    While rank 0 is parked, rank 1 sends to the other host in its place.
    """
    place = f"host {rank.rank // 2}"
    host_leaders.place_of_this_process = lambda: place
    torch.manual_seed(5)
    model = torch.nn.Linear(64, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    samples = torch.randn(12 * WINDOWS, 64, generator=torch.Generator().manual_seed(3))
    config = DdpConfig(wire="bfloat16", overlap="on", speed_hint=(1.0, 1.0, 1.0), quiet=True)
    with Ddp.setup(model, optimizer, devices="cpu", config=config) as ddp:
        team, policy = ddp.assembly.team, ddp.assembly.engine.policy
        policy.decide_parking = lambda *_: (  # type: ignore[method-assign]
            Parking({0: 1.0}) if ddp.window >= 3 and not team.parked else None
        )
        joined = set()
        for epoch in range(2):
            for x in ddp.loader(samples, batch_size=12).epoch(epoch):
                ddp.backward(model(x).square().sum(1).mean())
                ddp.step()
                joined.add(team.comm.backend)
    return joined, model.weight.flatten().tolist()


def test_another_rank_of_a_host_rounds_while_the_first_is_parked() -> None:
    outcomes = run_ranks(train_without_rank_0, 3)
    assert outcomes[1][0] == {"hosts", "gloo"}
    assert outcomes[0][1] == outcomes[1][1] == outcomes[2][1]


def skip_a_window(rank: Rank) -> tuple[int, float]:
    """How many windows have changed the model, and its largest weight."""
    torch.manual_seed(5)
    model = torch.nn.Linear(64, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    samples = torch.randn(16 * WINDOWS, 64, generator=torch.Generator().manual_seed(3))
    samples[0] = 1e5
    samples[0, 1] = 1e25  # of the gradients, some are infinite, and others are finite and huge
    config = DdpConfig(
        wire="bfloat16", overlap="on", non_finite="skip", partition_ratios=[1, 1], quiet=True
    )
    steps = 0
    with Ddp.setup(model, optimizer, devices="cpu", backend="gloo", config=config) as ddp:
        loader = ddp.loader(samples, batch_size=16)
        for epoch in range(2):
            for x in loader.epoch(epoch):
                before = model.weight.sum().item()
                ddp.backward(model(x).square().mean())
                ddp.step()
                steps += model.weight.sum().item() != before
    return steps, model.weight.abs().max().item()


def test_what_rounding_took_from_a_skipped_window_is_not_added_later() -> None:
    for steps, largest in run_ranks(skip_a_window, 2):
        assert steps == 2 * (WINDOWS - 1)
        assert largest < 1
