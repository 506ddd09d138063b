"""NCCL that does not work: ranks that only say they have GPUs fall back, or say what is wrong."""

import re
from dataclasses import replace
from typing import Any

import torch

from evener.errors import LaunchError
from evener.team import backends
from evener.team.environment import DistributedTrainConfig
from helpers.forking import Zygote
from helpers.limits import PATIENCE_S
from helpers.pretraining import NEEDED, Lab, be_evener
from helpers.ranks import Rank, RankTeam, run_ranks


def make_up_a_gpu(rank: Rank) -> None:
    """This rank says that it has a GPU; NCCL finds out that it has none."""
    describe = backends.describe_exchange

    def pretend(*args: Any) -> backends.ExchangeFacts:
        gpu = {"device": f"cuda:{rank.rank}", "vendor": "NVIDIA", "gpu": f"GPU-{rank.rank}"}
        return replace(describe(*args), **gpu, nccl="2.29")

    backends.describe_exchange = pretend


def pretrain_on_made_up_gpus(rank: Rank, folder: str) -> int:
    make_up_a_gpu(rank)
    return be_evener(rank, folder, ["pretrain", "run.yaml", "--set", "max_steps=2", "--quiet"])


def test_auto_falls_back_loudly_and_the_events_tell(lab: Lab) -> None:
    Zygote.get().preload(*NEEDED)
    with RankTeam(pretrain_on_made_up_gpus, 2, str(lab.folder)) as team:
        outcomes = team.wait()
    assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
    (started,) = lab.path_of().of_type("run_started")
    assert started["backend"] == "shared"
    failed = "NCCL failed on rank 0: "
    assert started["backend_reason"].startswith(f"chosen because {failed}")
    # Loudly, and once: though it was told to be quiet.
    assert re.search(f"warning: {failed}", outcomes[0].output)
    assert "NCCL_DEBUG=INFO shows details, and backend='gloo'" in outcomes[0].output
    assert "warning" not in outcomes[1].output


def ask_for_nccl(rank: Rank) -> str:
    make_up_a_gpu(rank)
    try:
        backends.connect_team(
            DistributedTrainConfig.from_env(), "nccl", "sync", torch.device("cpu"), PATIENCE_S
        )
    except LaunchError as error:
        return str(error)
    return "connected"


def test_nccl_that_was_asked_for_and_fails_is_an_error() -> None:
    for said in run_ranks(ask_for_nccl, 2):
        assert said.startswith("NCCL did not connect the ranks (on rank 0: ")
