"""`evener doctor` as users run it: here, and as two processes that meet."""

import json
import sys
from typing import Any

import pytest
from pydantic import TypeAdapter

from evener.cli import main
from evener.doctor import diagnosis, pair
from evener.doctor.host_facts import HostFacts, MeasuredLink
from evener.doctor.judgement import Problem
from helpers.hosts import HEALTHY, host
from helpers.launched import Sandbox
from helpers.machines import ADDRESSES, Machines
from helpers.ports import free_port

HEALTHY_CPU = host(
    devices=HEALTHY.devices[:1],
    devices_shown=0,
    runtime="",
    architectures=(),
    nccl="",
)


def check_form(document: dict[str, Any]) -> list[Problem]:
    """Checks the JSON; returns its problems."""
    assert set(document) == {"form", "here", "there", "link", "problems"}
    assert document["form"] == 3
    kinds = {"here": HostFacts, "there": HostFacts | None, "link": MeasuredLink | None}
    for name, kind in kinds.items():
        TypeAdapter(kind).validate_json(json.dumps(document[name]), strict=True)
    return [Problem(**problem) for problem in document["problems"]]


def test_two_processes_meet_and_both_print_the_diagnosis(sandbox: Sandbox) -> None:
    address = f"127.0.0.1:{free_port()}"
    token = sandbox.token_file("a secret of two machines\n")
    options = (address, "--token-file", token, "--json")
    one = sandbox.evener("doctor", "--listen", *options)
    two = sandbox.evener("doctor", *options)
    ends = [process.end() for process in (one, two)]
    assert f"run `evener doctor {address}` on the other machine" in ends[0].err
    documents = [json.loads(end.out) for end in ends]
    for end, document in zip(ends, documents, strict=True):
        problems = check_form(document)
        assert end.code == (1 if problems else 0), end
        # How long a row takes depends on who else uses the cores.
        between = [problem.what for problem in problems if problem.where == "between"]
        assert all(what.startswith("a row takes") for what in between), problems
    mine, theirs = documents
    assert mine["here"] == theirs["there"]
    assert mine["there"] == theirs["here"]
    assert mine["link"]["bytes_per_s_here"] == theirs["link"]["bytes_per_s_there"] > 0
    assert mine["link"]["bytes_per_s_there"] == theirs["link"]["bytes_per_s_here"] > 0
    assert mine["link"]["backend"] == "shared"


@pytest.mark.root
def test_two_machines_time_the_cable(sandbox: Sandbox) -> None:
    token = sandbox.token_file("a secret of two machines\n")
    options = (ADDRESSES[0], "--token-file", token, "--json")
    evener = (sys.executable, "-P", "-m", "evener", "doctor")
    with Machines(rate="100mbit") as machines:
        one = sandbox.start(*machines.command(0, *evener, "--listen", *options))
        two = sandbox.start(*machines.command(1, *evener, *options))
        ends = [process.end() for process in (one, two)]
    for number, end in enumerate(ends):
        assert end.code == 1, end
        document = json.loads(end.out)
        problems = check_form(document)
        assert document["here"]["host"] == f"machine-{number}"
        assert document["there"]["host"] == f"machine-{1 - number}"
        assert document["link"]["backend"] == "gloo"
        for direction in ("here", "there"):
            assert 5e6 < document["link"][f"bytes_per_s_{direction}"] < 12.5e6
        between = [problem.what for problem in problems if problem.where == "between"]
        assert any("Mbit/s in its slower direction" in what for what in between)


@pytest.mark.parametrize("listens", [True, False])
def test_nobody_there_is_a_problem(
    listens: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LISTEN_S", "CALL_S"):
        monkeypatch.setattr(pair, name, 0.5)
    monkeypatch.setattr(diagnosis, "examine_host", lambda: HEALTHY_CPU)
    address = f"127.0.0.1:{free_port()}"
    assert main(["doctor", address, "--json", *(["--listen"] if listens else [])]) == 1
    (problem,) = check_form(json.loads(capsys.readouterr().out))
    assert problem.where == "between"
    assert "evener doctor --listen" in problem.remedy
    if listens:
        assert "rank 0 waited 0 s for rank 1 of 2 to join" in problem.what
    else:
        assert "rank 1 waited " in problem.what
        assert f"for the coordinator of its team at {address} " in problem.what


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "192.0.2.1"], "--token-file"),
        (["--listen", "0.0.0.0"], "stands for every address"),
        (["http://box"], "ADDR is 'http://box'"),
        (["--token-file", "absent"], "absent cannot be read"),
    ],
)
def test_bad_options(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(diagnosis, "examine_host", lambda: HEALTHY_CPU)
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
