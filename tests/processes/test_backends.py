"""Real processes agree on how they exchange, or are refused together."""

import torch

from evener.errors import ConfigError
from evener.team.backends import connect_team
from evener.team.environment import DistributedTrainConfig
from helpers.ranks import Rank, run_ranks


def meet(rank: Rank) -> list[str]:
    """Three teams one after the other: refused together, refused together, agreed."""
    cpu = torch.device("cpu")
    said = []
    for backend in ("nccl", ("gloo", "cpu")[rank.rank], "auto"):
        place = DistributedTrainConfig.from_env()
        try:
            comm, _ = connect_team(place, backend, "sync", cpu, 20.0)
        except ConfigError as error:
            said.append(str(error))
        else:
            said.append(f"{comm.backend}: {comm.reason}")
            comm.close()
    return said


def test_processes_refuse_and_agree_together():
    first, second = run_ranks(meet, 2)
    assert first == second
    assert first[0].startswith("backend is 'nccl', but ranks 0 and 1 compute on the CPU")
    assert first[1].startswith(
        "backend is 'gloo' on rank 0 and 'cpu' on rank 1; give the same on every rank"
    )
    assert first[2].startswith("shared: chosen because ranks 0 and 1 compute on the CPU")
