"""Rank 0 is far too slow (emulated) and is parked like any other; whatever it did, rank 1 does."""

import json

from helpers.launched import Sandbox

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


def test_a_slow_rank_0_is_parked_and_another_one_leads(sandbox: Sandbox) -> None:
    slow = ("--emulate-slow", "0:50")
    ended = sandbox.evener("launch", "--nproc", 2, *slow, sandbox.script(SCRIPT)).end()
    assert ended.code == 0, ended.err
    warnings = [line for line in ended.err.splitlines() if "warning: rank 0 is parked" in line]
    assert len(warnings) == 1, ended.err
    assert "Rank 1 is the main process from now on" in warnings[0]
    assert "use ddp.is_main_process" in warnings[0]
    told = [line.split(" ", 2) for line in sandbox.mailbox.read(6)]
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
