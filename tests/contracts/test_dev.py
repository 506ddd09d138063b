"""dev.py: when it makes .venv, what it runs, and that a failure is a failure."""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading

import pytest

from helpers.limits import PATIENCE_S
from helpers.source import ROOT

FILES = ("dev.py", "pyproject.toml", "constraints.txt", ".ci/run")

# Stands for every program of .venv: notes how it was called; a file FAIL.<name> makes it fail.
PROGRAM = """#!{python}
import pathlib, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
root = pathlib.Path({root!r})
with (root / "calls").open("a") as calls:
    calls.write(" ".join([name, *arguments]) + "\\n")
failing = (root / f"FAIL.{{name}}").exists()
for argument in arguments:
    if argument.startswith("--junitxml="):
        broken = '<testcase name="b"><failure/></testcase>' if failing else '<testcase name="b"/>'
        left_out = '<testcase name="c"><skipped message="needs a GPU"/></testcase>'
        cases = '<testcase name="a"/>' + broken + left_out
        pathlib.Path(argument.split("=", 1)[1]).write_text(f"<testsuite>{{cases}}</testsuite>")
print(f"{{name}} says something")
sys.exit(int(failing))
"""


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository's scripts."""
    (tmp_path / ".ci").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "conformance").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def dev(clone, monkeypatch):
    """dev.py of that copy, as a module, which makes .venv out of stand-ins."""
    monkeypatch.delenv("EVENER_DEV_FROZEN", raising=False)
    spec = importlib.util.spec_from_file_location("dev", clone / "dev.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.made = []

    def follow(command, *, may_fail=False):
        module.made.append(" ".join(map(str, command)))
        module.BIN.mkdir(parents=True, exist_ok=True)
        for name in ("python", "ruff", "mypy", "lint-imports", "evener"):
            program = module.BIN / name
            program.write_text(PROGRAM.format(python=sys.executable, root=str(clone)))
            program.chmod(0o755)

    module.follow = follow
    return module


def run(clone, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "dev.py", *arguments] if arguments[0] != ".ci/run" else list(arguments),
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=os.environ | {"EVENER_DEV_FROZEN": "1"} | environment,
    )


def calls(clone):
    return (clone / "calls").read_text().splitlines()


def test_the_environment_is_made_once(dev):
    dev.setup()
    assert any("venv" in command for command in dev.made)
    install = next(command for command in dev.made if "install" in command)
    assert (
        f"-e {dev.ROOT}[hf,data,plot,tensorboard,dashboard,dev] -c {dev.ROOT}/constraints.txt"
        in install
    )
    done = list(dev.made)
    dev.setup()
    assert dev.made == done


@pytest.mark.parametrize(
    ("file", "before", "after", "again"),
    [
        ("pyproject.toml", '"rich",', '"rich>=1",', True),
        ("constraints.txt", "torch==", "torch==9", True),
        ("pyproject.toml", "line-length = 100", "line-length = 99", False),
    ],
)
def test_it_is_made_anew_when_dependencies_change_and_only_then(dev, file, before, after, again):
    dev.setup()
    dev.made.clear()
    path = dev.ROOT / file
    path.write_text(path.read_text().replace(before, after, 1))
    (dev.VENV / "old").touch()
    dev.setup()
    assert bool(dev.made) is again
    assert (dev.VENV / "old").exists() is not again


def test_of_two_at_once_one_makes_it_and_the_other_waits(dev, monkeypatch):
    whole, inside, go_on = dev.follow, threading.Event(), threading.Event()

    def slowly(command, *, may_fail=False):
        inside.set()
        assert go_on.wait(PATIENCE_S)
        whole(command)

    monkeypatch.setattr(dev, "follow", slowly)
    waits = threading.Event()
    monkeypatch.setattr(dev, "say", lambda text: waits.set() if "waiting" in text else None)
    first = threading.Thread(target=dev.setup)
    second = threading.Thread(target=dev.setup)
    first.start()
    assert inside.wait(PATIENCE_S)
    second.start()
    assert waits.wait(PATIENCE_S)
    go_on.set()
    first.join()
    second.join()
    assert sum("install" in command for command in dev.made) == 1


def test_a_frozen_environment_is_never_made(clone):
    done = run(clone, "setup")
    assert done.returncode != 0
    assert "missing or out of date" in done.stderr
    assert not (clone / ".venv").exists()


def test_test_runs_everything_and_sums_up_in_one_line(dev, clone):
    dev.setup()
    done = run(clone, ".ci/run")
    assert done.returncode == 0, done.stderr
    ran = calls(clone)
    assert {"ruff check .", "ruff format --check .", "mypy", "lint-imports --no-logo"} <= set(ran)
    side_by_side, last = [line for line in ran if "-m pytest" in line]
    assert "--ignore=tests/conformance tests" in side_by_side
    assert last.endswith(" -n 2 --dist worksteal tests/conformance")
    lines = done.stdout.splitlines()
    assert "not run, needs a GPU: c" in lines
    assert lines[-1].startswith("==== static checks passed; 4 passed, 0 failed, 2 skipped in ")


@pytest.mark.parametrize("broken", ["ruff", "mypy", "lint-imports", "python"])
def test_whatever_fails_makes_the_whole_fail_and_the_rest_run_all_the_same(dev, clone, broken):
    dev.setup()
    (clone / f"FAIL.{broken}").touch()
    done = run(clone, ".ci/run")
    assert done.returncode == 1
    assert len(calls(clone)) == 7
    closing = done.stdout.splitlines()[-1]
    if broken == "python":
        assert "2 passed, 2 failed" in closing
    else:
        assert "FAILED: " in closing
        assert f"{broken} says something" in done.stdout


def test_arguments_go_to_pytest_alone(dev, clone):
    dev.setup()
    run(clone, "test", "--all", "tests/unit", "-k", "cursor")
    assert calls(clone) == ["python -m pytest --all tests/unit -k cursor"]


def test_an_old_python_is_told_what_to_do(dev, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer"):
        dev.use_supported_python()
