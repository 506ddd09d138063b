"""``evener plan`` as users call it."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from evener import cli
from helpers.event_cases import committed_window, started, to_line

BY_HAND = ("--speeds", "10,8", "--params", "35e6", "--bandwidth", "1")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plan(capsys):
    """Runs the command; returns its output, or what it complained of."""

    def run(*arguments: str, code: int = 0) -> str:
        assert cli.main(["plan", *arguments]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def test_a_team_by_hand(plan):
    told = plan(*BY_HAND)
    assert "rank 1: 8 samples/s alone" in told
    assert "faster than sync" in told
    assert "rank 1: worth having" in told
    document = json.loads(plan(*BY_HAND, "--json"))
    rows = {row["policy"]: row for row in document["policies"]}
    assert rows["cadence"]["sent_bytes"] == 4 * 35e6
    assert rows["sync"]["exchange"] > 0.2 > rows["cadence"]["exchange"]
    assert document["best"] in ("cadence", "async")
    assert (document["batch_size"], document["local_batch_size"]) == (32, 16)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_reader_that_leaves_ends_it_quietly(options, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert cli.main(["plan", *BY_HAND, *options]) == 128 + signal.SIGPIPE
        monkeypatch.undo()
    assert capsys.readouterr().err == ""


def test_options_change_the_team(plan):
    sizes = ("--batch-size", "64", "--local-batch-size", "8", "--micro-batch-size", "4")
    document = json.loads(plan(*BY_HAND, *sizes, "--add", "8", "--latency", "1", "--json"))
    assert [row["name"] for row in document["ranks"]] == ["rank 0", "rank 1", "rank 2 (added)"]
    assert [row["batch_size"] for row in document["policies"]] == [64, 8, 8]
    assert document["micro_batch_size"] == 4


def test_a_team_from_a_run(plan):
    windows = [committed_window(k, t=k + 1.0) | {"update_parts": 1} for k in range(12)]
    for row in (row for window in windows for row in window["ranks"]):
        row |= {"micro_batches": 1, "update_s": 0.0}
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, [started(), *windows])))
    name = "runs/first"
    told = plan(name)
    assert "8 windows of policy sync" in told
    assert "note: the number of parameters is not in the run's events: give --params" in told
    # Six samples in 0.7 s and four in 0.9 s, and 0.1 s for the exchange.
    row = json.loads(plan(name, "--params", "1e3", "--json"))["policies"][0]
    assert row["samples_per_s"] == pytest.approx(10 / 1.0, rel=0.1)
    assert row["sent_bytes"] == 4000
    slower = plan(name, "--params", "350e6", "--bandwidth", "0.1", "--json")
    assert json.loads(slower)["policies"][0]["parked"] == [1]


def test_a_note_names_what_is_not_known_of_exchanges(plan):
    assert "cost nothing" not in plan("--speeds", "10")
    assert "cost nothing: give --bandwidth" in plan("--speeds", "10,4", "--params", "1e3")
    assert "cost nothing: give --params and --bandwidth" in plan("--speeds", "10,4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give the folder of a run or --speeds such as 120,48"),
        (("run", "--speeds", "1"), "give the folder of a run or --speeds such as 120,48"),
        (("run",), "run is not the folder of a run: it has no events.jsonl"),
        (("--speeds", "1,x"), "--speeds is '1,x'; give samples per second of each rank alone"),
        (("--speeds", "1", "--add", "-2"), "--add is '-2'; give samples per second"),
        (("--speeds", "1,2", "--latency", "1"), "--latency is given without --bandwidth"),
        (("--speeds", "1,2", "--bandwidth", "1"), "the size of an exchange is not known"),
        (
            ("--speeds", "1", "--batch-size", "0"),
            "'--batch-size': Input should be greater than or equal to 1",
        ),
        (
            ("--speeds", "1", "--bandwidth", "1Gbit"),
            "'--bandwidth': Input should be a valid number",
        ),
        (("--speeds", "1,5000"), "rank 0 does 1 samples/s, rank 1 5e+03: it adds less than 0.1%"),
    ],
)
def test_errors_name_the_remedy(plan, arguments, said):
    assert said in plan(*arguments, code=2)
