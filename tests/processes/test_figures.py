"""Figures of real runs, against an independent script that reads their events."""

import json

import pytest

from evener.run_report.writing import report
from helpers.agreement import assert_agree
from helpers.launched import Sandbox
from helpers.limits import PATIENCE_S
from helpers.recomputed import recompute


def test_the_closing_lines_agree_with_the_events(trained):
    run = trained.team
    expected = recompute(run.path / "events.jsonl")
    (document,) = report([run.path])["runs"]
    assert_agree(expected, document)
    summary = run.summary
    assert summary["tokens_per_s"] == pytest.approx(expected["speed"], rel=0.01)
    assert summary["of_ideal"] == pytest.approx(expected["of_ideal"], rel=0.01)
    for rank, alone in expected["alone"].items():
        assert summary["solo_tokens_per_s"][rank] == pytest.approx(alone, rel=0.01)
    if len(expected["alone"]) == 2:  # neither was parked from the start
        fastest = max(expected["alone"], key=expected["alone"].get)
        multiple, of_ideal = expected["multiple"], expected["of_ideal"]
        told = f"{multiple:.2f}× rank {fastest} alone, {of_ideal:.0%} of all ranks together"
        assert told in " ".join(trained.said.split())


SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
from evener import Ddp
from evener.observe.jsonl import JsonlSink

how, windows = sys.argv[1], int(sys.argv[2])
folder = Path("runs") / how
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.arange(4800.0).unsqueeze(1).repeat(1, 3) / 4800
sinks = [partial(JsonlSink, folder / "events.jsonl")]
with Ddp.setup(model, optimizer, devices="cpu", sinks=sinks, quiet=True) as ddp:
    loader = ddp.loader(data, batch_size=24)
    if how == "resumed" and (folder / "saved").exists():
        ddp.load(folder / "saved")
    for epoch in ddp.epochs(9):
        for x in loader.epoch(epoch):
            is_slow = ddp.rank == 1 and (how != "halved" or ddp.window > windows // 2)
            time.sleep((0.004 if is_slow else 0.002) * len(x))
            ddp.backward(model(x).square().mean())
            if ddp.step() and ddp.window >= windows:
                ddp.stop()
            if how == "elastic" and ddp.rank == 1 and ddp.window == windows // 2:
                if not (folder / "killed").exists():
                    (folder / "killed").write_text("")
                    os.kill(os.getpid(), signal.SIGKILL)
    if how == "resumed":
        ddp.save(folder / "saved")
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["halved", "resumed", "elastic"])
def test_runs_whose_speeds_team_or_session_change(sandbox: Sandbox, how: str) -> None:
    script = sandbox.script(SCRIPT)
    team = ("--elastic", "2:2") if how == "elastic" else ("--nproc", 2)
    for windows in (60, 120) if how == "resumed" else (120,):
        ended = sandbox.evener("launch", *team, script, how, windows).end(PATIENCE_S)
        assert ended.code == 0, ended.err
    run = sandbox.folder / "runs" / how
    expected = recompute(run / "events.jsonl")
    (document,) = report([run])["runs"]
    assert_agree(expected, document)
    kinds = {flag["kind"] for flag in document["flags"]}
    assert ("loss" in kinds, "resume" in kinds) == (how == "elastic", how == "resumed")
    plan = json.loads(sandbox.evener("plan", run, "--json").end(PATIENCE_S).out)
    assert plan["measured"]["of_ideal"] == pytest.approx(expected["of_ideal"], rel=0.01)
    assert plan["measured"]["of_fastest"] == pytest.approx(expected["multiple"], rel=0.01)
    if how == "halved":
        assert document["verdict"]["remark"] == "speeds changed during the run"
