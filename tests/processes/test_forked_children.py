"""Forked children of a rank: they keep none of its connections open, and disturb nothing."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from evener import Ddp, DdpConfig
from evener.errors import PeerLostError
from helpers.launched import Sandbox
from helpers.ranks import Rank, run_ranks_to_end

SAMPLES = 48


class Unpicklable:
    """Workers can be given it only by a fork."""

    def __init__(self) -> None:
        self.read = lambda index: torch.full((3,), float(index))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(index)


def lose_a_rank(rank: Rank, victim: int) -> None:
    """Trains with workers of evener's and of the user's own, until one rank is killed.

    Without an end of the connection others would wait for minutes, longer than the test does.
    """
    own = DataLoader(
        TensorDataset(torch.arange(8.0)), num_workers=2, multiprocessing_context="fork"
    )
    model = nn.Linear(3, 40_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    config = DdpConfig(quiet=True, partition_ratios=(1.0,) * rank.world_size)
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config)
    loader = ddp.loader(Unpicklable(), batch_size=6, num_workers=2)
    mine = iter(own)  # live workers until the end

    def die() -> None:
        next(mine)
        os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for epoch in range(1000):
            for batch in loader.epoch(epoch):
                if rank.rank == victim and ddp.window >= 3:
                    die()
                ddp.backward(model(batch).mean())
                ddp.step()

    with pytest.raises(PeerLostError):
        train()
    with suppress(PeerLostError):  # it would settle with the others
        ddp.close()


def test_a_death_is_noticed_at_once_although_its_workers_live_on() -> None:
    outcomes = run_ranks_to_end(lose_a_rank, 3, 1)
    assert outcomes.pop(1).died_of is signal.SIGKILL
    assert all(outcome.returned for outcome in outcomes), [o.story() for o in outcomes]


def lose_a_rank_of_a_group(rank: Rank, address: str) -> None:
    """Waits in a collective of the user's own group, one rank of which is killed."""
    dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)
    own = DataLoader(
        TensorDataset(torch.arange(8.0)), num_workers=1, multiprocessing_context="fork"
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp = Ddp.setup(model, optimizer, devices="cpu", quiet=True)
    mine = iter(own)
    next(mine)  # its workers live until the end
    dist.barrier()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"closed|reset"):
        dist.all_reduce(torch.ones(1))
    with suppress(PeerLostError):
        ddp.close()
    dist.destroy_process_group()


def test_a_death_shows_at_once_in_a_process_group_of_the_users_own(tmp_path: Path) -> None:
    survivor, _ = run_ranks_to_end(lose_a_rank_of_a_group, 2, f"file://{tmp_path}/store")
    assert survivor.returned, survivor.story()


FORKS_BY_HAND = """\
import socket, torch, evener
from pathlib import Path
model = torch.nn.Linear(3, 1)
ddp = evener.Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True)
torch.set_num_threads(2)
torch.ones(100, 100) @ torch.ones(100, 100)  # there is a pool of threads now
pid = os.fork()
if not pid:
    tell(f"{torch.get_num_threads()} thread")
    assert (torch.ones(100, 100) @ torch.ones(100, 100) == 100).all()
    peers = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as end:
                peers.append(end.getsockname())
        except OSError:
            pass
    tell(peers)
    try:
        ddp.weighted_mean(1.0)
    except evener.CollectiveError as error:
        tell(error)
    ddp.close()
    sys.exit(7)  # an orderly end of the interpreter, with everything that the parent had
tell(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
tell(ddp.weighted_mean(RANK))
ddp.close()
"""


def test_a_child_has_no_part_in_the_team_and_ends_in_order(sandbox: Sandbox) -> None:
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script(FORKS_BY_HAND)).end()
    assert ended.code == 0, ended.err
    said = sandbox.mailbox.rest()
    for rank in range(2):
        own = [line[2:] for line in said if line.startswith(f"{rank} ")]
        assert {"7", "0.5", "[]", "1 thread"} < set(own)
        assert any(
            f"this process was forked from rank {rank}, which keeps the connections" in line
            for line in own
        )
