"""A team of threads: who is present, and what waits for whom."""

import threading

import pytest

from evener.comm.threads import ThreadTeam
from evener.engine.team import Team
from evener.errors import CollectiveError
from helpers.limits import PATIENCE_S


def test_hurrying_ends_a_wait_for_a_rank_that_does_not_come() -> None:
    ranks = ThreadTeam(2)
    team, other = Team(ranks.communicator(0)), ranks.communicator(1)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(CollectiveError):
            team.introduce({})
        failed.set()

    thread = threading.Thread(target=wait, name="waits")
    thread.start()
    team.hurry(0.05)
    thread.join(PATIENCE_S)
    assert failed.is_set()
    team.close()
    other.close()
