"""dev.py: when it makes .venv, what it runs, and that a failure is a failure."""

import os
import shutil
import subprocess
import sys

import pytest

from helpers.limits import PATIENCE_S
from helpers.source import ROOT

FILES = ("dev.py", "pyproject.toml", "constraints.txt", ".ci/run")

# Stands for every program of .venv: notes how it was called, and fails if the file `failing` holds
# a part of that.
PROGRAM = """#!{python} -IS
import os, sys
call = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
with open({root!r} + "/calls", "a") as calls:
    calls.write(call + "\\n")
failing = {root!r} + "/failing"
sys.exit(3 if os.path.exists(failing) and open(failing).read() in call else 0)
"""

# Stands for the module venv.
VENV = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
for name in ("python", "evener"):
    program = folder / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text({program!r})
    program.chmod(0o755)
with open({root!r} + "/calls", "a") as calls:
    calls.write("venv\\n")
"""


class Clone:
    """A copy of the repository's scripts, in which .venv is made of stand-ins."""

    def __init__(self, folder):
        self.folder = folder
        (folder / ".ci").mkdir()
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)
        program = PROGRAM.format(python=sys.executable, root=str(folder))
        (folder / "modules").mkdir()
        (folder / "modules" / "venv.py").write_text(VENV.format(program=program, root=str(folder)))

    def run(self, *command, frozen=False):
        """What was called, and how the command ended."""
        (self.folder / "calls").unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if k != "EVENER_DEV_FROZEN"}
        environment |= {"PYTHONPATH": str(self.folder / "modules")}
        environment |= {"EVENER_DEV_FROZEN": "1"} if frozen else {}
        done = subprocess.run(
            command if command[0] == ".ci/run" else [sys.executable, "dev.py", *command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            env=environment,
        )
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else [], done

    def fail(self, part):
        """From now on every call that contains this fails."""
        (self.folder / "failing").write_text(part)


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


@pytest.fixture
def made(clone):
    """A clone whose .venv has been made."""
    calls, done = clone.run("setup")
    assert done.returncode == 0, done.stderr
    assert calls[0] == "venv"
    assert f"-e {clone.folder}[hf,data,tensorboard,dashboard,docs,dev" in calls[1]
    assert calls[1].endswith(f" -c {clone.folder}/constraints.txt")
    return clone


def test_the_environment_is_made_once(made):
    calls, done = made.run("setup")
    assert (calls, done.returncode) == ([], 0)


@pytest.mark.parametrize(
    ("file", "before", "after", "again"),
    [
        ("pyproject.toml", '"rich",', '"rich>=1",', True),
        ("constraints.txt", "torch==", "torch==9", True),
        ("pyproject.toml", "line-length = 100", "line-length = 99", False),
    ],
)
def test_it_is_made_again_when_dependencies_change_and_only_then(made, file, before, after, again):
    path = made.folder / file
    path.write_text(path.read_text().replace(before, after, 1))
    (made.folder / ".venv" / "old").touch()
    calls, _ = made.run("setup")
    assert ("venv" in calls) is again
    assert (made.folder / ".venv" / "old").exists() is not again


def test_a_failed_setup_is_an_error_and_is_made_again(clone):
    clone.fail("pip install")
    calls, done = clone.run("demo")
    assert done.returncode == 3
    assert "pip install" in done.stderr
    assert "evener" not in calls[-1].split()
    clone.fail("nothing")
    calls, done = clone.run("setup")
    assert (calls[0], done.returncode) == ("venv", 0)


def test_a_frozen_environment_is_never_made(clone):
    calls, done = clone.run("setup", frozen=True)
    assert (calls, done.returncode) == ([], 1)
    assert ".venv is out of date" in done.stderr


@pytest.mark.parametrize("options", [[], ["--all"]])
def test_ci_runs_every_test_those_with_deadlines_last(made, options):
    calls, done = made.run(".ci/run", *options)
    assert done.returncode == 0, done.stderr
    first, last = calls
    assert first.startswith("python -m pytest ")
    assert first.endswith(" --ignore=tests/conformance tests")
    assert last.endswith(" -n 2 tests/conformance")
    assert all(("--all" in call) is bool(options) for call in calls)


def test_docs_writes_the_reference_and_builds_the_site_strictly(made):
    calls, done = made.run("docs")
    assert done.returncode == 0, done.stderr
    assert calls[0] == "python docs/make_reference.py"
    assert calls[1].startswith("python -m sphinx -W --keep-going")
    made.fail("sphinx")
    assert made.run("docs")[1].returncode == 3


def test_a_failure_is_a_failure_and_the_rest_runs_all_the_same(made):
    made.fail("--ignore")
    calls, done = made.run(".ci/run")
    assert (len(calls), done.returncode) == (2, 3)
