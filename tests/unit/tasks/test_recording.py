import io
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from evener.comm.base import Communicator
from evener.ddp import Ddp
from evener.observe.jsonl import JsonlSink
from evener.observe.summary import RunSummary
from evener.tasks.recording import show, summarise
from helpers.event_cases import committed_window, started
from helpers.teams import setup


@pytest.fixture
def ddp():
    model = nn.Linear(2, 1)
    with setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
        yield ddp


def summary_of(ddp: Ddp, folder: Path, num_windows: int = 6) -> RunSummary:
    member = ddp.members[0].member
    sink = JsonlSink(folder / "events.jsonl")
    sink.emit(started(members=[member]))
    for window in range(num_windows):
        event = committed_window(window, samples=(10,), losses=(2.0,), times_s=((0.9, 0.0, 0.1),))
        event["ranks"][0]["member"] = member
        sink.emit(event)
    sink.close()
    return summarise(
        ddp,
        folder,
        unit="tokens",
        heldout_loss=1.25,
        checkpoint=folder / "step-6",
    )


def test_the_figures_of_a_run(ddp: Ddp, tmp_path: Path) -> None:
    summary = summary_of(ddp, tmp_path)
    assert summary.tokens_per_s == 100.0  # ten samples of ten tokens each second
    # 100 tokens in 0.9 s of compute in each second.
    assert summary.solo_tokens_per_s == pytest.approx((100 / 0.9,))
    assert summary.estimate.of_ideal == pytest.approx(0.9)
    assert (summary.heldout_loss, summary.elapsed_s) == (1.25, 5.0)
    assert (summary.world_size, summary.policy, summary.backend) == (1, "sync", "none")
    assert summary.checkpoint == str(tmp_path / "step-6")
    (rank,) = summary.ranks
    assert (rank.rank, rank.samples, rank.weight, rank.wait_fraction) == (0, 60, 600.0, 0.0)
    assert rank.member == ddp.members[0].member
    assert set(summary.versions) == {"python", "torch", "evener"}
    assert summary.machine["cores"] >= 1


def test_a_run_without_windows_has_a_summary_too(ddp: Ddp, tmp_path: Path) -> None:
    summary = summary_of(ddp, tmp_path, num_windows=0)
    assert summary.tokens_per_s is None
    assert summary.estimate.of_ideal is None
    summary.write(tmp_path / "summary.json")
    assert (tmp_path / "summary.json").read_text().endswith("}\n")


def test_what_is_shown_ends_with_the_run_folder(
    ddp: Ddp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show(summary_of(ddp, tmp_path))
    text = stream.getvalue()
    assert "held-out loss 1.25" in text
    assert "contribution" in text
    assert text.splitlines()[-1] == f"run folder: {tmp_path}"
    assert all(c.isprintable() or c == "\n" for c in text)


def test_nobody_has_to_read_it(ddp: Ddp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Broken())
    show(summary_of(ddp, tmp_path))
