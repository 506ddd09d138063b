"""Rank 0 is far too slow (emulated) and is parked like any other; whatever it did, rank 1 does."""

import json
from pathlib import Path

from helpers.launched import Sandbox
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, RUN_TIMEOUT_S, Lab, RunFolder

SLOW = ("--emulate-slow", "0:50")


def check_events(run: RunFolder, num_samples: int, *, windows: int, epochs: int) -> None:
    """Each event once and in order, whichever rank wrote it; rank 0 is parked at the end."""
    events = run.events
    lines = (run.path / "events.jsonl").read_text().splitlines()
    assert len(lines) == len(events), "a line is torn"
    assert [event["window"] for event in run.of_type("window")] == list(range(windows))
    assert len(run.of_type("run_started")) == len(run.of_type("run_finished")) == 1
    assert (events[0]["type"], events[-1]["type"]) == ("run_started", "run_finished")
    assert events[-1]["reason"] == "completed"
    assert check_exactly_once(events, num_samples, whole_epochs=epochs) == []
    parked = [event["parked"] for event in run.of_type("window")]
    assert parked[0] == []
    assert parked[-1] == [0]
    first = parked.index([0])
    assert parked[first:] == [[0]] * (windows - first), "parked again at once in the next epoch"


def check_checkpoints(run: RunFolder, window: int, every: int, kept: int) -> None:
    names = [path.name for path in run.checkpoints]
    assert names[-1] == f"step-{window}"
    assert len(names) == kept
    written = [event["window"] for event in run.of_type("checkpoint")]
    assert written == sorted(written)
    missed = [event["window"] for event in run.of_type("checkpoint_missed")]
    assert sorted(written + missed) == list(range(0, window + 1, every))
    assert Path(run.summary["checkpoint"]).name == names[-1]


def tags(folder: Path) -> dict[str, list[int]]:
    """Steps of each scalar, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [s.step for s in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_pretraining(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.configure(
        batch_size=2, eval={"every": 15}, checkpoint={"every": 10, "keep_last": 3}, tensorboard=True
    )
    try:
        ended = lab.run("run.yaml", *SLOW, nproc=2)
        said = "".join(ended.outputs)
        run = lab.path_of()
        check_events(run, NUM_SAMPLES, windows=60, epochs=2)
        check_checkpoints(run, 60, 10, 3)
        assert [event["window"] for event in run.of_type("eval")] == [15, 30, 45, 60]
        summary = run.summary
        assert (summary["parked"], summary["steps"]) == ([0], 60)
        assert summary["committed_samples"] == 2 * NUM_SAMPLES
        assert sum(row["samples"] for row in summary["ranks"]) == 2 * NUM_SAMPLES
        assert sorted({*tags(run.path / "tensorboard")["train/loss"]}) == list(range(1, 61))
        assert said.count("parked:") == 1, "the closing table says it"
        assert "step 60" in said, "progress goes on"
        again = lab.run("run.yaml", "--resume", nproc=2)
        assert "has been completed (60 steps): nothing to do" in again.said
    finally:
        lab.close()


SCRIPT = """
import json
import torch
from pathlib import Path
from evener import Ddp, Sink

class Log(Sink):
    def __init__(self):
        self.kinds = []
    def emit(self, event):
        self.kinds.append(event["type"])
    def close(self):
        tell("sink " + json.dumps([self.kinds.count("run_started"), self.kinds.count("window")]))

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
main, commits = [], []
data = torch.arange(120.0).unsqueeze(1).repeat(1, 3) / 120
with Ddp.setup(model, optimizer, devices="cpu", sinks=[Log]) as ddp:
    @ddp.on_commit
    def note(result):
        commits.append(result.window)
        main.append(ddp.is_main_process)
        if ddp.is_main_process and result.window % 20 == 0:
            print(f"window {result.window} is done", flush=True)
    loader = ddp.loader(data, batch_size=4)
    for epoch in range(2):
        for x in loader.epoch(epoch):
            ddp.backward(model(x).square().mean())
            ddp.step()
        rows = [ddp.gather(model(x)) for x in ddp.eval_loader(data[:10], batch_size=4)]
        ddp.save(f"checkpoint-{epoch}")
    told = [ddp.is_main_process, len(commits), sum(main), model.weight.flatten().tolist()]
    tell("end " + json.dumps(told))
with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
    ddp.load("checkpoint-1")
    tell("loaded " + json.dumps([ddp.window, model.weight.flatten().tolist()]))
"""


def test_a_script(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    try:
        script = sandbox.script(SCRIPT)
        ended = sandbox.evener("launch", "--nproc", 2, *SLOW, script).end(RUN_TIMEOUT_S)
        assert ended.code == 0, ended.err
        told = [line.split(" ", 2) for line in sandbox.mailbox.read(6)]
    finally:
        sandbox.close()
    lines = [f"window {window} is done" for window in (0, 20, 40)]
    assert ended.out.splitlines() == lines, "whichever rank is the main process"
    said = {(int(rank), kind): json.loads(text) for rank, kind, text in told}
    (first_main, first_commits, first_led, weights), (last_main, commits, led, same) = (
        said[rank, "end"] for rank in range(2)
    )
    assert (first_main, last_main) == (False, True)
    assert (commits, same) == (60, weights)
    assert first_led == first_commits < 40, "rank 0 is the main process until it is parked"
    assert first_led + led == 60, "one rank is, at each commit"
    assert said[0, "sink"] == [1, first_led]
    assert said[1, "sink"] == [1, led], "the next one is told of the start, too"
    assert said[0, "loaded"] == said[1, "loaded"] == [60, weights]
