"""`evener doctor` as users run it: here, and from one process to another."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from evener.cli import main
from evener.doctor.host_facts import HostFacts, MeasuredLink
from evener.doctor.judgement import Problem
from helpers.launched import Sandbox
from helpers.limits import PATIENCE_S
from helpers.ports import free_port


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def check_form(document: dict[str, Any]) -> list[Problem]:
    """Checks the JSON; returns its problems."""
    assert set(document) == {"form", "here", "there", "link", "problems"}
    assert document["form"] == 1
    kinds = {"here": HostFacts, "there": HostFacts | None, "link": MeasuredLink | None}
    for name, kind in kinds.items():
        TypeAdapter(kind).validate_json(json.dumps(document[name]), strict=True)
    return [Problem(**problem) for problem in document["problems"]]


def test_one_process_asks_another(sandbox: Sandbox) -> None:
    address = f"127.0.0.1:{free_port()}"
    token = sandbox.token_file("a secret of two machines\n")
    reading, writing = os.pipe()
    there = sandbox.evener("doctor", "--listen", address, "--token-file", token, stderr=writing)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert "doctor listens on 127.0.0.1" in said.readline()
        done = sandbox.evener("doctor", address, "--token-file", token, "--json").end()
        assert "answered 127.0.0.1" in said.readline()
        there.press_ctrl_c()
        assert there.process.wait(PATIENCE_S) == 130
    document = json.loads(done.out)
    problems = check_form(document)
    assert done.code == (1 if problems else 0), done
    assert document["there"]["versions"] == document["here"]["versions"]
    assert not any(problem.where == "between" for problem in problems), problems


def test_here_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    out = capsys.readouterr().out
    assert "Gloo, shared memory" in out
    problems = re.findall(r"^problem here: .+\n  remedy: .+$", out, re.MULTILINE)
    assert code == (1 if problems else 0)
    assert ("no problems found" in out) is not bool(problems)


def test_nobody_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", f"127.0.0.1:{free_port()}", "--json"]) == 1
    problems = check_form(json.loads(capsys.readouterr().out))
    assert "nothing listens" in problems[-1].what


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "0.0.0.0"], "--token-file"),
        (["http://box"], "ADDR is 'http://box'"),
        (["--token-file", "absent"], "absent cannot be read"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
