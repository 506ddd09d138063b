"""A classifier of an elastic team, on threads: who joins has the best adapter and the patience."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.config.options import TaskOptions
from evener.config.runs import ClassifyRunConfig
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.classification.task import TextClassifier
from evener.tasks.job import Job
from evener.tasks.run_results import ClassifyResult
from helpers.classification import LABELS, TINY_BERT, samples
from helpers.elastic import Died, ElasticThreads, ThreadMembership
from helpers.limits import PATIENCE_S
from helpers.teams import run_team, setup

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

CONFIG = ClassifyRunConfig.model_validate(
    {
        "name": "words",
        "labels": LABELS,
        "model": TINY_BERT,
        "seq_len": 24,
        "precision": "fp32",
        "lora": {"rank": 2, "dropout": 0.0, "target_modules": ["query", "key", "value"]},
        # So high that no adapter is as good as none: the best one is that of the beginning. With
        # 10 gradients overflow, sooner or later, by how samples are shared out.
        "optimizer": {"lr": 1.0, "head_lr_ratio": 10.0},
        "batch_size": 16,
        "max_steps": 40,
        "eval": {"every": 2, "metric": "loss", "patience": 4, "baseline": False},
        "checkpoint": {"every": 0},
    }
)


class Watched(TextClassifier):
    """Does what a test wants after an evaluation."""

    def __init__(self, after: Callable[[int], object]) -> None:
        super().__init__(CONFIG, samples(60), quiet=True)
        self._after = after

    def judge(self, window: int, totals: object) -> str:
        words = super().judge(window, totals)
        self._after(window)
        return words


def test_the_best_adapter_is_evaluated_on_all_held_out_samples_at_the_end(tmp_path: Path) -> None:
    data = {"data": {"heldout_fraction": 0.5}, "class_weights": "balanced"}
    config = ClassifyRunConfig.model_validate({**CONFIG.model_dump(), **data})
    everything = samples(400)

    def run(comm: Communicator, *, resume: bool = False) -> ClassifyResult:
        task = tasks.pop()
        with setup(comm, task.model, task.optimizer, scheduler=task.schedule) as ddp:
            options = TaskOptions(out=tmp_path, resume=resume, quiet=True)
            return task.result(Job(task, config, options, ddp).go())

    # Made here, as threads share torch's generator.
    tasks = [TextClassifier(config, everything, quiet=True) for _ in range(3)]
    first, second = run_team(2, run)
    assert first == second
    summary = json.loads((first.run_folder / "summary.json").read_text())
    assert summary["early_stopped"]
    assert summary["num_evaluated"] == 64 < summary["num_heldout"] == summary["heldout_samples"]
    assert sum(map(sum, summary["confusion"])) == summary["num_heldout"]
    # What was saved does as well as the figures say.
    task = TextClassifier(config, everything, quiet=True)
    heldout = task._data.heldout
    saved = ClassifyPipeline.load(first.run_folder)
    right = saved.compare(heldout, saved.judge(heldout)).accuracy
    assert first.accuracy == summary["accuracy"] == pytest.approx(right)
    again = run(Communicator(), resume=True)  # nothing is left to do
    assert (again.accuracy, again.heldout_loss) == (first.accuracy, first.heldout_loss)


def test_who_joins_ends_early_with_the_best_adapter(tmp_path: Path) -> None:
    team = ElasticThreads(1)

    def after(member: str, window: int) -> None:
        if (member, window) == ("w0", 2):
            team.start("j", body)
            while not team.joiners:
                time.sleep(0.001)
        elif (member, window) == ("w0", 6):
            team.die("w0")

    def body(membership: ThreadMembership) -> ClassifyResult:
        task = Watched(lambda window: after(membership.member, window))
        config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
        setup = {"devices": "cpu", "elastic": membership, "config": config}
        with Ddp.setup(task.model, task.optimizer, task.schedule, **setup) as ddp:
            options = TaskOptions(out=tmp_path, resume=False, quiet=True)
            return task.result(Job(task, CONFIG, options, ddp).go())

    team.run(body)
    for fate in team.fates:
        if not (fate.error is None or isinstance(fate.error, Died)):
            raise fate.error
    fate = team.fate("j")
    assert [f.members for f in team.formations] == [("w0",), ("w0", "j"), ("j",)]
    result = fate.value
    summary = json.loads((result.run_folder / "summary.json").read_text())
    # The evaluations after windows 2, 4, 6 and 8 were worse.
    assert (summary["best_step"], summary["early_stopped"]) == (0, True)
    assert 8 <= summary["steps"] <= 10
    assert result.accuracy == summary["accuracy"] == summary["probe_accuracy"]
    adapter = load_file(result.adapter / "adapter_model.safetensors")
    trained = [tensor for name, tensor in adapter.items() if "lora_B" in name]
    assert trained
    assert not any(tensor.any() for tensor in trained), "the adapter of the beginning does nothing"
