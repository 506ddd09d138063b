#!/usr/bin/env python3
"""Set up, try and test this repository with nothing but Python and git.

  python3 dev.py setup            make .venv; the other tasks do this, too, when it is out of date
  python3 dev.py demo [OPTIONS]   pretrain a small model on this machine with two ranks
  python3 dev.py test [--all]     all tests: lint, types and import layers are among them; --all
                                  includes those that take long or need root, chromium or a GPU
  python3 dev.py test ARGS        pytest with these arguments
  python3 dev.py docs             build the site into docs/_build/html; warnings are errors

CONTRIBUTING.md explains how to install torch without CUDA.
"""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        f"dev.py needs Python 3.11 or newer, but {sys.executable} is {sys.version.split()[0]}. "
        "Install a newer one, and start dev.py with it: python3.12 dev.py"
    )

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "dev-stamp"
LOCK = ROOT / ".venv.lock"
EXTRAS = "hf,data,tensorboard,dashboard,docs,dev"
if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
    EXTRAS += ",browser"

# These tests hold peers to short deadlines: two at a time, after all others.
LAST_TESTS = "tests/conformance"


def wanted_stamp() -> str:
    """Return a digest of what decides the contents of .venv.

    The folder is part of it, because a virtual environment holds absolute paths. Settings of ruff
    or pytest are not.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    relevant = [project["build-system"], project["project"], project["tool"]["hatch"], EXTRAS]
    text = json.dumps([relevant, str(ROOT)], sort_keys=True)
    constraints = (ROOT / "constraints.txt").read_bytes()
    return hashlib.sha256(text.encode() + constraints).hexdigest()


def setup() -> None:
    """Make .venv again if it is incomplete or its dependencies have changed."""
    wanted = wanted_stamp()
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two at once, the second waits and finds it made
        if STAMP.exists() and STAMP.read_text(encoding="utf-8").strip() == wanted:
            return
        if os.environ.get("EVENER_DEV_FROZEN"):
            sys.exit("dev.py: .venv is out of date, and EVENER_DEV_FROZEN forbids making it")
        make_venv()
        STAMP.write_text(wanted + "\n", encoding="utf-8")


def make_venv() -> None:
    """Install the versions of constraints.txt into a new .venv."""
    say("making .venv; the first time takes a minute or more, for torch")
    if not Path("/proc/driver/nvidia").exists():
        say("found no NVIDIA GPU; CONTRIBUTING.md explains how to install torch without CUDA")
    shutil.rmtree(VENV, ignore_errors=True)
    # Not sys.executable, which may be in the .venv that has just been removed.
    run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", str(VENV))
    constraints = str(ROOT / "constraints.txt")
    pip = ("-m", "pip", "install", "--quiet", "--no-compile", "--progress-bar", "off")
    run(str(BIN / "python"), *pip, "-e", f"{ROOT}[{EXTRAS}]", "-c", constraints)
    # pip would compile on one core. Files for other versions of Python do not compile.
    compiling = [str(BIN / "python"), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib")]
    subprocess.run(compiling, check=False)


def run(*command: str) -> None:
    """Run a command; if it fails, end with its status."""
    if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
        say(f"`{' '.join(command)}` ended with status {status}")
        sys.exit(status)


def test(arguments: list[str]) -> int:
    """Run pytest; return 0 if everything passed, else the first status that is not 0."""
    # Hundreds of processes of the tests import evener: they must be able to keep what they compile.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    pytest = [str(BIN / "python"), "-m", "pytest"]
    runs = [[*pytest, *arguments]]
    if arguments in ([], ["--all"]):
        # One more process than cores, since tests of several ranks often wait.
        number = str(min(4, (os.cpu_count() or 1) + 1))
        beside = [*pytest, "-q", "--dist", "worksteal", *arguments, "-n"]
        runs = [[*beside, number, f"--ignore={LAST_TESTS}", "tests"], [*beside, "2", LAST_TESTS]]
    statuses = [subprocess.run(command, cwd=ROOT, check=False).returncode for command in runs]
    return next(filter(None, statuses), 0)


def docs() -> None:
    """Write the reference from the code, and build the site; end with the status of a failure."""
    python, built = str(BIN / "python"), ROOT / "docs" / "_build" / "html"
    run(python, "docs/make_reference.py")
    run(python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(built))
    say(f"built {built / 'index.html'}")


def say(text: str) -> None:
    """Print a line beside the output of the task."""
    print(f"dev.py: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the task that the command line names."""
    task, *arguments = sys.argv[1:] or ["--help"]
    if task not in ("setup", "demo", "test", "docs"):
        print((__doc__ or "").rstrip())
        return 0 if task in ("-h", "--help") else 2
    setup()
    if task == "demo":
        evener = str(BIN / "evener")
        os.execv(evener, [evener, "pretrain", "--demo", *arguments])
    if task == "docs":
        docs()
    return test(arguments) if task == "test" else 0


if __name__ == "__main__":
    sys.exit(main())
