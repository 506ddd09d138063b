"""An elastic team over NCCL."""

import os
import signal

import pytest
import torch
from torch import nn

from evener import Ddp, DdpConfig
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.ranks import Rank, run_ranks_to_end


def train_over_nccl(rank: Rank, address: str) -> tuple[list[str], float]:
    """Backends by window, and a sum of the parameters; the second rank is killed."""
    os.environ |= {
        "EVENER_COORDINATOR": address,
        "EVENER_MEMBER": f"w{rank.rank}",
        "EVENER_ELASTIC": "1:3",
    }
    model, backends = nn.Linear(4, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = [torch.full((4,), k / 64) for k in range(64)]
    config = DdpConfig(quiet=True)
    with Ddp.setup(model, optimizer, backend="nccl", devices="cuda", config=config) as ddp:
        for x in ddp.loader(data, batch_size=8).epoch(0):
            if rank.rank == 1 and len(backends) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            ddp.backward(model(x.to(ddp.device)).square().mean())
            ddp.step()
            backends.append(ddp.assembly.comm.backend)
        return backends, float(sum(p.double().sum() for p in model.parameters()))


@pytest.mark.gpu
def test_members_that_are_left_exchange_over_nccl_again() -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip("it needs a GPU for each of three ranks")
    with serving(1, 3, Deadlines(gather_s=60.0)) as address:
        first, killed, last = run_ranks_to_end(train_over_nccl, 3, address)
    assert killed.died_of is signal.SIGKILL, killed.story()
    assert first.returned, first.story()
    assert last.returned, last.story()
    assert first.value == last.value
    assert set(first.value[0]) == {"nccl"}
