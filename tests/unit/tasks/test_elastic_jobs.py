"""Jobs of elastic teams, on threads: who joins uses the run's folder; runs outlive all workers."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.checkpoint import find_newest
from evener.config import folders
from evener.config.folders import FolderLock
from evener.config.options import TaskOptions
from evener.config.runs import JobConfig
from evener.errors import PeerLostError, RunEndedError
from evener.tasks import resuming
from evener.tasks.job import Job, Task
from evener.tasks.run_results import TaskResult
from helpers.elastic import ElasticThreads, Fate, ThreadMembership
from helpers.elastic_runs import park_nobody
from helpers.limits import PATIENCE_S
from helpers.lineage import check_exactly_once
from helpers.pretraining import RunFolder

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
CONFIG = {"batch_size": 8, "epochs": 4, "eval": {"every": 2}, "checkpoint": {"every": 2}}
KEYS = JobConfig.model_validate({"name": "line", **CONFIG})


class Line(Task):
    """Fits a line, and does what a test wants after an evaluation and before a micro-batch."""

    def __init__(
        self, after: Callable[[int], object], before: Callable[[int, int], object]
    ) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.after, self.before = after, before
        self.at_end: Callable[[], object] = lambda: None
        self.judged: list[int] = []

    def open_data(self, job: Job) -> tuple[Any, Any]:
        self.ddp = job.ddp
        return DATA, DATA

    def loss(self, batch: list[Tensor]) -> tuple[Tensor, float]:
        x, y = batch
        self.before(self.ddp.window, len(x))
        return (self.model(x) - y).square().mean(), len(x)

    def measure(self, samples: list[Any]) -> Sequence[float]:
        x, y = self.collate(samples)
        return float((self.model(x) - y).square().sum()), len(x)

    def judge(self, window: int, totals: Sequence[float]) -> str:
        self.judged.append(window)
        self.after(window)
        return ""

    def figures(self, job: Job, *, stopped: bool) -> dict[str, Any]:
        self.at_end()
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"judged": self.judged}

    def load_state_dict(self, state: Any) -> None:
        self.judged = list(state["judged"])


def work(
    membership: ThreadMembership,
    out: Path,
    after: Callable[[ThreadMembership, int], object] = lambda *_: None,
    before: Callable[[ThreadMembership, int, int], object] = lambda *_: None,
    at_end: Callable[[ThreadMembership], object] = lambda _: None,
) -> tuple[TaskResult, list[int]]:
    """One worker's part of the run.

    Args:
        membership: Its place in the team.
        out: Folder of runs.
        after: Called with the number of windows so far, after each evaluation.
        before: Called with the window and its number of samples, before each micro-batch.
        at_end: Called on the main process when it begins to sum up.
    """
    task = Line(
        lambda window: after(membership, window),
        lambda window, samples: before(membership, window, samples),
    )
    task.at_end = lambda: at_end(membership)
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
    setup = {"devices": "cpu", "elastic": membership, "config": config}
    with Ddp.setup(task.model, task.optimizer, **setup) as ddp:
        park_nobody(ddp)
        options = TaskOptions(out=out, resume=False, quiet=True)
        return Job(task, KEYS, options, ddp).go(), task.judged


def test_a_worker_that_joins_becomes_the_main_process_of_the_run(tmp_path: Path) -> None:
    team = ElasticThreads(2)
    free: list[bool] = []

    def before(membership: ThreadMembership, *_: object) -> None:
        is_over = "w0" not in team.formations[-1].members
        if membership.member == "w1" and is_over and not free:
            team.threads[0].join(PATIENCE_S)  # its locks end with it
            free.append(is_free(tmp_path / "line"))

    def after(membership: ThreadMembership, window: int) -> None:
        member = membership.member
        if (member, window) == ("w0", 2):
            team.start("j", body)
            while not team.joiners:
                time.sleep(0.001)
        elif window == {"w0": 6, "w1": 10}.get(member):
            team.die(member)
        elif (member, window) == ("j", 12):
            team.threads[1].join(PATIENCE_S)
        elif (member, window) == ("j", 14):
            free.append(is_free(tmp_path / "line"))

    def body(membership: ThreadMembership) -> tuple[TaskResult, list[int]]:
        return work(membership, tmp_path, after, before)

    team.run(body)
    assert [f.members for f in team.formations][2:] == [("w1", "j"), ("j",)]
    result, judged = value(team.fate("j"))
    assert result.run_folder == tmp_path / "line"
    assert [path.name for path in tmp_path.iterdir()] == ["line"]
    assert judged == [*range(2, 17, 2)]
    run = RunFolder(tmp_path / "line")
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []
    assert run.events[-1]["type"] == "run_finished"
    assert run.checkpoints[-1].name == "step-16"
    # At first nobody had taken the lock of w0; then j has taken that of w1.
    assert free == [False, False]
    assert is_free(tmp_path / "line")


def test_a_team_of_which_nobody_is_left_continues_from_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end(membership: ThreadMembership, window: int) -> None:
        if window == 6:
            while find_newest(tmp_path / "line" / "checkpoints") is None:
                time.sleep(0.001)
            membership.team.die(membership.member)

    def body(membership: ThreadMembership) -> Any:
        try:
            return work(membership, tmp_path, end)
        finally:
            if membership.member == "w1":
                membership.team.start("r", lambda joiner: work(joiner, tmp_path, pause))

    def pause(membership: ThreadMembership, window: int) -> None:
        if window == 10:
            membership.team.die(membership.member)

    team = ElasticThreads(2)
    team.run(body)
    assert not team.formations[-1].has_state
    run = RunFolder(tmp_path / "line")
    (resumed,) = run.of_type("run_resumed")
    assert resumed["window"] == int(Path(resumed["path"]).name.removeprefix("step-")) <= 6
    newest = run.checkpoints[-1].name

    # Everything has ended; the same command is given again, twice.
    again = ElasticThreads(2).run(lambda founder: work(founder, tmp_path))
    result, judged = value(again[0])
    assert result.run_folder == run.path
    said = capsys.readouterr().err
    assert f"has not been completed: it continues from {newest}" in said
    assert "ddp.save" not in said, "that is for scripts"
    assert judged == [*range(2, 17, 2)]
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []
    other = ElasticThreads(1).run(lambda founder: work(founder, tmp_path))
    assert value(other[0])[0].run_folder == tmp_path / "line-2"
    # The summary names nobody for numbers that no worker has had.
    summary = json.loads((tmp_path / "line-2" / "summary.json").read_text())
    assert (summary["world_size"], [row["rank"] for row in summary["ranks"]]) == (1, [0])


def test_workers_that_find_nobody_to_tell_them_the_folder_choose_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first main worker dies before the others know its choice, and they fail with it."""
    team = ElasticThreads(2)

    def claim_folder(parent: Path, name: str) -> Path:
        if threading.current_thread().name == "w0":
            team.die("w0")
        return folders.claim_folder(parent, name)

    monkeypatch.setattr(resuming, "claim_folder", claim_folder)

    def await_the_other(*_: object) -> None:
        while len(team.formations[-1].members) == 1 and not team.joiners:
            time.sleep(0.001)

    def body(membership: ThreadMembership) -> tuple[TaskResult, list[int]]:
        try:
            return work(membership, tmp_path, before=await_the_other)
        finally:
            if membership.member == "w1":  # which still lives while these come
                for joiner in ("j0", "j1"):
                    team.start(joiner)

    team.run(body)
    assert isinstance(team.fate("w1").error, PeerLostError)
    for joiner in ("j0", "j1"):
        assert value(team.fate(joiner))[0].run_folder == tmp_path / "line"
    assert [path.name for path in tmp_path.iterdir()] == ["line"]
    run = RunFolder(tmp_path / "line")
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []
    assert run.events[-1]["type"] == "run_finished"


def test_a_worker_that_continues_when_the_others_have_ended_the_run_has_nothing_to_do(
    tmp_path: Path,
) -> None:
    team = ElasticThreads(2)

    def stop(membership: ThreadMembership, window: int, _: int) -> None:
        # In the last epoch; one that has turned slow may have no share in its last window.
        if membership.member == "w1" and window >= 12 and len(team.formations) == 1:
            team.leave_out("w1")
            with team.condition:
                assert team.condition.wait_for(lambda: "w0" not in team.living, PATIENCE_S)

    team.run(lambda membership: work(membership, tmp_path, before=stop))
    assert isinstance(team.fate("w1").error, RunEndedError)
    run = RunFolder(value(team.fate("w0"))[0].run_folder)
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []
    assert run.events[-1]["reason"] == "completed"


def test_a_main_process_lost_while_it_sums_up_leaves_that_to_the_next(tmp_path: Path) -> None:
    team = ElasticThreads(2)

    def end(membership: ThreadMembership) -> None:
        if membership.member == "w0":
            team.die("w0")

    team.run(lambda membership: work(membership, tmp_path, at_end=end))
    result, _ = value(team.fate("w1"))
    run = RunFolder(tmp_path / "line")
    assert result.checkpoint == run.checkpoints[-1]
    assert run.events[-1]["reason"] == "completed"
    summary = run.summary
    assert summary["checkpoint"] == str(result.checkpoint)
    assert summary["steps"] == 16
    assert summary["committed_samples"] == len(DATA) * 4
    rows = [row for e in run.of_type("window") for row in e["ranks"]]
    assert {row["member"] for row in rows} == {"w0", "w1"}
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []


def is_free(folder: Path) -> bool:
    with FolderLock(folder) as lock:
        return lock.take()


def value(fate: Fate) -> tuple[TaskResult, list[int]]:
    """What a member has returned."""
    if fate.error is not None:
        raise fate.error
    result: tuple[TaskResult, list[int]] = fate.value
    return result
