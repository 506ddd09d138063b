#!/usr/bin/env python3
"""Everything a developer runs, with nothing but Python and git: ``python3 dev.py TASK``.

  setup               make .venv (also done by every other task, when it is missing or out of date)
  demo [OPTIONS]      pretrain a small model on this machine with two ranks
  test [--all]        ruff, mypy, import-linter and all tests; --all includes those that need root,
                      chromium (for which it installs playwright) or a GPU
  test [--all] ARGS   pytest with these arguments, and nothing else
  lint                ruff, mypy and import-linter
  bench               measure the short forms of the benchmarks, and print their tables
  bench NAME [...]    benchmarks/NAME.py with these options

.venv is made anew only when the dependencies in pyproject.toml or constraints.txt have changed.
CONTRIBUTING.md says how to get torch without CUDA.
"""

from __future__ import annotations

import os
import sys

OLDEST_PYTHON = (3, 11)


def use_supported_python() -> None:
    """Goes on under a newer python3.X where this one is too old, or says what is missing."""
    if sys.version_info >= OLDEST_PYTHON:
        return
    from shutil import which

    for minor in range(14, OLDEST_PYTHON[1] - 1, -1):
        newer = which(f"python3.{minor}")
        if newer:
            os.execv(newer, [newer, *sys.argv])
    sys.exit(
        f"dev.py needs Python 3.11 or newer, this is {sys.version.split()[0]} ({sys.executable}). "
        "Install a newer one (apt, brew, pyenv, or `uv python install 3.12`) and run it as: "
        "python3.12 dev.py"
    )


use_supported_python()

import hashlib  # noqa: E402
import json  # noqa: E402
import tomllib  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

# Modules that only some tasks need are imported where they are used: `demo` must start at once.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
STAMP = VENV / "dev-stamp"
LOCK = ROOT / ".venv.lock"
LOG = ROOT / ".venv.log"
EXTRAS = "hf,data,tensorboard,dashboard,dev"

# Programs of which one is enough for the tests marked `browser`.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# These hold peers to short deadlines, and mostly wait: two at a time, when the others have ended.
LAST_TESTS = ("conformance",)

# They have a short form, ``--quick``, and take some minutes together.
SHORT_BENCHMARKS = ("allreduce", "homogeneous", "hetero", "simulate_scale")


# ── setup ────────────────────────────────────────────────────────────────────────────────────────


def wanted_stamp() -> str:
    """Digest of what decides the contents of .venv; settings of ruff or pytest are not part of it.

    The folder is: a virtual environment holds absolute paths and breaks when it is moved.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    relevant = [project["build-system"], project["project"], project["tool"]["hatch"], EXTRAS]
    text = json.dumps([relevant, str(ROOT)], sort_keys=True)
    constraints = (ROOT / "constraints.txt").read_bytes()
    return hashlib.sha256(text.encode() + constraints).hexdigest()


def stamp_is(wanted: str) -> bool:
    """Whether .venv was made completely, and from what is wanted now."""
    try:
        return STAMP.read_text(encoding="utf-8").strip() == wanted
    except OSError:
        return False


def setup() -> None:
    """Makes .venv anew if its stamp is missing or differs. Two at once: the second one waits."""
    wanted = wanted_stamp()
    if stamp_is(wanted):
        return
    if os.environ.get("EVENER_DEV_FROZEN"):
        sys.exit("dev.py: .venv is missing or out of date, and EVENER_DEV_FROZEN forbids making it")
    with only_one():
        if not stamp_is(wanted):
            make_venv(wanted)


@contextmanager
def only_one() -> Iterator[None]:
    """Holds a lock that ends with this process, however it ends."""
    import fcntl

    with LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another dev.py that is making .venv")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_venv(stamp: str) -> None:
    """Makes .venv from nothing. The stamp is written last: without it .venv counts as half made."""
    import shutil
    import time

    started_s = time.monotonic()
    STAMP.unlink(missing_ok=True)
    LOG.unlink(missing_ok=True)
    shutil.rmtree(VENV, ignore_errors=True)
    # Not sys.executable: that may be the .venv that has just been removed.
    base = getattr(sys, "_base_executable", None) or sys.executable
    uv = find_uv()
    tool = "uv" if uv else "pip"
    say(f"making .venv with {tool}; the first time takes a minute or more, for torch")
    if not (Path("/proc/driver/nvidia").exists() or pip_has_settings()):
        say("no NVIDIA GPU seen; CONTRIBUTING.md says how to get torch without CUDA (3 GB less)")
    what = ["-e", f"{ROOT}[{EXTRAS}]"]
    if uv:
        follow([uv, "venv", "--quiet", "--python", base, str(VENV)])
        install(uv, what)
    else:
        follow([base, "-m", "venv", str(VENV)])
        install(uv, what)
        # pip compiles on one core, and half of its time is that. Files for other versions of
        # Python do not compile; that is no failure.
        compiling = [str(BIN / "python"), "-m", "compileall", "-qq", "-j", "0", str(VENV / "lib")]
        follow(compiling, may_fail=True)
    STAMP.write_text(stamp + "\n", encoding="utf-8")
    say(f".venv is ready ({time.monotonic() - started_s:.0f} s)")


def find_uv() -> str | None:
    """The program uv, where it is installed and finds the same packages as pip."""
    import shutil

    uv = shutil.which("uv")
    if uv and pip_has_settings():
        say("uv is here, but pip has settings of its own (index or find-links): using pip")
        return None
    return uv


def install(uv: str | None, what: Sequence[str], *, may_fail: bool = False) -> None:
    """Installs packages into .venv, in the versions of constraints.txt."""
    python = str(BIN / "python")
    by_pip = [python, "-m", "pip", "install", "--no-compile", "--progress-bar", "off"]
    tool = [uv, "pip", "install", "--python", python] if uv else by_pip
    follow([*tool, *what, "-c", str(ROOT / "constraints.txt")], may_fail=may_fail)


def add_browser() -> None:
    """Installs what tests with chromium need, where chromium is here; the stamp stays as it is.

    Without it, as where there is no network, pytest says that those tests were not run.
    """
    import shutil

    if os.environ.get("EVENER_DEV_FROZEN") or not any(map(shutil.which, BROWSERS)):
        return
    with only_one():
        if not list(VENV.glob("lib/python*/site-packages/viztracer")):  # the last of them
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
            wanted = project["project"]["optional-dependencies"]["browser"]
            say(f"installing {', '.join(wanted)} for the tests with chromium")
            install(find_uv(), wanted, may_fail=True)


def pip_has_settings() -> bool:
    """Whether pip was told where packages are; uv would not hear of that."""
    variables = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONFIG_FILE")
    home = Path.home()
    files = (home / ".config/pip/pip.conf", home / ".pip/pip.conf", Path("/etc/pip.conf"))
    return any(os.environ.get(name) for name in variables) or any(f.exists() for f in files)


def follow(command: Sequence[str], *, may_fail: bool = False) -> None:
    """Runs a command with its output in .venv.log and one changing line of progress."""
    import subprocess
    import time

    started_s = shown_s = time.monotonic()
    lines = []
    before, after = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        now_s = time.monotonic()
        if now_s - shown_s >= (10.0 if after else 0.1) and line.strip():
            shown_s = now_s
            text = f"{before}  {now_s - started_s:3.0f} s  {brief(line)}"
            print(text, end=after, file=sys.stderr, flush=True)
    print(before, end="", file=sys.stderr, flush=True)
    with LOG.open("a", encoding="utf-8") as log:
        log.writelines(lines)
    if process.wait() and not may_fail:
        sys.stderr.writelines(lines[-30:])
        sys.exit(f"dev.py: could not make .venv; the whole output is in {LOG.name}")


def brief(line: str) -> str:
    """What pip or uv is doing, in few words: 'Collecting torch', without places and hashes."""
    words = line.split()
    name = words[1].rsplit("/", 1)[-1] if len(words) > 1 else ""
    return " ".join([words[0], name])[:60]


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def lint(arguments: Sequence[str]) -> int:
    """Runs every static check, also after one has failed."""
    if arguments:
        sys.exit(f"dev.py: lint takes no arguments, got {' '.join(arguments)}")
    checks = StaticChecks()
    checks.start()
    checks.report_quick()
    checks.report_slow()
    print(f"==== {checks.verdict()} ====")
    return 1 if checks.failed else 0


def test(arguments: Sequence[str]) -> int:
    """Runs the static checks and all tests, or only pytest where it is given arguments."""
    import time

    everything = [a for a in arguments if a == "--all"]
    rest = [a for a in arguments if a != "--all"]
    if everything:
        add_browser()
    if rest:
        run_tool("python", "-m", "pytest", *everything, *rest)
    started_s = time.monotonic()
    checks = StaticChecks()
    checks.start()  # mypy goes on beside the tests that run in parallel
    checks.report_quick()
    compile_modules()
    tests = ROOT / "tests"
    last = [f"tests/{name}" for name in LAST_TESTS if (tests / name).is_dir()]
    ignored = [f"--ignore={path}" for path in last]
    # One more than there are cores: tests of processes wait for one another.
    workers = str(min(4, (os.cpu_count() or 1) + 1))
    counts = Counts()
    counts.add(pytest("-n", workers, "--dist", "worksteal", *ignored, *everything, "tests"))
    checks.report_slow()
    if last:
        counts.add(pytest("-n", "2", "--dist", "worksteal", *everything, *last))
    for reason, names in sorted(counts.not_run.items()):
        print(f"not run, {reason}: {', '.join(sorted(names))}")
    if counts.not_run and not everything:
        print("`python3 dev.py test --all` runs them where the machine has what they need")
    seconds = time.monotonic() - started_s
    print(f"==== {checks.verdict()}; {counts.summary()} in {seconds:.1f}s ====")
    return 1 if checks.failed or not counts.good else 0


def compile_modules() -> None:
    """Compiles evener and the tests once; hundreds of processes of the tests import them.

    They would not write what they have compiled where PYTHONDONTWRITEBYTECODE is set.
    """
    import subprocess

    folders = ("src", "tests")
    command = [str(BIN / "python"), "-m", "compileall", "-q", *folders]
    subprocess.run(command, cwd=ROOT, check=False)


class StaticChecks:
    """Ruff, import-linter and mypy; the last takes longest and runs in the background."""

    QUICK = (
        ("ruff", ("ruff", "check", ".")),
        ("format", ("ruff", "format", "--check", ".")),
        ("imports", ("lint-imports", "--no-logo")),
    )

    def __init__(self) -> None:
        self.failed: list[str] = []

    def start(self) -> None:
        """Starts mypy."""
        import subprocess

        self._mypy = subprocess.Popen(
            [str(BIN / "mypy")],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def report_quick(self) -> None:
        """Runs the quick ones; prints what failed, and a line for what did not."""
        import subprocess

        for name, (tool, *arguments) in self.QUICK:
            done = subprocess.run(
                [str(BIN / tool), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self._report(name, done.returncode, done.stdout)

    def report_slow(self) -> None:
        """Waits for mypy."""
        output, _ = self._mypy.communicate()
        self._report("mypy", self._mypy.returncode, output)

    def verdict(self) -> str:
        """One phrase for the closing line."""
        return f"FAILED: {', '.join(self.failed)}" if self.failed else "static checks passed"

    def _report(self, name: str, status: int, output: str) -> None:
        if status:
            self.failed.append(name)
            print(output, end="")
        print(f"{name}: {'FAILED' if status else 'ok'}", flush=True)


class Counts:
    """Sums up several runs of pytest."""

    def __init__(self) -> None:
        self.passed = self.failed = self.errors = self.skipped = 0
        self.broken = False
        self.not_run: dict[str, set[str]] = {}

    @property
    def good(self) -> bool:
        """Whether something ran and nothing failed."""
        return not (self.failed or self.errors or self.broken) and self.passed > 0

    def add(self, run: tuple[int, Path]) -> None:
        """Counts one run: its exit status and its JUnit file."""
        from xml.etree import ElementTree

        status, file = run
        # 0 all passed, 1 some failed, 5 nothing collected; the rest is pytest itself going wrong.
        self.broken |= status not in (0, 1, 5)
        try:
            cases = list(ElementTree.parse(file).iter("testcase"))
        except (OSError, ElementTree.ParseError):
            self.broken = True
            return
        finally:
            file.unlink(missing_ok=True)
        for case in cases:
            skipped = case.find("skipped")
            if case.find("failure") is not None:
                self.failed += 1
            elif case.find("error") is not None:
                self.errors += 1
            elif skipped is not None:
                self.skipped += 1
                reason = skipped.get("message", "")
                if reason.startswith("needs "):
                    self.not_run.setdefault(reason, set()).add(case.get("name", "?"))
            else:
                self.passed += 1
        self.broken |= status == 1 and not (self.failed or self.errors)

    def summary(self) -> str:
        """``12 passed, 0 failed, 3 skipped``."""
        parts = [f"{self.passed} passed", f"{self.failed} failed"]
        parts += [f"{self.errors} errors"] if self.errors else []
        parts += [f"{self.skipped} skipped"] if self.skipped else []
        parts += ["pytest BROKEN OFF"] if self.broken else []
        return ", ".join(parts)


def pytest(*arguments: str) -> tuple[int, Path]:
    """Runs pytest; returns its exit status and the JUnit file that it wrote."""
    import subprocess
    import tempfile

    handle, name = tempfile.mkstemp(suffix=".xml", prefix="evener-tests-")
    os.close(handle)
    command = [str(BIN / "python"), "-m", "pytest", "-q", f"--junitxml={name}", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode, Path(name)


def run_tool(tool: str, *arguments: str) -> NoReturn:
    """Replaces this process by a program from .venv."""
    sys.stdout.flush()
    os.execv(BIN / tool, [str(BIN / tool), *arguments])


def bench(arguments: Sequence[str]) -> int:
    """Runs a benchmark, whose own options follow its name, or the short forms of the main ones."""
    if not arguments:
        return bench_all()
    name, *options = arguments
    known = sorted(
        p.stem for p in (ROOT / "benchmarks").glob("*.py") if "def main" in p.read_text()
    )
    if name not in known:
        say(f"no benchmark {name!r}; choose from {', '.join(known)}")
        return 2
    run_tool("python", str(ROOT / "benchmarks" / f"{name}.py"), *options)


def bench_all() -> int:
    """Runs short forms; their reports go to ``runs/bench``."""
    import subprocess

    folder, python = ROOT / "runs" / "bench", str(BIN / "python")
    folder.mkdir(parents=True, exist_ok=True)
    reports, failed = [], []
    for name in SHORT_BENCHMARKS:
        say(f"{name}.py --quick")
        report = folder / f"{name}.json"
        report.unlink(missing_ok=True)
        script = str(ROOT / "benchmarks" / f"{name}.py")
        command = [python, script, "--quick", "--json", str(report)]
        # Some make files of their own where they are run.
        done = subprocess.run(command, cwd=folder, check=False)
        failed += [name] if done.returncode else []
        reports += [str(report)] if report.exists() else []
    if failed:
        say(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def say(text: str) -> None:
    """Tells the developer something, beside the output of the task."""
    print(f"dev.py: {text}", file=sys.stderr, flush=True)


TASKS: dict[str, Callable[[Sequence[str]], int]] = {
    "setup": lambda _: 0,
    "demo": lambda arguments: run_tool("evener", "pretrain", "--demo", *arguments),
    "test": test,
    "lint": lint,
    "bench": bench,
}


def main() -> int:
    """Runs the task that the command line names."""
    task, *arguments = sys.argv[1:] or ["--help"]
    if task in ("-h", "--help", "help"):
        print((__doc__ or "").rstrip())
        return 0
    if task not in TASKS:
        sys.exit(f"dev.py: there is no task {task!r}; choose from {', '.join(TASKS)}")
    setup()
    return TASKS[task](arguments)


if __name__ == "__main__":
    sys.exit(main())
