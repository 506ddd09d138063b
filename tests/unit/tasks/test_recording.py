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
from evener.tasks.rehearsal import Speeds
from helpers.event_cases import committed_window, started
from helpers.teams import setup


@pytest.fixture
def ddp():
    model = nn.Linear(2, 1)
    with setup(Communicator(), model, torch.optim.SGD(model.parameters(), lr=0.1)) as ddp:
        yield ddp


def summary_of(ddp: Ddp, folder: Path, speeds: Speeds | None, num_windows: int = 6) -> RunSummary:
    member = ddp.members[0].member
    with JsonlSink(folder / "events.jsonl") as sink:
        sink.emit(started(members=[member]))
        for window in range(num_windows):
            one = {"samples": (10,), "losses": (2.0,), "times_s": ((0.9, 0.0, 0.1),)}
            event = committed_window(window, **one)
            event["ranks"][0]["member"] = member
            sink.emit(event)
    return summarise(
        ddp,
        folder,
        unit="tokens",
        heldout_loss=1.25,
        speeds=speeds,
        checkpoint=folder / "step-6",
    )


def test_the_figures_of_a_run(ddp: Ddp, tmp_path: Path) -> None:
    summary = summary_of(
        ddp, tmp_path, Speeds(solo=(120.0,), side_by_side=None, team=108.0, equal_split=90.0)
    )
    assert summary.tokens_per_s == 100.0  # ten samples of ten tokens each second
    assert (summary.solo_tokens_per_s, summary.solo_source) == ((120.0,), "measured")
    assert summary.equal_split_tokens_per_s == 90.0
    assert summary.multiples.of_ideal == pytest.approx(108 / 120), "of the same rounds"
    assert (summary.heldout_loss, summary.elapsed_s) == (1.25, 5.0)
    assert (summary.world_size, summary.policy, summary.backend) == (1, "sync", "none")
    assert summary.checkpoint == str(tmp_path / "step-6")
    (rank,) = summary.ranks
    assert (rank.rank, rank.samples, rank.weight, rank.wait_fraction) == (0, 60, 600.0, 0.0)
    assert rank.member == ddp.members[0].member
    assert set(summary.versions) == {"python", "torch", "evener"}
    assert summary.machine["cores"] >= 1


def test_what_was_not_measured_comes_from_the_windows_of_the_run(ddp: Ddp, tmp_path: Path) -> None:
    summary = summary_of(ddp, tmp_path, None)
    # 100 tokens in 0.9 s of compute in each second.
    assert summary.solo_tokens_per_s == pytest.approx((100 / 0.9,))
    assert (summary.solo_source, summary.beside_solo_tokens_per_s) == ("compute time", 100.0)
    assert summary.equal_split_tokens_per_s is None


def test_a_run_without_windows_has_a_summary_too(ddp: Ddp, tmp_path: Path) -> None:
    summary = summary_of(ddp, tmp_path, None, num_windows=0)
    assert summary.tokens_per_s is None
    assert summary.multiples.of_ideal is None
    summary.write(tmp_path / "summary.json")
    assert (tmp_path / "summary.json").read_text().endswith("}\n")


def test_what_is_shown_ends_with_the_run_folder(
    ddp: Ddp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show(
        summary_of(
            ddp, tmp_path, Speeds(solo=(120.0,), side_by_side=None, team=108.0, equal_split=90.0)
        )
    )
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
    show(summary_of(ddp, tmp_path, None))
