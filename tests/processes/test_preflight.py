"""AUTO tries NCCL in child processes before training relies on it."""

import json
import os
import re
import resource
import signal
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from evener.comm.preflight import run_preflight
from evener.errors import LaunchError
from evener.team import backends
from evener.team.environment import DistributedTrainConfig
from helpers.forking import Zygote
from helpers.launched import Mailbox, wait_until_gone
from helpers.limits import PATIENCE_S
from helpers.pretraining import NEEDED, Lab, be_evener
from helpers.ranks import TESTS, Rank, RankTeam, run_ranks

#: What children need to find the leaves of ``helpers.leaves``.
ENV = {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def open_many_files(stack: ExitStack) -> None:
    """As a rank with a data set of many files, whose descriptors are beyond what select() takes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    for _ in range(1100):
        stack.enter_context(Path(os.devnull).open())


def try_leaf(rank: Rank, leaf: str, timeout_s: float = PATIENCE_S) -> str:
    """The failure, or what was raised; empty where all passed."""
    with ExitStack() as stack, rank.connect() as comm:
        open_many_files(stack)
        place = json.dumps(
            {
                "host": rank.address,
                "port": rank.port,
                "token": "",
                "team": "children",
                "network": [rank.address, rank.port],
            }
        )
        connect = f"helpers.leaves:{leaf}"
        cpu = torch.device("cpu")
        try:
            outcome = run_preflight(comm, place, cpu, connect=connect, timeout_s=timeout_s)
        except LaunchError as error:
            return f"LaunchError: {error}"
        finally:
            assert psutil.Process().children() == []
        assert outcome.seconds > 0
        # What the ranks agreed over is as it was.
        assert len(comm.all_gather_rows([1.0], what="row")) == rank.world_size
        return outcome.failure


def test_a_leaf_that_is_right_passes() -> None:
    assert run_ranks(try_leaf, 2, "honest", env=ENV) == ["", ""]


def test_wrong_numbers_fail_on_every_rank() -> None:
    first, second = run_ranks(try_leaf, 2, "lies", env=ENV)
    assert first == second == "on rank 1: 1 of 512 numbers are wrong in all_gather of 1 KiB"


def test_a_child_that_dies_fails_on_every_rank() -> None:
    first, second = run_ranks(try_leaf, 2, "dies", env=ENV)
    assert first == second
    assert first == "on rank 1: the process ended (SIGKILL) in broadcast of 1 MiB"


REMEDIES = r"Use backend='gloo' to exchange .*, or backend='nccl' to skip the preflight"


def test_a_hang_is_an_error_that_names_the_rank_and_both_remedies() -> None:
    first, second = run_ranks(try_leaf, 2, "hangs", env=ENV)
    assert first == second
    who = r"\(rank 0 waited \d+\.\d s in 'all_reduce of 1 MiB' for rank 1: "
    assert re.search(f"LaunchError: the preflight of NCCL hangs {who}.*{REMEDIES}", first), first


def test_children_that_say_nothing_are_given_up(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path / "mailbox")
    env = {**ENV, "TEST_MAILBOX": str(mailbox.path)}
    try:
        first, second = run_ranks(try_leaf, 2, "waits_for_its_end", 3.0, env=env)
    finally:
        mailbox.close()
    assert first == second
    assert re.search(rf"hangs \(ranks? .* after 3 s in '.*'\).*{REMEDIES}", first), first


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path / "mailbox")
    env = {**ENV, "TEST_MAILBOX": str(mailbox.path)}
    try:
        with RankTeam(try_leaf, 2, "waits_for_its_end", env=env) as team:
            pids = [int(line.split()[1]) for line in mailbox.read(2)]
            team.send_signal(0, signal.SIGKILL)
            assert wait_until_gone(pids[0])
            # The other rank notices, and ends its own.
            assert wait_until_gone(pids[1])
            assert type(team.wait()[1].exception).__name__ == "PeerLostError"
    finally:
        mailbox.close()


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


def test_auto_falls_back_loudly_and_the_events_tell(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    try:
        Zygote.get().preload(*NEEDED)
        with RankTeam(pretrain_on_made_up_gpus, 2, str(tmp_path)) as team:
            outcomes = team.wait()
        assert [outcome.value for outcome in outcomes] == [0, 0], outcomes[0].story()
        (started,) = lab.path_of().of_type("run_started")
    finally:
        lab.close()
    assert started["backend"] == "shared"
    # Which of them is first is a matter of chance; both, if they fail in the same moment.
    failed = r"NCCL failed its preflight on ranks? (0|1|0 and 1): "
    assert re.fullmatch(
        rf"chosen because {failed}.* \(it took \d+\.\d s\)", started["backend_reason"]
    )
    # Loudly, and once: though it was told to be quiet.
    assert re.search(f"warning: {failed}", outcomes[0].output)
    assert "backend='nccl' skips the preflight" in outcomes[0].output
    assert "warning" not in outcomes[1].output


def ask_for_nccl(rank: Rank) -> str:
    make_up_a_gpu(rank)
    try:
        backends.connect_team(
            DistributedTrainConfig.from_env(), "nccl", "sync", torch.device("cpu"), PATIENCE_S
        )
    except (LaunchError, RuntimeError) as error:  # the one without NCCL, the other without a GPU
        return str(error)
    return "connected"


def test_backend_nccl_skips_the_preflight() -> None:
    for said in run_ranks(ask_for_nccl, 2):
        assert "NCCL" in said or "nccl" in said
        assert "preflight" not in said
