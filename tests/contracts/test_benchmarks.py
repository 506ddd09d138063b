"""Each benchmark runs, in miniature, and writes what it says it writes."""

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from helpers.limits import PATIENCE_S
from helpers.source import ROOT

#: Smoke runs: they take minutes in all, so they run with --all.
pytestmark = pytest.mark.long

FOLDER = ROOT / "benchmarks"
CORPUS = {f"part{n}.txt": "".join(f"line {i} of text {n}\n" for i in range(400)) for n in range(3)}


@pytest.fixture
def load(monkeypatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a benchmark; its neighbours, which have plain names, do not stay imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in {path.stem for path in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


def run(tmp_path: Path, script: str, *arguments: str) -> dict:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments, "--json", str(report)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(report.read_text())
    assert set(document) >= {"machine", "commit", "versions", "load_average", "rows"}
    assert set(document["machine"]) == {"cpu", "cores", "memory_gib"}
    assert set(document["versions"]) >= {"python", "torch", "evener"}
    assert len(document["load_average"]) == 2
    assert str(Path.home()) not in report.read_text(), "somebody's own folder"
    return document


def holds(row: dict, *keys: str) -> None:
    for key in keys:
        low, high = row[f"{key}_90"]
        assert 0 < low <= row[key] <= high


SMALL = ("--samples", "64", "--batch-size", "8", "--sleep", "0.005")


def test_kill(tmp_path):
    """A worker is killed and replaced; no sample is lost, and all hold the same bits."""
    (row,) = run(tmp_path, "kill.py", "--sleepers", "2", "--kills", "1", *SMALL)["rows"]
    assert (row["what"], row["workers"], row["asleep"], row["times"]) == ("kill", 2, True, 1)
    assert row["delay_s"] >= 0
    assert row["redone_windows_max"] >= 0
    assert (row["sound"], set(row["times_trained"])) == (True, {"1"})


def test_the_longest_window_beside_that_of_an_undisturbed_time(load):
    logs, kill = load("elastic_logs"), load("kill")
    log = logs.WorkerLog(Path("0"))
    times = [0.1 * number for number in range(100)]  # of which one is half a second late
    times += [10.4 + 0.1 * number for number in range(100)]
    log.commits = [
        {"window": window, "t": t, "applied_t": t, "size": 1} for window, t in enumerate(times)
    ]
    told = kill.describe([log], [{"t": 9.95, "over_t": 12.0}], "strangers", "sync")
    assert told["delay_s"] == pytest.approx(0.4, abs=0.01)
    assert told["undisturbed_s_max"] == pytest.approx(0.0, abs=0.01)


def test_a_team_is_sound_if_nothing_is_missing_or_unlike(load):
    logs = load("elastic_logs")

    def judged(positions: list[int], *, bits: str = "b", begins: str = "b1") -> dict:
        batch = 2
        first, other = logs.WorkerLog(Path("0")), logs.WorkerLog(Path("1"))
        for window, start in enumerate(positions):
            line = {"window": window, "epoch": window // 2, "start": start, "size": batch}
            share = {"shares": [batch, 0], "ranges": [[start, start + batch]], "t": 0.0}
            first.commits.append({**line, **share, "bits": f"b{window}"})
            ids = [*range(start, start + batch)]
            first.handed.append({"at": window, "rank": 0, "ids": ids, "bits": ""})
        other.commits = [{**first.commits[-1], "bits": f"{bits}{len(positions) - 1}"}]
        # One that has joined: it contributes nothing before it holds what the others hold.
        other.handed = [{"at": 2, "rank": 1, "ids": [], "bits": begins}]
        return logs.verdict([first, other], 4, "sync")

    whole = judged([0, 2, 0])
    assert (whole["sound"], whole["times_trained"]) == (True, {"1": 4})
    assert "4 ids of whole epochs, each exactly once" in whole["verdict"]
    assert "no epoch was completed" in judged([0, 2])["verdict"]
    assert judged([0, 0, 2])["times_trained"] == {"0": 2, "2": 2}
    assert "others:" in judged([0, 2, 0], bits="c")["verdict"]
    assert "began window 2 with c1" in judged([0, 2, 0], begins="c1")["verdict"]
    assert not any(judged(p)["sound"] for p in ([0, 2], [0, 0, 2]))


def test_a_way_of_which_a_part_does_not_start_leaves_nothing_running(load, tmp_path):
    goodput = load("goodput")

    class Half(goodput.Way):
        def start(self) -> None:
            self.process = self.run("-c", "import time; time.sleep(600)")
            raise OSError("no more processes")

    way = Half(argparse.Namespace(), tmp_path)
    with pytest.raises(OSError, match="no more processes"), way:
        pass
    assert way.process.poll() is not None


@pytest.mark.long
def test_chaos_and_goodput(tmp_path):
    few = ("--seed", "1", "--minutes", "0.2", *SMALL)
    (row,) = run(tmp_path, "chaos.py", "--workers", "2", "--kinds", "kill,slow", *few)["rows"]
    assert row["sound"]
    assert "each exactly once" in row["verdict"]
    more = ("--rounds", "1", "--calm-minutes", "0.05", "--every", "4", "--ways", "evener,torchrun")
    rows = run(tmp_path, "goodput.py", "--workers", "2", *more, *few)["rows"]
    assert [row["name"] for row in rows] == ["evener.sync", "torchrun"]
    assert all(row["kills"] > 0 and row["goodput"] > 0 for row in rows)


def test_hetero(tmp_path):
    sizes = ("--rounds", "1", "--windows", "3", "--batch-size", "8", "--width", "32")
    local = ("--anchor", "2", "--local-windows", "3", "--layers", "1", "--slowed-by", "sleep")
    rows = run(tmp_path, "hetero.py", "--speeds", "1,0.5", *sizes, *local)["rows"]
    by_name = {row["name"]: row for row in rows}
    assert {"solo.0", "solo.1", "ceiling", "ceiling.local"} < set(by_name)
    assert {"torch.ddp", "torch.ddp.tuned"} < set(by_name)
    for row in rows:
        assert (row["speeds"], row["slowed_by"], row["batch_size"]) == ([1.0, 0.5], "sleep", 8)
        holds(row, "samples_per_s", "of_ideal", "of_ceiling")
    assert by_name["solo.0"]["of_ideal"] + by_name["solo.1"]["of_ideal"] == pytest.approx(
        1, abs=0.01
    )
    assert by_name["ceiling"]["of_ceiling"] == by_name["ceiling.local"]["of_ceiling"] == 1
    for name in ("evener.sync", "evener.cadence", "evener.async"):
        row = by_name[name]
        parts = (row[f"lost_{part}"] for part in ("wait", "exchange", "bookkeeping"))
        assert sum(parts) == pytest.approx(row["lost"], abs=1e-3)
        assert set(row["lost_by_rank"]) == {"0", "1"}
        assert row["windows"] >= 1
    assert sum(by_name["evener.sync"]["shares"]) == 8


def test_a_rank_that_is_far_slower(tmp_path):
    sizes = ("--rounds", "1", "--slowed-by", "sleep", "--speeds", "1,0.05", "--far-windows", "12")
    rows = run(tmp_path, "hetero.py", *sizes)["rows"]
    assert [row["name"] for row in rows] == ["solo.0", "evener.sync"]
    holds(rows[1], "of_fastest")
    assert rows[1]["windows"] == 24
    assert rows[1]["params"] > 0


def test_homogeneous(tmp_path):
    sizes = ("--models", "0.8M", "--tokens", "128", "--rounds", "1", "--turn-s", "0.01")
    picture = tmp_path / "picture.svg"
    rows = run(tmp_path, "homogeneous.py", *sizes, "--svg", str(picture))["rows"]
    by_name = {row["name"]: row for row in rows}
    assert {"solo", "ceiling", "torch.ddp", "torch.ddp.tuned"} < set(by_name)
    assert {"evener.sync", "evener.cadence", "evener.async"} < set(by_name)
    assert "one process with all cores' threads" in by_name
    for row in rows:
        assert (row["tokens_per_rank"], row["ranks"]) == (128, 2)
        assert 800_000 < row["params"] < 900_000
        holds(row, "tokens_per_s", "of_ideal", "of_ceiling", "of_tuned_ddp")
    assert by_name["ceiling"]["of_ceiling"] == by_name["torch.ddp.tuned"]["of_tuned_ddp"] == 1
    assert [name for name, row in by_name.items() if "parked" in row] == [
        *("evener.sync", "evener.cadence", "evener.async")
    ]
    assert by_name["solo"]["of_ideal"] == pytest.approx(1 / 2, abs=1e-3)
    texts = "".join(ElementTree.parse(picture).getroot().itertext())
    assert all(name in texts for name in set(by_name) - {"solo", "ceiling"})


@pytest.mark.parametrize("text", ["100", "0", "128,x"])
def test_homogeneous_refuses_bad_tokens(load, text):
    homogeneous = load("homogeneous")
    with pytest.raises(argparse.ArgumentTypeError, match="multiples of 128"):
        homogeneous.tokens(text)


def test_other_libraries_are_left_out_where_they_are_missing(load, monkeypatch, capsys):
    competitors = load("competitors")
    monkeypatch.setitem(competitors.PACKAGES, "torchft", ("no_such_module", "torchft==0"))
    monkeypatch.setattr(sys, "prefix", "/somewhere/competitors")  # its own environment
    competitors.enter(["torchft"])
    assert "torchft is left out: it is not installed" in capsys.readouterr().out


def test_allreduce(tmp_path):
    sizes = ("--ranks", "2", "--bytes", "4096,65536", "--rounds", "1", "--turn-s", "0.001")
    document = run(tmp_path, "allreduce.py", *sizes)
    names: dict[tuple[str, int], list[str]] = {}
    for row in document["rows"]:
        holds(row, "seconds", "speedup")
        assert row["ranks"] == 2
        names.setdefault((row["condition"], row["bytes"]), []).append(row["name"])
    exchanges = [n for n in ("gloo", "shared", "torch.gloo") if n in names["tight", 4096]]
    assert {"gloo", "torch.gloo"} <= set(exchanges)
    for num_bytes in (4096, 65536):
        for condition in ("tight", "busy"):
            assert names[condition, num_bytes] == [*exchanges, "threads", "memcpy"]
        assert names["skewed", num_bytes] == exchanges


@pytest.mark.parametrize("text", ["2,0", "two", ""])
def test_bad_numbers_are_refused(load, text):
    options = load("options")
    with pytest.raises(argparse.ArgumentTypeError, match="numbers above 0"):
        options.numbers(text)


def test_drop(tmp_path):
    sizes = ("--before", "5", "--after", "3", "--width", "32", "--layers", "1", "--anchor", "3")
    [row] = run(tmp_path, "drop.py", *sizes)["rows"]
    assert row["name"] == "evener.cadence"
    assert row["windows"] >= 8
    assert row["cost"] == pytest.approx(row["idle_after"] - row["idle_before"], abs=1e-3)
    assert row["longest_wait_s"] > 0


@pytest.mark.parametrize("text", ["1", "1,0", "1,2", "fast"])
def test_bad_speeds_are_refused(load, text):
    unequal = load("unequal")
    with pytest.raises(argparse.ArgumentTypeError, match="two or more speeds"):
        unequal.read_speeds(text)


def test_overhead(tmp_path):
    document = run(tmp_path, "overhead.py", "--cases", "0.1M", "--rounds", "1", "--round-s", "0.1")
    assert [(row["name"], row["clip"]) for row in document["rows"]] == [
        ("0.1M", False),
        ("0.1M", True),
    ]
    for row in document["rows"]:
        holds(row, "ratio", "cpu_ratio")
        assert row["best_ratio"] > 0
        assert row["params"] > 50_000


def test_simulate_scale(tmp_path):
    rows = run(tmp_path, "simulate_scale.py", "--ranks", "2,16", "--rounds", "2")["rows"]
    names = {row["name"] for row in rows}
    assert {"decision", "observe", "take of cadence", "commit", "row read"} < names
    assert sorted((row["name"], row["ranks"]) for row in rows) == sorted(
        (name, ranks) for name in names for ranks in (2, 16)
    )
    for row in rows:
        assert 0 <= row["seconds"] <= row["median_s"]
        assert row["bytes"] > 0


def test_control_scale(tmp_path):
    rows = run(tmp_path, "control_scale.py", "--members", "20", "--seconds", "1")["rows"]
    virtual = {row["change"]: row for row in rows if row["name"] == "virtual"}
    assert [*virtual] == ["start", "join", "death", "partition", "tick"]
    assert all(row["seconds"] < 1.0 for row in virtual.values())
    (real,) = [row for row in rows if row["name"] == "real"]
    assert real["beats"] > 20
    assert 0 < real["answer_ms"][0] <= real["answer_ms"][1] <= real["answer_ms"][2]


def test_plan(tmp_path):
    sizes = ("--runs", "1", "--windows", "9", "--local-windows", "14", "--batch-size", "8")
    model = ("--anchor", "2", "--width", "32", "--layers", "1", "--speeds", "1,0.5")
    rows = run(tmp_path, "plan.py", *sizes, *model)["rows"]
    assert [(row["told_by"], row["name"]) for row in rows] == [
        ("sync", "evener.sync"),
        ("sync", "evener.cadence"),
        ("cadence", "evener.cadence"),
    ]
    for row in rows:
        assert row["runs"] == 1
        holds(row, "samples_per_s", "predicted", "lost")
        assert row["error"] == abs(row["bias"])
        assert row["verdict"] in ("met", "missed")


def test_size(tmp_path, load):
    now = run(tmp_path, "size.py")["rows"][-1]
    assert now["lines"] == sum(lines for lines, _ in now["packages"].values()) > 0
    assert now["tokens"] == sum(tokens for _, tokens in now["packages"].values()) > now["lines"]
    text = '"""Said."""\n\nx = [1,  # why\n     2]\n"""Of x."""\ndef f():\n    """Said."""\n'
    assert load("size").measure(text) == (3, 12)


def test_startup(tmp_path):
    document = run(tmp_path, "startup.py", "--only", "help", "--rounds", "1")
    [row] = document["rows"]
    assert row["name"] == "help"
    holds(row, "seconds")
    assert row["times"] == 2


def test_ctrl_c(tmp_path):
    [row] = run(tmp_path, "ctrl_c.py", "--moments", "1", "--within", "0.5")["rows"]
    assert (row["moments"], row["tracebacks_at_s"]) == (1, [])
    assert sum(row["exit_codes"].values()) == 1


def test_same_result(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for name, text in CORPUS.items():
        (corpus / name).write_text(text)
    sizes = ("--seeds", "1", "--steps", "2", "--teams", "1")
    document = run(tmp_path, "same_result.py", *sizes, "--data", str(corpus))
    [row] = document["rows"]
    assert row["name"] == "ranks=1"
    assert row["change"] == 0 == document["largest_change"]
    assert row["heldout_loss"] > 0
    assert row["samples"] == 2 * 32
    assert row["samples_by_rank"] == [1]


def test_times_of_a_run(load, monkeypatch):
    """What startup.py takes from a run's events, without the run."""
    startup, runs = load("startup"), load("runs")
    events = [
        {"type": "run_started", "t": 103.0},
        {"type": "window", "t": 104.0},
        {"type": "window", "t": 110.0},
        {"type": "run_finished", "t": 115.0},
    ]
    asked = []

    def pretrain(folder, *arguments, name):
        asked.append((name, "--demo" in arguments, "max_steps=2" in arguments))
        return runs.Run(began_t=100.0, elapsed_s=16.0, summary={}, events=events)

    monkeypatch.setattr(startup, "pretrain", pretrain)
    times = startup.time_demo(1)
    assert asked == [("cold", True, True), ("short-0", True, True), ("whole", True, False)]
    assert times["first_window"] == times["demo.first_window"] == [4.0]
    assert times["first_window.team_ready"] == [3.0]
    assert times["demo.last_window"] == [10.0]
    assert times["demo.total"] == [16.0]


def test_scaling(tmp_path):
    sizes = ("--ranks", "1,2", "--rounds", "1", "--windows", "2", "--samples", "4")
    rows = run(tmp_path, "scaling.py", *sizes, "--sample-s", "0.001", "--width", "32")["rows"]
    names = ["solo.0", "ceiling", "ceiling.local", "torch.ddp.tuned"]
    names += ["evener.sync", "evener.cadence", "evener.async"]
    assert [(row["ranks"], row["name"]) for row in rows] == [(n, w) for n in (1, 2) for w in names]
    for row in rows:
        holds(row, "samples_per_s", "of_ideal", "of_ceiling")


def test_tables_from_reports(tmp_path, load):
    rows = [
        {"name": "evener.sync", "ranks": 2, "of_ideal": 0.9, "of_ideal_90": [0.8, 0.95]},
        {"name": "torch.ddp", "ranks": 2, "of_ideal": 0.5, "lost": 0.1, "lost_aim": 0.06},
    ]
    text = load("tables").text_of(rows, markdown=True)
    assert text.splitlines() == [
        "**ranks 2**",
        "",
        "| name | of ideal | lost |",
        "| --- | --- | --- |",
        "| evener.sync | 0.9 (0.8..0.95) |  |",
        "| torch.ddp | 0.5 | 0.1 [0.06] |",
        "",
        "(low..high): 5th to 95th percentile of the values of which the figure is the median.",
        "",
        "[value]: what is aimed at.",
    ]


def test_report_page(tmp_path):
    sizes = ("--windows", "30", "--ranks", "2", "--rounds", "0")
    (row,) = run(tmp_path, "report_page.py", *sizes)["rows"]
    assert (row["windows"], row["ranks"], row["opened_s"]) == (30, 2, [])
    assert 0 < row["events_mb"] < row["page_mb"] < 1


def test_dashboard(tmp_path):
    sizes = ("--windows", "30", "--ranks", "2", "--readers", "2", "--seconds", "0.2")
    (row,) = run(tmp_path, "dashboard.py", *sizes)["rows"]
    assert row["first_s"] > 0
    assert row["memory_mb"] > 0


def test_event_cost(tmp_path):
    report = run(tmp_path, "event_cost.py", "--windows", "50", "--ranks", "1,2")
    assert [row["ranks"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        assert row["cpu_us"] > 0
        assert 0 < row["bytes"] <= 1000
