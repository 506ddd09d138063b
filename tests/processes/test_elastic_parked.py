"""A rank of an elastic team of processes is parked while another one is killed."""

import signal
from typing import Any

from evener import WindowResult
from evener.protocol.formation import Deadlines
from helpers.coordinators import serving
from helpers.elastic_ranks import WINDOWS, Windows, die, set_up, summary
from helpers.elastic_runs import Parks, loop
from helpers.ranks import Rank, run_ranks_to_end


def train(rank: Rank, address: str) -> tuple[Windows, list[list[float]], list[int]]:
    def commit(result: WindowResult) -> None:
        if rank.rank == 1 and result.window == 1:
            die()

    ddp, model = set_up(rank, address, "1:3")
    with ddp:
        engine: Any = ddp.assembly.engine
        engine.lookahead.stale_policy = Parks(ddp, misfits=[2], apart=100)
        trained = loop(ddp, model, commit)
    return *summary(trained), trained.handed_out


def test_a_parked_rank_continues_with_the_one_that_is_left() -> None:
    with serving(1, 3, Deadlines(gather_s=60.0)) as address:
        first, killed, parked = run_ranks_to_end(train, 3, address)
    assert killed.died_of is signal.SIGKILL, killed.story()
    assert all(one.returned for one in (first, parked)), [o.story() for o in (first, parked)]
    windows, state, _ = first.value
    assert windows == WINDOWS
    later, same_state, handed_out = parked.value
    assert later in ([WINDOWS[0], *WINDOWS[1:]], [WINDOWS[0], *WINDOWS[2:]])
    assert same_state == state
    assert len(handed_out) > 1, "it contributes again"
