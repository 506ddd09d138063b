"""run_ranks: what it returns, what it says when ranks fail, and that none survives."""

import os
import signal
import threading
import warnings

import psutil
import pytest
import torch
import torch.distributed

from evener.errors import NonFiniteGradientError
from helpers.ranks import RanksFailedError, RankTeam, run_ranks, run_ranks_to_end


def surroundings(rank):
    return (
        os.environ["RANK"],
        os.environ["MASTER_PORT"] == str(rank.port),
        os.environ["ANSWER"],
        torch.get_num_threads(),
        threading.active_count(),
        len(psutil.Process().open_files()),
        torch.rand(1).item(),
    )


def test_a_rank_begins_clean_and_finds_what_the_launcher_would_set():
    first, second = run_ranks(surroundings, 2, env={"ANSWER": "42"})
    assert first[:-1] == ("0", True, "42", 1, 1, first[5])
    assert second[:-1] == ("1", True, "42", 1, 1, first[5])
    assert first[-1] == second[-1] == torch.rand(1).item()


def end(rank):
    print(f"rank {rank.rank} was here")
    match rank.rank:
        case 0:
            raise NonFiniteGradientError("w is not finite", rank=3, parameter="w", window=7)
        case 1:
            os.kill(os.getpid(), signal.SIGKILL)
        case 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        case 3:
            raise SystemExit(7)
        case 4:
            warnings.warn("warnings are errors here, too", UserWarning, stacklevel=1)
    return "done"


def test_the_outcome_tells_how_each_rank_ended():
    raised, killed, stopped, left, warned, returned = run_ranks_to_end(end, 6)
    assert isinstance(raised.exception, NonFiniteGradientError)
    assert (raised.exception.rank, raised.exception.window) == (3, 7)
    assert "in end" in raised.traceback
    assert killed.died_of == signal.SIGKILL
    assert stopped.stopped
    assert left.exit_code == 7
    assert isinstance(warned.exception, UserWarning)
    assert returned.value == "done"
    assert returned.output == "rank 5 was here\n"


def test_the_error_tells_the_story_of_each_rank():
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(end, 6)
    text = str(failure.value)
    assert "rank 0 raised" in text
    assert "w is not finite" in text
    assert "rank 1 died of SIGKILL" in text
    assert "rank 3 exited with status 7" in text
    assert "rank 5 was here" in text
    assert isinstance(failure.value.__cause__, NonFiniteGradientError)


def hang(rank):
    rank.send(os.getpid())
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_in_the_dark()


def wait_in_the_dark():
    threading.Event().wait()


def test_a_timeout_shows_every_stack_and_leaves_no_rank():
    with RankTeam(hang, 2) as team:
        pids = [team.receive(rank) for rank in range(2)]
        assert tuple(pids) == team.pids
        with pytest.raises(RanksFailedError) as failure:
            team.wait(0.5)
    text = str(failure.value)
    assert "ranks [0, 1] had not ended after 0.5 s" in text
    # Rank 1 was stopped; it goes on for a moment, to tell where it is.
    assert text.count("in wait_in_the_dark") >= 1
    assert text.count("in hang") == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
