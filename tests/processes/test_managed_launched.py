"""A script with ``Ddp.builder`` as users write it: alone, and as a rank of a launched team."""

import json
import re
import sys

import pytest

from helpers.launched import Sandbox
from helpers.ports import free_port

SCRIPT = """
import torch
from torch import nn
from evener import Ddp, EpochContext, record_scalar

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
def split(a, b):
    return torch.utils.data.TensorDataset(x[a:b], x[a:b].sum(1, keepdim=True))
def train(model, batch):
    inputs, targets = batch
    record_scalar("count", len(inputs), "sum")
    return (model(inputs) - targets).square().mean()
def announce(epoch, model, context: EpochContext):
    tell(f"epoch {epoch} of rank {context.rank} of {context.world_size} at step {context.step}")
handle = Ddp.builder(
    lambda device: nn.Linear(4, 1, dtype=torch.float64),
    lambda params: torch.optim.SGD(params, lr=0.1),
    train,
    dataset=split(0, 40), eval_dataset=split(40, 64), batch_size=10, num_epochs=2,
    epoch_fn=announce, metrics_fn=lambda m: tell(f"metrics of {m.epoch}"),
    policy=sys.argv[1], quiet=True, **eval(sys.argv[2]),
).run()
def row(m):
    return [m.avg_loss, m.scalars["count"], m.eval["count"], m.eval["loss"]]
found = [row(m) for m in handle.metrics()]
state = handle.join()
print(json.dumps([handle.world_size, handle.devices, found, state.params["weight"][0].tolist()]))
"""


@pytest.fixture
def sandbox(tmp_path):
    box = Sandbox(tmp_path)
    yield box
    box.close()


def results_of(*outputs: str) -> list[list]:
    lines = [line for output in outputs for line in output.splitlines()]
    return [json.loads(re.sub(r"^\[.*?\] ", "", line)) for line in lines if "[[" in line]


@pytest.mark.parametrize(
    ("launcher", "policy"), [("evener", "sync"), ("variables", "cadence"), ("none", "sync")]
)
def test_a_builder_trains_in_whatever_has_started_its_script(sandbox, launcher, policy):
    """On one device, in workers of its own, and as a rank of a team: all with the same numbers."""
    script = sandbox.script("import json\n" + SCRIPT)
    anchored = {"anchor": 1, "max_anchor": 1, "max_batch_diff": 0} if policy == "cadence" else {}
    anchored["run_folder"] = "run"
    options = [policy, repr(anchored)]
    if launcher == "evener":
        runs = [sandbox.evener("launch", "--nproc", 2, script, *options)]
    elif launcher == "none":
        options[1] = repr({**anchored, "devices": ["cpu", "cpu"]})
        runs = [sandbox.start(sys.executable, script, *options)]
    else:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        runs = []
        for rank in range(2):
            sandbox.environ |= {**place, "RANK": str(rank)}
            runs.append(sandbox.start(sys.executable, script, *options))
        for name in (*place, "RANK"):
            del sandbox.environ[name]
    ended = [run.end() for run in runs]
    assert [end.code for end in ended] == [0] * len(ended), ended
    results = results_of(*(end.out for end in ended))
    assert len(results) == (1 if launcher == "none" else 2), "join gives the result on each rank"
    for world_size, devices, found, weight in results:
        assert (world_size, devices) == (2, ["cpu", "cpu"])
        assert [row[1:3] for row in found] == [[40, 24]] * 2
        assert (found, weight) == tuple(results[0][2:])
    lines = sandbox.mailbox.rest()
    assert [line[2:] for line in lines if "metrics" in line] == ["metrics of 0", "metrics of 1"]
    steps = 4
    assert sorted(line[2:] for line in lines if "epoch" in line) == [
        f"epoch {epoch} of rank {rank} of 2 at step {steps * epoch}"
        for epoch in range(2)
        for rank in range(2)
    ]
    _check_run_folder(sandbox, results[0][2])
    alone = sandbox.start(sys.executable, script, policy, "{'devices': 'cpu'}")
    ((_, _, found, weight),) = results_of(alone.end().out)
    if policy == "sync":
        for together, by_one in zip(results[0][2], found, strict=True):
            assert together == pytest.approx(by_one, rel=1e-12)
        assert results[0][3] == pytest.approx(weight, rel=1e-12)
    again = sandbox.start(sys.executable, script, *options).end()
    assert again.code == 1
    assert "run', which holds the events of another run" in again.err


def _check_run_folder(sandbox: Sandbox, found: list[list[float]]) -> None:
    """``evener report`` reads what is there, and each epoch is on record."""
    folder = sandbox.folder / "run"
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    epochs = [event for event in events if event["type"] == "epoch"]
    assert [event["scalars"]["count"] for event in epochs] == [40, 40]
    assert [event["eval"]["loss"] for event in epochs] == [row[3] for row in found]
    evals = [event for event in events if event["type"] == "eval"]
    assert [event["weight"] for event in evals] == [24, 24]
    assert events[-1]["type"] == "run_finished"
    trace = sandbox.folder / "trace.json"
    report = sandbox.evener("report", folder, "-o", "report.html", "--trace", trace).end()
    assert (report.code, (sandbox.folder / "report.html").is_file()) == (0, True), report.err
    assert json.loads(trace.read_text())["traceEvents"]
