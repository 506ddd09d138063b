"""``evener plan`` as users call it, and how it reads quantities."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evener import cli
from evener.errors import ConfigError
from evener.simulation.quantities import read_bandwidth, read_count, read_duration, read_speeds
from helpers.event_cases import committed_window, started, to_line
from helpers.limits import PATIENCE_S

BY_HAND = ("--speeds", "10,8", "--params", "35M", "--bandwidth", "1Gbit")


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


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (read_count, "350M", 350e6),
        (read_count, "1.3B", 1.3e9),
        (read_count, "12", 12),
        (read_bandwidth, "1Gbit", 125e6),
        (read_bandwidth, "100 Mbit/s", 12.5e6),
        (read_bandwidth, "12GB", 12e9),
        (read_duration, "0.1ms", 1e-4),
        (read_duration, "50us", 5e-5),
        (read_speeds, "120, 48", (120.0, 48.0)),
    ],
)
def test_quantities(read, text, value):
    assert read("--option", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (read_count, "350Q", "the unit 'Q' is unknown; give a number above 0, such as 350M"),
        (read_count, "M", "not a number above 0"),
        (read_count, "0", "not a number above 0"),
        (read_bandwidth, "1", "its unit is missing; give bits or bytes per second, such as 1Gbit"),
        (read_bandwidth, "1.2.3Gbit", "not a number above 0"),
        (read_duration, "3h", "the unit 'h' is unknown; give a length of time"),
        (read_speeds, "1,x", "'x' is not a speed; give samples per second of each rank"),
        (read_speeds, "1,-2", "'-2' is not a speed"),
        (read_speeds, "inf", "'inf' is not a speed"),
        (read_speeds, "1e-300", "'1e-300' is not a speed"),
        (read_count, "1e308B", "too large or too small"),
        (read_bandwidth, "1e-300bit", "too large or too small"),
    ],
)
def test_what_is_no_quantity(read, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        read("--option", text)
    assert str(caught.value).startswith(f"--option is '{text}'")


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
    assert (document["batch_size"], document["local_batch_size"]) == (32, 32)


def test_options_change_the_team(plan):
    sizes = ("--batch-size", "64", "--local-batch-size", "8", "--micro-batch-size", "4")
    document = json.loads(plan(*BY_HAND, *sizes, "--add", "8", "--latency", "1ms", "--json"))
    assert [row["name"] for row in document["ranks"]] == ["rank 0", "rank 1", "rank 2 (added)"]
    assert [row["batch_size"] for row in document["policies"]] == [64, 8, 8]
    assert document["micro_batch_size"] == 4


def test_a_team_from_a_run(plan):
    windows = [committed_window(k, t=k + 1.0) for k in range(12)]
    folder = Path("runs/first")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_bytes(b"".join(map(to_line, [started(), *windows])))
    for name in ("runs/first", "runs/first/events.jsonl"):
        told = plan(name)
        assert "9 windows of policy sync" in told
        assert "note: the run does not say how many parameters it trains: give --params" in told
    # Six samples in 0.7 s and four in 0.9 s, and 0.1 s for the exchange.
    row = json.loads(plan(name, "--params", "1k", "--json"))["policies"][0]
    assert row["samples_per_s"] == pytest.approx(10 / 1.0, rel=0.1)
    assert row["sent_bytes"] == 4000
    slower = plan(name, "--params", "350M", "--bandwidth", "100Mbit", "--json")
    assert json.loads(slower)["policies"][0]["parked"] == [1]


def test_a_note_names_what_is_not_known_of_exchanges(plan):
    assert "cost nothing" not in plan("--speeds", "10")
    assert "cost nothing: give --bandwidth" in plan("--speeds", "10,4", "--params", "1k")
    assert "cost nothing: give --params and --bandwidth" in plan("--speeds", "10,4")


def test_devices_of_this_machine(plan):
    told = plan("--calibrate", "--params", "1k", "--tokens", "10")
    assert "a calibration of this machine" in told
    assert "rank 0 (cpu" in told
    assert "note: matrix products alone were timed" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "nothing says how fast ranks are; give one of these: the folder of a run, --speeds"),
        (("run", "--speeds", "1"), "RUN and --speeds are given; give one"),
        (("run",), "run is not the folder of a run: it has no events.jsonl"),
        (("--speeds", "1,2", "--latency", "1ms"), "--latency is given without --bandwidth"),
        (
            ("--speeds", "1,2", "--bandwidth", "1Gbit"),
            "--bandwidth is 1Gbit, but nothing says how much is exchanged",
        ),
        (("--speeds", "1", "--batch-size", "0"), "--batch-size is 0; give 1 or more"),
        (("--speeds", "1", "--batch-size", f"{10**16}"), "--batch-size would be 10,000,000,000"),
        (("--speeds", "1", "--anchor", f"{10**9}"), "--anchor would be 1,000,000,000; give 10,000"),
        (("--speeds", "1", "--tokens", "9"), "--tokens says what a sample is to a calibration"),
        (("--calibrate",), "--calibrate times matrix products, so it must know how many"),
        (("--speeds", "1,5000"), "rank 0 does 1 samples/s, rank 1 5e+03: it adds less than 0.1%"),
        (("--speeds", "1", "--picture", "x.pdf"), "--picture is x.pdf; give a file that ends in"),
    ],
)
def test_errors_name_the_remedy(plan, arguments, said):
    assert f"error: {said}" in plan(*arguments, code=2)


def test_pictures():
    pytest.importorskip("matplotlib")
    # In a process of its own, as matplotlib keeps fonts open.
    program = "import sys; from evener.cli import main\n"
    program += "for name in sys.argv[1:]: main(['plan', '--speeds', '3,2', '--picture', name])"
    Path("there.png").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program, "plan.png", "plan.svg", "there.png"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert "the picture there.png cannot be written" in done.stderr
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse("plan.svg").getroot().tag.endswith("svg")
