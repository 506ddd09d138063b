"""The same run, started by torchrun; and a script of the user's own, started by evener."""

import sys

import pytest

from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, RUN_TIMEOUT_S, Lab, relative_difference


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def forked(lab):
    lab.run("run.yaml", "--name", "forked", nproc=2)
    return lab.path_of("forked")


def check(lab, name, forked):
    run = lab.path_of(name)
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert run.summary["world_size"] == 2
    assert relative_difference(run.checkpoints[-1], forked.checkpoints[-1]) <= 1e-5
    assert run.summary["heldout_loss"] == pytest.approx(forked.summary["heldout_loss"], rel=1e-5)


def test_torchrun_starts_the_ranks(lab, forked):
    running = lab.sandbox.start(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "evener", "pretrain", "run.yaml", "--name", "by-torchrun"),
    )
    ended = running.end(RUN_TIMEOUT_S)
    assert ended.code == 0, ended.err
    check(lab, "by-torchrun", forked)


SCRIPT = """
import torch
from torch import nn

from evener import Ddp, DdpConfig

torch.manual_seed(RANK)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.arange(44.0).reshape(11, 4) / 44
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
with Ddp.setup(model, optimizer, config=DdpConfig(emulate_slow={1: 2.0})) as ddp:
    loader = ddp.loader(data, batch_size=4, micro_batch_size=1)
    committed = []
    ddp.on_commit(lambda result: committed.append(result.committed))
    for epoch in range(2):
        for inputs, target in loader.epoch(epoch):
            ddp.backward((model(inputs) - target).square().mean())
            ddp.step()
    mean = ddp.weighted_mean(float(RANK), weight=1.0)
    tell(f"{ddp.rank}/{ddp.world_size} {committed == [(0, 4), (4, 8), (8, 11)] * 2} {mean} "
         f"{model.weight.detach().flatten().tolist()} {ddp.progress.samples}")
"""


def test_a_users_own_script_trains_on_two_ranks(lab):
    script = lab.sandbox.script(SCRIPT)
    ended = lab.sandbox.evener("launch", "--nproc", 2, script).end(RUN_TIMEOUT_S)
    assert ended.code == 0, ended.err
    first, second = lab.sandbox.mailbox.rest()
    assert first.startswith("0 0/2 True 0.5 [")
    assert first.endswith("] 22")
    assert first.replace("0 0/2", "1 1/2") == second  # the same weights, to the last bit
    assert ended.err.startswith("team of 2: 2 CPU ranks (unequal) | ")
