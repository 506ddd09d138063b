from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.engine.results import Progress, RankRecord, WindowResult
from evener.observe.following import read_events
from evener.tasks.recording import read_history, record
from evener.team.membership import Membership
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


def start(ddp: Ddp, folder: Path, resumed_from: Path | None = None) -> None:
    record(ddp, folder)
    facts: dict[str, Any] = {"run": "x", "unit": "tokens", "num_samples": 40, "total_windows": 8}
    ddp.events.start(**facts, resumed_from=resumed_from)


def test_a_session_in_events(tmp_path: Path) -> None:
    def body(comm: Communicator) -> int:
        sink = Kept()
        with team_of(comm, emulate_slow={1: 3.0}) as ddp:
            events = ddp.events
            if comm.rank == 0:
                events.report_to([sink])
            start(ddp, tmp_path)
            events.window(result(0, (3, 1)))
            events.window(result(1, (3, 1)))
            events.window(result(2, (4, 0)))
            numbers = {"loss": 1.5, "weight": 70.0, "elapsed_s": 0.5}
            events.emit("eval", window=3, name="heldout", **numbers)
            events.finish(3, "stopped", "later")
            events.end(failed=False, error=None)
            events.end(failed=False, error=None)
            if comm.rank == 0:
                for written in events.pending():
                    assert written.wait(PATIENCE_S)
                assert sink.events == read_events(tmp_path / "events.jsonl")
            return len(sink.events) * sink.closed

    # The other rank keeps silent.
    assert run_team(2, body) == [10, 0]
    events = read_events(tmp_path / "events.jsonl")
    assert [event["type"] for event in events] == [
        *("run_started", "worker_started", "worker_started"),
        *("plan", "window", "window", "plan", "window"),  # a plan where shares change
        *("eval", "run_finished"),
    ]
    started, *workers = events[:3]
    assert [worker.get("emulated") for worker in workers] == [None, 3.0]
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
        **{"work_ago_s": 0.0, "wait_ago_s": 0.0, "sync_ago_s": 0.0, "hidden_s": 0.0},
    }
    assert (second["rank"], second["samples"]) == (1, 1)
    assert events[7]["ranks"][1]["loss"] is None
    assert (events[-1]["reason"], events[-1]["message"]) == ("stopped", "later")


def test_parked_and_recalled_ranks_and_refused_workers_are_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Membership, "take_refused", lambda _: refused.pop())
    refused: list[list[tuple[str, str]]] = [[], [("c", "another version")], []]

    def body(comm: Communicator) -> None:
        with team_of(comm) as ddp:
            start(ddp, tmp_path)
            if comm.rank == 0:
                ddp.events.window(result(0, (3, 1)))
                ddp.events.window(result(1, (4, 0), parked=(1,)))
                ddp.events.window(result(2, (3, 1)))

    run_team(2, body)
    events = read_events(tmp_path / "events.jsonl")
    kinds = ("parked", "join_refused", "recalled")
    told = [event for event in events if event["type"] in kinds]
    assert [(event["type"], event["window"], event["reason"]) for event in told] == [
        ("parked", 1, "the team is predicted to be faster without it"),
        ("join_refused", 1, "another version"),
        ("recalled", 2, "the team tries again with it"),
    ]
    assert (told[0]["rank"], told[1]["member"]) == (1, "c")


def test_a_resumed_session_counts_what_was_done_before(tmp_path: Path) -> None:
    with team_of(Communicator()) as ddp:
        start(ddp, tmp_path)
        for window in range(4):
            ddp.events.window(result(window, (4,)))
    with team_of(Communicator()) as ddp:
        # Resumed after window 1: windows 2 and 3 are void.
        ddp.assembly.engine.run.progress = Progress(window=2)
        start(ddp, tmp_path, resumed_from=Path("step-2"))
        ddp.events.window(result(2, (4,)))
    table = read_history(tmp_path).table
    assert (len(table), table.lane_sums()["weight"].sum()) == (3, 120.0)
    kinds = [event["type"] for event in read_events(tmp_path / "events.jsonl")]
    resumed = kinds.index("run_resumed")
    assert kinds[resumed : resumed + 2] == ["run_resumed", "run_started"]
