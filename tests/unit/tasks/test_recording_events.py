import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import Progress, RankRecord, WindowResult
from evener.observe.events import make_event
from evener.observe.following import read_events
from evener.observe.jsonl import JsonlSink
from evener.tasks.recording import RunTally, record
from helpers.event_cases import check_kinds, committed_window, started
from helpers.limits import PATIENCE_S
from helpers.sinks import Kept
from helpers.teams import run_team, setup


def team_of(comm: Communicator, **config: Any) -> Ddp:
    model = nn.Linear(2, 1)
    return setup(comm, model, torch.optim.SGD(model.parameters(), lr=0.1), **config)


def result(window: int, samples: tuple[int, ...], **changes: Any) -> WindowResult:
    size = sum(samples)
    ranks = tuple(
        RankRecord(
            samples=count,
            weight=count * 10.0,
            loss_sum=count * 20.0,
            micro_batches=min(count, 1),
            compute_s=count * 0.1,
            wait_s=0.2,
            sync_s=0.1,
        )
        for count in samples
    )
    values: dict[str, Any] = {
        "window": window,
        "epoch": 0,
        "start": window * size,
        "size": size,
        "loss": 2.0,
        "weight": size * 10.0,
        "grad_norm": 0.5,
        "lr": 0.01,
        "skipped": False,
        "progress": Progress(window=window + 1),
        "applied_t": 100.0 + window,
        "ranks": ranks,
    }
    return WindowResult(**{**values, **changes})


def start(ddp: Ddp, folder: Path, resumed_from: Path | None = None) -> RunTally:
    tally = record(ddp, folder)
    facts: dict[str, Any] = {"run": "x", "unit": "tokens", "num_samples": 40, "total_windows": 8}
    ddp.events.start(**facts, resumed_from=resumed_from)
    return tally


def test_a_session_in_events(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[float, int]:
        sink = Kept()
        with team_of(comm, emulate_slow={1: 3.0}) as ddp:
            events = ddp.events
            if comm.rank == 0:
                events.report_to([sink])
            tally = start(ddp, tmp_path)
            events.window(result(0, (3, 1)))
            events.window(result(1, (3, 1)))
            events.window(result(2, (4, 0)))
            numbers = {"loss": 1.5, "weight": 70.0, "elapsed_s": 0.5}
            events.tell("eval", window=3, name="heldout", **numbers)
            events.finish(3, "stopped", "later")
            events.end(failed=False, error=None)
            events.end(failed=False, error=None)
            if comm.rank == 0:
                for written in events.pending():
                    assert written.wait(PATIENCE_S)
                assert sink.events == read_events(tmp_path / "events.jsonl")
                for event in sink.events:
                    check_kinds(event)
            return tally.sums.total.weight, len(sink.events) * sink.closed

    # The other rank keeps silent.
    assert run_team(2, body) == [(120.0, 10), (0.0, 0)]
    events = read_events(tmp_path / "events.jsonl")
    assert [event["type"] for event in events] == [
        *("run_started", "worker_started", "worker_started"),
        *("plan", "window", "window", "plan", "window"),  # a plan where shares change
        *("eval", "run_finished"),
    ]
    started = events[0]
    assert started["emulated"] == {"1": 3.0}
    assert (started["window"], started["num_samples"], started["total_windows"]) == (0, 40, 8)
    assert len(set(started["members"])) == 2
    window = events[4]
    assert (window["committed"], window["loss"], window["lr"]) == ([[0, 4]], 2.0, 0.01)
    assert (window["grad_norm"], window["skipped"], window["parked"]) == (0.5, False, [])
    assert window["t"] == 100.0
    first, second = window["ranks"]
    assert first | {"member": ""} == {
        **{"rank": 0, "member": "", "samples": 3, "weight": 30.0, "loss": 2.0},
        **{"compute_s": pytest.approx(0.3), "wait_s": 0.2, "sync_s": 0.1, "elapsed_s": 0.0},
        **{"data_s": 0.0, "sent_bytes": 0, "micro_batches": 1, "update_s": 0.0},
        **{"work_ago_s": 0.0, "wait_ago_s": 0.0, "sync_ago_s": 0.0},
    }
    assert (second["rank"], second["samples"]) == (1, 1)
    assert events[7]["ranks"][1]["loss"] is None
    assert (events[-1]["reason"], events[-1]["message"]) == ("stopped", "later")


def test_a_resumed_session_counts_what_was_done_before(tmp_path: Path) -> None:
    with team_of(Communicator()) as ddp:
        start(ddp, tmp_path)
        for window in range(4):
            ddp.events.window(result(window, (4,)))
    with team_of(Communicator()) as ddp:
        # Resumed after window 1: windows 2 and 3 are void.
        ddp.assembly.engine.run.progress = Progress(window=2)
        tally = start(ddp, tmp_path, resumed_from=Path("step-2"))
        ddp.events.window(result(2, (4,)))
    assert tally.sums.total.windows == 3
    assert tally.sums.total.weight == 120.0
    kinds = [event["type"] for event in read_events(tmp_path / "events.jsonl")]
    resumed = kinds.index("run_resumed")
    assert kinds[resumed : resumed + 2] == ["run_resumed", "run_started"]


def tallied(folder: Path, earlier: Any = None, first: int = 0) -> RunTally:
    tally = RunTally(folder, earlier)
    if first:
        resumed = {"window": first, "path": "x", "new_data": False}
        tally.emit(make_event("run_resumed", t=100.0, **resumed))
    tally.emit(started(t=100.0 * bool(first), window=first))
    for window in range(first, first + 5):
        tally.emit(committed_window(window, t=100.0 * bool(first) + window - first + 1))
    return tally


def test_sums_of_earlier_sessions_come_with_the_checkpoint(tmp_path: Path) -> None:
    # There is no file of events, as after a run that has removed its oldest ones.
    earlier = json.loads(json.dumps(tallied(tmp_path).to_json()))
    tally = tallied(tmp_path, earlier, 5)
    assert (tally.sums.total.windows, tally.sums.total.weight) == (10, 1000.0)
    assert tally.sums.members["a"].samples == 60
    assert (tally.sums.elapsed_s, tally.sums.speed()) == (10.0, 100.0)


def test_without_a_file_of_events_the_sums_begin_at_the_resume(tmp_path: Path) -> None:
    """As of a checkpoint that was copied to another machine, and before the first event."""
    assert RunTally(tmp_path).sums.total.windows == 0
    tally = tallied(tmp_path, None, 5)
    assert (tally.sums.total.windows, tally.sums.total.weight) == (5, 500.0)
    assert tally.sums.elapsed_s == 5.0


def test_without_sums_in_the_checkpoint_events_are_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JsonlSink(tmp_path / "events.jsonl") as sink:
        for event in (started(), *(committed_window(k) for k in range(8))):
            sink.emit(event)
    for earlier in (None, {"total": 5}):
        assert tallied(tmp_path, earlier, 5).sums.total.windows == 10
    assert "sums.json of the checkpoint is damaged" in capsys.readouterr().err
    # Another rank has recorded some of the windows.
    tally = tallied(tmp_path)
    tally.emit(committed_window(7))
    assert (tally.sums.total.windows, tally.to_json()) == (8, None)
