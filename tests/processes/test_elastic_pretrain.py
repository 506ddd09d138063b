"""``evener pretrain`` in an elastic team: who joins late takes the run over."""

import os
import signal
from collections.abc import Iterator

import pytest

from evener.dashboard.lock_owner import find_lock_owner
from evener.protocol.formation import Deadlines
from evener.run_report.writing import report
from helpers.coordinators import serving
from helpers.forking import Zygote
from helpers.limits import wait_until
from helpers.lineage import check_exactly_once
from helpers.pretraining import NEEDED, NUM_SAMPLES, RUN_TIMEOUT_S, Lab, be_evener
from helpers.ranks import Rank, RankTeam


@pytest.fixture
def coordinator() -> Iterator[str]:
    """A coordinator for 1 to 3 workers; its address."""
    with serving(1, 3, Deadlines(gather_s=0.1)) as address:
        yield address


def be_worker(rank: Rank, address: str, folder: str, command: list[str]) -> int:
    os.environ |= {
        "EVENER_COORDINATOR": address,
        "EVENER_MEMBER": f"w{rank.rank}",
        "EVENER_ELASTIC": "1:3",
    }
    rank.send(os.getpid())
    rank.receive(RUN_TIMEOUT_S)  # when to begin
    return be_evener(rank, folder, command)


def test_a_late_worker_takes_the_run_over_from_those_that_are_killed(
    lab: Lab, coordinator: str
) -> None:
    lab.configure(epochs=9999, checkpoint={"every": 20, "keep_last": 2}, eval={"every": 20})
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", "--quiet"]
    run = lab.path_of()
    with RankTeam(be_worker, 3, coordinator, str(lab.folder), command) as team:
        pids = [team.receive(rank) for rank in range(3)]
        team.send(0, "begin")
        wait_until(lambda: (run.path / "events.jsonl").exists() and run.of_type("window"))
        team.send(1, "begin")
        wait_until(lambda: run.of_type("worker_joined"))
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: find_lock_owner(run.path) == pids[1])
        team.send(2, "begin")
        wait_until(lambda: len(run.of_type("worker_joined")) == 2)
        os.kill(pids[1], signal.SIGKILL)
        wait_until(lambda: len(run.of_type("worker_lost")) == 2)
        os.kill(pids[2], signal.SIGTERM)
        outcomes = team.wait(RUN_TIMEOUT_S)
    assert outcomes[2].value == 128 + signal.SIGTERM, outcomes[2].story()
    assert [path.name for path in run.path.parent.iterdir() if path.name[0] != "."] == ["run"]
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
    assert run.events[-1]["reason"] == "stopped"
    last = run.events[-1]["window"]
    assert run.checkpoints[-1].name == f"step-{last}"
    (page,) = report([run.path])["runs"]
    changes = [event["kind"] for event in page["events"] if event["type"] == "team_changed"]
    assert changes == ["join", "loss", "join", "loss"]
    lab.run("run.yaml", "--resume", "--set", f"max_steps={last + 2}")
    assert run.checkpoints[-1].name == f"step-{last + 2}"
