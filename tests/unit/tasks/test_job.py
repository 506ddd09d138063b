"""The driver, with a task as small as can be: what is the same whatever a task trains."""

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.config.options import TaskOptions
from evener.config.runs import JobConfig
from evener.engine.team import Team
from evener.errors import CheckpointError, ConfigError, DataError, UsageError
from evener.tasks.job import Job, Task, run_task
from evener.tasks.resuming import find_run
from evener.tasks.run_results import TaskResult
from helpers.lineage import check_exactly_once
from helpers.models import seeded
from helpers.pretraining import RunFolder
from helpers.teams import Parks, run_team, setup

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
DATA = torch.utils.data.TensorDataset(X, Y)
LARGE_X = torch.randn(200, 3, generator=torch.Generator().manual_seed(2))
LARGE = torch.utils.data.TensorDataset(LARGE_X, LARGE_X.sum(1, keepdim=True))
HELD_OUT = torch.utils.data.TensorDataset(X[:7], Y[:7])


class Line(Task):
    """Fits a line; has no memory for more than ``capacity`` samples."""

    def __init__(self, capacity: int = 99, patience: int = 99) -> None:
        self.model = seeded(lambda: nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.capacity = capacity
        self.patience = patience
        self.sizes: list[int] = []
        self.judged: list[tuple[int, float, float]] = []
        self.lengths_set: list[float] = []

    def open_data(self, job: Job) -> tuple[Any, Any]:
        return DATA, HELD_OUT

    def loss(self, batch: list[Tensor]) -> tuple[Tensor, float]:
        x, y = batch
        self.sizes.append(len(x))
        if len(x) > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return (self.model(x) - y).square().mean(), len(x)

    def measure(self, samples: list[Any]) -> Sequence[float]:
        x, y = self.collate(samples)
        return float((self.model(x) - y).square().sum()), len(x), float(y.sum())

    def judge(self, window: int, totals: Sequence[float]) -> str:
        self.judged.append((window, totals[1], totals[2]))
        return f"the {len(self.judged)}. look"

    def set_length(self, epochs: float) -> None:
        self.lengths_set.append(epochs)

    @property
    def is_done(self) -> bool:
        return len(self.judged) >= self.patience

    def figures(self, job: Job, *, stopped: bool) -> dict[str, Any]:
        return {"looks": len(self.judged), "perplexity": 23.7}


def train(
    world_size: int, out: Path, *, resume: bool = False, **keys: Any
) -> list[tuple[TaskResult, Line]]:
    """A run of ``Line``; the result and the task of each rank."""
    capacity, patience = keys.pop("capacity", 99), keys.pop("patience", 99)
    shares = keys.pop("shares", None)
    config = JobConfig.model_validate({"name": "line", "batch_size": 8, **keys})

    def body(comm: Communicator) -> tuple[TaskResult, Line]:
        task = Line(capacity if comm.rank == 0 else 99, patience)
        clip = config.max_grad_norm
        with setup(comm, task.model, task.optimizer, shares=shares, max_grad_norm=clip) as ddp:
            options = TaskOptions(out=out, resume=resume, quiet=False)
            return Job(task, config, options, ddp).go(), task

    return run_team(world_size, body)


def test_a_share_that_does_not_fit_is_done_again_in_smaller_parts(tmp_path: Path) -> None:
    keys = {"epochs": 2, "eval": {"every": 3}}
    (_, small), (_, other) = train(2, tmp_path, capacity=2, shares=[1.0, 1.0], **keys)
    assert max(small.sizes) > 2  # it was tried
    assert max(small.sizes[-5:]) <= 2
    assert max(other.sizes) > 2
    run = RunFolder(tmp_path / "line")
    assert check_exactly_once(run.events, len(DATA), whole_epochs=2) == []
    assert small.judged == other.judged
    assert [window for window, *_ in small.judged] == [3, 6, 8]
    assert {count for _, count, _ in small.judged} == {len(HELD_OUT)}
    assert small.judged[0][2] == pytest.approx(float(Y[:7].sum()))
    assert small.lengths_set == [2.0]


def test_evaluations_use_the_same_part_each_time_and_the_last_one_uses_all(
    tmp_path: Path, capfd: Any
) -> None:
    class Much(Line):
        def open_data(self, job: Job) -> tuple[Any, Any]:
            return DATA, LARGE

    def run(world_size: int, **keys: Any) -> list[tuple[int, float, float]]:
        def body(comm: Communicator) -> list[tuple[int, float, float]]:
            task = Much()
            with setup(comm, task.model, task.optimizer) as ddp:
                Job(task, config, TaskOptions(out=tmp_path, resume=bool(resumes)), ddp).go()
            return task.judged

        resumes = keys.pop("resumes", 0)
        config = JobConfig.model_validate({"name": "much", "batch_size": 8, **keys})
        judged, *others = run_team(world_size, body)
        assert all(other == judged for other in others)
        return judged

    begun = run(1, max_steps=4, eval={"every": 2})
    resumed = run(2, max_steps=8, eval={"every": 2}, resumes=1)
    ends = [4, 8]  # of all, after the part
    assert [window for window, *_ in begun + resumed] == [2, 4, 4, 6, 8, 8]
    assert [count for _, count, _ in begun + resumed] == [64, 64, 200, 64, 64, 200]
    part, *parts = [found for _, count, found in begun + resumed if count == 64]
    assert parts == pytest.approx([part] * 3)
    assert begun[-1][2] == pytest.approx(float(LARGE.tensors[1].sum()))
    folder = RunFolder(tmp_path / "much")
    evals = [(e["window"], e["name"], e["weight"]) for e in folder.of_type("eval")]
    assert [window for window, name, _ in evals if name == "heldout_all"] == ends
    assert {weight for _, name, weight in evals if name == "heldout"} == {64}
    whole = [e["loss"] for e in folder.of_type("eval") if e["name"] == "heldout_all"]
    assert folder.summary["heldout_loss"] == whole[-1]
    assert folder.summary["heldout_samples"] == 200
    assert "evaluations use 64 of 200 held-out samples, always the same" in capfd.readouterr().err
    unlimited = run(1, name="all", max_steps=2, eval={"every": 1, "time_fraction": 1})
    assert [count for _, count, _ in unlimited] == [200, 200]


def test_a_run_ends_where_the_task_is_done(tmp_path: Path, capfd: Any) -> None:
    results = train(2, tmp_path, patience=2, epochs=9, eval={"every": 2})
    for result, task in results:
        assert not result.stopped
        assert len(task.judged) == 2
    assert results[0][0] == results[1][0]
    run = RunFolder(tmp_path / "line")
    assert run.summary["looks"] == 2
    assert 4 <= run.summary["steps"] <= 6
    assert run.events[-1]["reason"] == "completed"
    said = capfd.readouterr().err
    assert "step 2: the 1. look" in said
    assert "looks: 2\nperplexity: 23.7\n" in said


def test_a_run_is_resumed_on_other_ranks_and_ends_once(tmp_path: Path, capfd: Any) -> None:
    train(1, tmp_path, max_steps=3, checkpoint={"every": 2})
    ((result, _), *_) = train(3, tmp_path, resume=True, epochs=2)
    run = RunFolder(tmp_path / "line")
    assert result.checkpoint == run.checkpoints[-1]
    assert result.heldout_loss == run.summary["heldout_loss"]
    assert check_exactly_once(run.events, len(DATA), whole_epochs=2) == []
    before = run.contents()
    train(2, tmp_path, resume=True, epochs=2)
    assert run.contents() == before
    assert "has been completed (8 steps): nothing to do" in capfd.readouterr().err


class Remembers(Line):
    """Its evaluations are part of its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"judged": [list(one) for one in self.judged]}

    def load_state_dict(self, state: Any) -> None:
        self.judged = [tuple(one) for one in state["judged"]]


@pytest.mark.parametrize(("misfit", "apart"), [(0, 99), (1, 99), (1, 2)])
def test_a_run_with_a_parked_rank_is_that_of_one_rank(
    misfit: int, apart: int, tmp_path: Path
) -> None:
    """Parked to the end of the run, or called back before."""
    config = JobConfig.model_validate(
        {"batch_size": 4, "epochs": 2, "eval": {"every": 3}, "checkpoint": {"every": 0}}
    )

    def run(comm: Communicator) -> tuple[TaskResult, list[Any]]:
        task = Remembers()
        named = config.model_copy(update={"name": f"of-{comm.world_size}"})
        with setup(comm, task.model, task.optimizer, max_grad_norm=1.0) as ddp:
            if comm.world_size > 1:
                lookahead = ddp.assembly.engine.lookahead
                lookahead.stale_policy = Parks(ddp, [misfit], apart)
            result = Job(task, named, TaskOptions(out=tmp_path, quiet=True), ddp).go()
        return result, task.judged

    ((alone, judged),) = run_team(1, run)
    for result, seen in run_team(3, run):
        assert result.heldout_loss == pytest.approx(alone.heldout_loss, rel=1e-5)
        assert result.checkpoint.name == alone.checkpoint.name == "step-16"
        assert [one[:2] for one in seen] == [one[:2] for one in judged]
    events = RunFolder(tmp_path / "of-3").events
    assert check_exactly_once(events, len(DATA), whole_epochs=2) == []
    parked = [event["parked"] for event in events if event["type"] == "window"]
    assert [misfit] in parked
    assert parked[-1] == ([misfit] if apart == 99 else [])
    assert events[-1]["reason"] == "completed"


def test_all_ranks_take_the_folder_that_rank_0_has_made(tmp_path: Path) -> None:
    (tmp_path / "x" / "checkpoints").mkdir(parents=True)
    config = JobConfig(name="x")

    def body(comm: Communicator) -> Path:
        # Another host may see another folder of runs.
        options = TaskOptions(out=tmp_path if comm.rank == 0 else tmp_path / "elsewhere")
        return find_run(Team(comm), options, config, say=print)[0]

    assert run_team(3, body) == [tmp_path / "x-2"] * 3
    assert not (tmp_path / "elsewhere").exists()


OLD = {"data": {"files": 3, "text": "old"}, "tokenizer": "bytes"}
NEW = {**OLD, "data": {"files": 3, "text": "new"}}
LESS = {"data": OLD["data"]}
NESTED = {**OLD, "data": {**NEW["data"], "text": {}, "lines": 2}}


def run_made_of(out: Path, *parts: dict[str, Any], resume: bool = False, **keys: Any) -> None:
    """A run whose ranks are made of these."""

    class Made(Line):
        made_from = MappingProxyType({"data": ("seed", "eval")})

        def made_of(self, job: Job) -> dict[str, Any]:
            return parts[job.ddp.rank]

    def body(comm: Communicator) -> None:
        task = Made()
        with setup(comm, task.model, task.optimizer) as ddp:
            Job(task, config, TaskOptions(out=out, resume=resume), ddp).go()

    config = JobConfig(name="made", batch_size=8, max_steps=2, **keys)
    run_team(len(parts), body)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (NEW, r"rank 1 sees different data than rank 0 .*the same seed, eval and the files"),
        (LESS, r"rank 1 sees different tokenizer than rank 0 \(None and 'bytes'\); .* tokenizer, "),
    ],
)
def test_ranks_that_are_made_of_something_else_are_refused(
    other: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        run_made_of(tmp_path, OLD, other)
    if other is LESS:
        with pytest.raises(DataError, match=r"different tokenizer .*\('bytes' and None\)"):
            run_made_of(tmp_path, other, OLD)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            OLD,
            NEW,
            r"different data \(data\.text 'old' -> 'new'; seed 0 -> 7\)\. Put seed, eval and the "
            "files that they name back, or start without --resume\nevener: ",
        ),
        (OLD, LESS, r"different tokenizer \(tokenizer 'bytes' -> None\)\. Put tokenizer back"),
        (LESS, OLD, r"different tokenizer \(tokenizer None -> 'bytes'\)"),
        (OLD, NESTED, r"different data \(data\.lines None -> 2; data\.text 'old' -> \{\}; "),
        (NESTED, OLD, r"different data \(data\.lines 2 -> None; data\.text \{\} -> 'old'; "),
    ],
)
def test_a_checkpoint_that_is_made_of_something_else_is_refused(
    before: dict[str, Any], after: dict[str, Any], words: str, tmp_path: Path
) -> None:
    run_made_of(tmp_path, before, before)
    with pytest.raises(CheckpointError, match=words):
        run_made_of(tmp_path, after, after, resume=True, seed=7, epochs=3)
    run_made_of(tmp_path, before, before, resume=True)


def test_an_error_is_told_as_the_end_of_the_run(tmp_path: Path) -> None:
    class Failing(Line):
        def judge(self, window: int, totals: Sequence[float]) -> str:
            raise ValueError("no judge")

    task = Failing()
    with pytest.raises(ValueError, match="no judge"):
        run_task(task, {"name": "bad", "epochs": 1, "devices": "cpu"}, out=tmp_path, quiet=True)
    last = RunFolder(tmp_path / "bad").events[-1]
    assert (last["reason"], last["message"]) == ("failed", "ValueError: no judge")


@pytest.mark.parametrize("key", ["steps", "of_ideal"])
def test_a_figure_that_would_replace_one_of_the_summary_is_refused(
    key: str, tmp_path: Path
) -> None:
    class Named(Line):
        key = "looks"

        def figures(self, job: Job, *, stopped: bool) -> dict[str, Any]:
            return {self.key: 7}

    task, keys = Named(), {"name": "x", "max_steps": 3, "devices": "cpu"}
    task.key = key
    with pytest.raises(UsageError, match=f"'{key}', which are keys of summary.json; return them"):
        run_task(task, keys, out=tmp_path, quiet=True)
    run_task(Named(), keys, out=tmp_path, resume=True, quiet=True)  # as the error says
    assert RunFolder(tmp_path / "x").summary["looks"] == 7


def test_a_folder_of_a_run_that_cannot_begin_is_given_back(tmp_path: Path) -> None:
    class Empty(Line):
        def open_data(self, job: Job) -> tuple[Any, Any]:
            return [], HELD_OUT

    with pytest.raises(ConfigError, match="no batch"):
        run_task(Empty(), out=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_task_may_hold_nothing_out(tmp_path: Path) -> None:
    class Blind(Line):
        def open_data(self, job: Job) -> tuple[Any, Any]:
            return DATA, []

    task = Blind()
    result = run_task(task, {"max_steps": 2, "eval": {"every": 1}}, out=tmp_path, quiet=True)
    assert (result.heldout_loss, task.judged) == (None, [])
    assert RunFolder(tmp_path / "blind").summary["heldout_loss"] is None


def test_the_keys_of_a_run_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batchsize"):
        run_task(Line(), {"batchsize": 3}, out=tmp_path)
    with pytest.raises(CheckpointError, match="no run 'line' in"):
        run_task(Line(), out=tmp_path, resume=True)
