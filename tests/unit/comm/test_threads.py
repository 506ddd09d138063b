"""What a team of threads can do beside the table: die on command, and tell who is missing."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from evener.comm.threads import ThreadTeam
from evener.errors import CollectiveTimeoutError, PeerLostError

TIMEOUT_S = 100.0


class Ranks:
    """Threads, one per rank, each of which runs one function."""

    def __init__(self, functions: dict[int, Callable[[], Any]]) -> None:
        self.results: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._run, args=item) for item in functions.items()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, rank: int, function: Callable[[], Any]) -> None:
        try:
            self.results[rank] = function()
        except Exception as error:
            self.results[rank] = error

    def join(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        return self.results


@pytest.mark.parametrize("arrival", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_sums_are_formed_in_rank_order(arrival: list[int]) -> None:
    # 1e8 - 1e8 + 1 in float32 is 1, and 0 in the other orders.
    tensors = [torch.tensor([value]) for value in (1e8, -1e8, 1.0)]
    team = ThreadTeam(3, timeout_s=TIMEOUT_S)
    comms = [team.communicator(rank) for rank in range(3)]
    ranks = Ranks({r: lambda r=r: comms[r].all_reduce(tensors[r], what="sum") for r in arrival})
    assert ranks.join() == {0: None, 1: None, 2: None}
    assert [float(t) for t in tensors] == [1.0, 1.0, 1.0]


def test_a_rank_sends_its_part_of_a_sum_twice_to_each_other_rank() -> None:
    team = ThreadTeam(3, timeout_s=TIMEOUT_S)
    comms = [team.communicator(rank) for rank in range(3)]
    Ranks({r: lambda r=r: comms[r].all_reduce(torch.ones(6), what="sum") for r in range(3)}).join()
    assert [comm.sent_bytes for comm in comms] == [2 * 2 * 8] * 3


def test_a_rank_that_fails_inside_an_operation_takes_it_along() -> None:
    team = ThreadTeam(2, timeout_s=TIMEOUT_S)
    comms = [team.communicator(rank) for rank in range(2)]
    inside = Ranks({0: lambda: comms[0].all_reduce(torch.ones(1), what="sum")})
    team.fail(0)
    assert isinstance(inside.join()[0], PeerLostError)
    with pytest.raises(PeerLostError, match="rank 0 has died"):
        comms[1].all_reduce(torch.ones(1), what="sum")


def test_all_that_are_missing_are_named() -> None:
    team = ThreadTeam(4, timeout_s=TIMEOUT_S)
    comms = [team.communicator(rank) for rank in range(4)]

    def come_last() -> None:
        while not team._exchanges or 0 not in team._exchanges[1].offers:
            time.sleep(0.001)
        comms[2].barrier(what="window 1", timeout_s=0.1)

    ranks = Ranks({0: lambda: comms[0].barrier(what="window 1"), 2: come_last})
    for error in ranks.join().values():
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (1, 3)
        assert "in 'window 1' for ranks 1 and 3" in str(error)
    with pytest.raises(CollectiveTimeoutError, match="cannot start 'next': rank 0 waited") as again:
        comms[0].barrier(what="next")
    assert again.value.missing == (1, 3)
