"""Jobs of elastic teams, on threads: who joins uses the run's folder; runs outlive all workers."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig
from evener.checkpoint import Checkpoint, find_newest
from evener.config.folders import FolderLock
from evener.config.options import TaskOptions
from evener.config.runs import JobConfig
from evener.tasks.job import Job, Task
from evener.tasks.resuming import RUN
from evener.tasks.run_results import TaskResult
from helpers.elastic import ElasticThreads, Fate, ThreadMembership
from helpers.limits import PATIENCE_S
from helpers.lineage import check_exactly_once
from helpers.pretraining import RunFolder

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
CONFIG = {"batch_size": 8, "epochs": 4, "eval": {"every": 2}, "checkpoint": {"every": 2}}
KEYS = JobConfig.model_validate({"name": "line", "measure": False, **CONFIG})


class Line(Task):
    """Fits a line, and does what a test wants after an evaluation."""

    def __init__(self, after: Callable[[int], object]) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.after = after
        self.judged: list[int] = []

    def open_data(self, job: Job) -> tuple[Any, Any]:
        return DATA, DATA

    def loss(self, batch: list[Tensor]) -> tuple[Tensor, float]:
        x, y = batch
        return (self.model(x) - y).square().mean(), len(x)

    def measure(self, samples: list[Any]) -> Sequence[float]:
        x, y = self.collate(samples)
        return float((self.model(x) - y).square().sum()), len(x)

    def judge(self, window: int, totals: Sequence[float]) -> str:
        self.judged.append(window)
        self.after(window)
        return ""

    def documents(self) -> dict[str, Any]:
        return {RUN: {"config": KEYS.model_dump(mode="json")}, "judged.json": self.judged}

    def adopt(self, documents: Any) -> None:
        self.judged = list(documents["judged.json"])

    def resume(self, job: Job, checkpoint: Checkpoint) -> None:
        super().resume(job, checkpoint)
        self.adopt({"judged.json": checkpoint.document("judged.json")})


def work(
    membership: ThreadMembership, out: Path, after: Callable[[ThreadMembership, int], object]
) -> tuple[TaskResult, list[int]]:
    task = Line(lambda window: after(membership, window))
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
    setup = {"devices": "cpu", "elastic": membership, "config": config}
    with Ddp.setup(task.model, task.optimizer, **setup) as ddp:
        options = TaskOptions(out=out, resume=False, quiet=True)
        return Job(task, KEYS, options, ddp).go(), task.judged


def test_a_worker_that_joins_becomes_the_main_process_of_the_run(tmp_path: Path) -> None:
    team = ElasticThreads(2)
    free: list[bool] = []

    def after(membership: ThreadMembership, window: int) -> None:
        member = membership.member
        if (member, window) == ("w0", 2):
            team.start("j", body)
            while not team.joiners:
                time.sleep(0.001)
        elif window == {"w0": 6, "w1": 10}.get(member):
            team.die(member)
        elif (member, window) == ("j", 14):
            free.append(is_free(tmp_path / "line"))

    def body(membership: ThreadMembership) -> tuple[TaskResult, list[int]]:
        return work(membership, tmp_path, after)

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
    assert free == [False]  # j has taken the lock
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
    again = ElasticThreads(2).run(lambda founder: work(founder, tmp_path, lambda *_: None))
    result, judged = value(again[0])
    assert result.run_folder == run.path
    assert f"has not been completed: it continues from {newest}" in capsys.readouterr().err
    assert judged == [*range(2, 17, 2)]
    assert check_exactly_once(run.events, len(DATA), whole_epochs=4) == []
    other = ElasticThreads(1).run(lambda founder: work(founder, tmp_path, lambda *_: None))
    assert value(other[0])[0].run_folder == tmp_path / "line-2"
    # The summary names nobody for numbers that no worker has had.
    summary = json.loads((tmp_path / "line-2" / "summary.json").read_text())
    assert (summary["world_size"], [row["rank"] for row in summary["ranks"]]) == (5, [0])


def is_free(folder: Path) -> bool:
    with FolderLock(folder) as lock:
        return lock.take()


def value(fate: Fate) -> tuple[TaskResult, list[int]]:
    """What a member has returned."""
    if fate.error is not None:
        raise fate.error
    result: tuple[TaskResult, list[int]] = fate.value
    return result
