"""A managed run that stops and goes on is the run that did not stop; checkpoints by the window."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import CheckpointError, ConfigError, Ddp, WorkerError
from evener.checkpoint import find_newest
from helpers.managed import (
    BATCH,
    SEED,
    assert_same,
    data,
    describe_job,
    loss_of,
    make_model,
    make_optimizer,
    train_plainly,
)

#: Windows of one step, which no clock closes: where a window ends decides how sums are rounded.
ONE_STEP: dict[str, Any] = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0, "batch_size": 4}
TWO_STEPS = ONE_STEP | {"anchor": 2, "max_anchor": 2}


def lower_rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_a_run_that_is_resumed_ends_as_one_that_never_stopped(policy: str, tmp_path: Path) -> None:
    """In the middle of an epoch, with momentum and a schedule, to the bit."""
    options: dict[str, Any] = {} if policy == "sync" else ONE_STEP
    options = options | {"policy": policy, "scheduler": lower_rate, "num_epochs": None}
    whole = describe_job(num_steps=5, **options).run().join()
    describe_job(num_steps=4, checkpoint_dir=tmp_path, **options).run().join()
    resumed = describe_job(num_steps=5, resume=tmp_path, **options).run().join()
    assert resumed.progress.steps == whole.progress.steps == 5
    assert resumed.progress.samples == whole.progress.samples
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    two = {"devices": ["cpu", "cpu"], "partition_ratios": [1.0, 0.3]}
    first = describe_job(
        num_epochs=None, num_steps=4, checkpoint_every=2, checkpoint_dir=tmp_path, **two
    )
    first.run().join()
    assert steps_in(tmp_path) == [2, 4]
    newest = find_newest(tmp_path)
    assert newest is not None
    assert newest.path.name == "step-4"

    three = describe_job(devices=3, partition_ratios=[1, 2, 1], checkpoint_dir=tmp_path)
    handle = three.resume(tmp_path).run()
    epochs = [(m.epoch, m.complete, m.samples) for m in handle.metrics()]
    state = handle.join()
    assert epochs == [(1, True, 30)], "what is left of the epoch"
    assert_same(state.state_dict(), train_plainly(6)[0])
    assert steps_in(tmp_path) == [2, 4, 6], "the end is saved, too"

    with pytest.raises(ConfigError, match=r"holds checkpoints of another run \(step-2\); resume"):
        describe_job(checkpoint_dir=tmp_path).run()
    with pytest.raises(
        CheckpointError, match=r"resume is '.*nothing', and there is no such folder"
    ):
        describe_job(resume=tmp_path / "nothing").run()
    alone = describe_job(resume=tmp_path / "step-2").run().join()
    assert_same(alone.state_dict(), train_plainly(6)[0])


def test_what_ddp_save_wrote_is_resumed(tmp_path: Path) -> None:
    model = make_model(torch.device("cpu"))
    optimizer = make_optimizer(list(model.parameters()))
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
        loader = ddp.loader(data(), batch_size=BATCH, seed=SEED)
        for batch in loader.epoch(0):
            ddp.backward(loss_of(model, batch))
            ddp.step()
        ddp.save(tmp_path)
    state = describe_job(resume=tmp_path).run().join()
    assert_same(state.state_dict(), train_plainly(6)[0])
    shutil.rmtree(tmp_path / "step-3")
    with pytest.raises(WorkerError, match=r"manifest\.json is missing"):
        describe_job(resume=tmp_path).run().join()


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
def test_checkpoint_every_counts_optimizer_steps(policy: str, tmp_path: Path) -> None:
    """At the end of each window with a multiple of it, whatever the policy; after a resume, too."""
    told: list[int] = []
    options: dict[str, Any] = {} if policy == "sync" else TWO_STEPS
    options = options | {
        "policy": policy,
        "num_epochs": None,
        "checkpoint_every": 3,
        "checkpoint_fn": lambda window, model: told.append(window),
    }
    describe_job(num_steps=4, checkpoint_dir=tmp_path, **options).run().join()
    last = describe_job(num_steps=10, resume=tmp_path, **options).run().join().progress
    assert last.steps == 10
    if policy == "sync":
        assert told == [3, 6, 9]
    else:
        assert last.window < 10
        assert len(set(told)) == len(told) == 3
