"""Page, dashboard, terminal and plan show what an independent script finds in the events."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener import cli
from evener.dashboard.watching import RunWatch
from evener.observe.events import Event
from helpers.agreement import assert_agree
from helpers.event_cases import to_line
from helpers.made_runs import TOKENS, elastic, halved, resumed
from helpers.recomputed import recompute


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make: Callable[[], list[Event]] = request.param
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / make.__name__
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, make())))
    return folder


@pytest.mark.parametrize("run", [halved, resumed, elastic], indirect=True)
def test_every_figure_agrees_with_the_events(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = recompute(run / "events.jsonl")
    assert cli.main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    (data,) = re.findall(r'id="numbers">(.*?)</script>', Path("report.html").read_text())
    assert_agree(expected, json.loads(data)["runs"][0])
    assert_agree(expected, json.loads(RunWatch(run).answer().document)["runs"][0])

    fastest = max(expected["alone"], key=expected["alone"].get)
    assert f"{expected['multiple']:.2f}× rank {fastest} alone" in said
    assert f"{expected['of_ideal']:.0%} of all ranks together" in said
    for rank, adds in expected["adds"].items():
        if rank != fastest:
            assert f"rank {rank} adds {adds:.0%}" in said

    assert cli.main(["plan", str(run), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    measured: dict[str, Any] = plan["measured"]
    assert measured["samples_per_s"] == pytest.approx(expected["speed"] / TOKENS, rel=0.01)
    assert measured["of_fastest"] == pytest.approx(expected["multiple"], rel=0.01)
    assert measured["of_ideal"] == pytest.approx(expected["of_ideal"], rel=0.01)
    assert measured["wait"] == pytest.approx(expected["lost_waiting"], rel=0.01)
    assert measured["exchange"] == pytest.approx(expected["exchange"], rel=0.01)
    assert measured["adds"] == pytest.approx([*expected["adds"].values()], rel=0.01)
    alone = [rank["samples_per_s"] for rank in plan["ranks"]]
    speeds = [expected["alone"][rank] / TOKENS for rank in sorted(expected["alone"])]
    assert alone == pytest.approx(speeds, rel=0.01)
    assert cli.main(["plan", str(run)]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines() if "/" not in line)


@pytest.mark.parametrize("run", [halved], indirect=True)
def test_a_speed_that_halves_is_remarked(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["report", str(run), "--json"])
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert found["verdict"]["remark"] == "speeds changed during the run"
    assert found["verdict"]["multiple"] > 1
    (one,) = [advice for advice in found["advice"] if advice["kind"] == "speed_changed"]
    assert one["text"].startswith("Rank 1 (b) was 2.0× slower at the end than at the beginning.")


@pytest.mark.parametrize("run", [halved], indirect=True)
@pytest.mark.parametrize("command", ["report", "plan"])
def test_a_terminal_may_lack_signs(
    run: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main([command, str(run)]) == 0
    stream.seek(0)
    assert "rank 1" in stream.read()
