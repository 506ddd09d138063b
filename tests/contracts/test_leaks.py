"""A test that leaves something behind fails, one that tidies up does not, and later ones go on."""

import re
import subprocess
import sys
from pathlib import Path

from helpers.limits import PATIENCE_S

TESTS = Path(__file__).resolve().parent.parent

# One body per kind of leak, and what the report must say of it.
LEAKS = {
    "process": (
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])',
        r"process \d+: .*python.*sleep\(600\)",
    ),
    "thread": ("threading.Thread(target=forever.wait, name='left').start()", "thread 'left': in "),
    "daemon": (
        "threading.Thread(target=forever.wait, name='left', daemon=True).start()",
        r"thread 'left' \(daemon\): in ",
    ),
    "variable": ('os.environ["LEFT"] = "1"', r"variable LEFT: None became b'1'"),
    "removed": ('del os.environ["HOME"]', r"variable HOME: b'.*' became None"),
    "file": ('kept.append(open("left", "w"))', r"descriptor \d+: .*/left"),
    "socket": ("kept.append(socket.socket())", r"descriptor \d+: socket:"),
    "memfd": ("kept.append(os.memfd_create('left'))", r"descriptor \d+: /memfd:left"),
    "segment": (
        "kept.append(shared_memory.SharedMemory(create=True, size=64)); kept[-1].close()",
        r"shared memory /dev/shm/psm_",
    ),
    "folder": ('os.chdir("/")', "current directory: .* became /"),
    "handler": (
        "signal.signal(signal.SIGUSR1, lambda *_: None)",
        "handler of signal SIGUSR1: .* became <function",
    ),
    "group": (
        "torch.distributed.init_process_group("
        "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)",
        "the default process group",
    ),
    "dtype": ("torch.set_default_dtype(torch.float64)", "default dtype: torch.float32 became"),
    "threads": ("torch.set_num_threads(3)", "number of threads: 1 became 3"),
    "gradients": ("torch._C._set_grad_enabled(False)", "gradients enabled: True became False"),
}

HEADER = """
import os, signal, socket, subprocess, sys, threading
from multiprocessing import shared_memory
import pytest, torch, torch.distributed
kept = []
forever = threading.Event()

@pytest.fixture(scope="module", autouse=True)
def end():
    yield
    forever.set()
    for thing in kept:
        if isinstance(thing, shared_memory.SharedMemory):
            thing.unlink()
"""


def run_pytest(folder: Path, source: str, *, patience_s: float = 10.0) -> str:
    """Runs a test file under the repository's conftest and settings; returns what it printed."""
    (folder / "test_leaky.py").write_text(HEADER + source)
    conftest = (TESTS / "conftest.py").read_text()
    (folder / "conftest.py").write_text(f"{conftest}\nleaks.PATIENCE_S = {patience_s}\n")
    command = [sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml")]
    command += ["--rootdir", str(folder), "-o", f"pythonpath={TESTS}", "-p", "no:cacheprovider"]
    # What leaks is often not closed either; here it is the report that counts.
    command += [
        "-W",
        "ignore::ResourceWarning",
        "-W",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    ]
    done = subprocess.run(
        [*command, str(folder)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return done.stdout + done.stderr


def test_every_kind_of_leak_fails_the_test_that_made_it_and_no_other(tmp_path):
    source = ""
    for kind, (body, _) in LEAKS.items():
        source += f"\ndef test_{kind}(tmp_path):\n    {body}\n\ndef test_after_{kind}(): pass\n"
    # Found at the end of the file, and only there.
    child = "import time; time.sleep(600)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    source += f"\ndef test_orphan():\n    subprocess.run([sys.executable, '-c', {parent!r}])\n"
    output = run_pytest(tmp_path, source, patience_s=0.1)
    assert f"{2 * len(LEAKS) + 1} passed, {len(LEAKS) + 1} errors" in output, output
    assert re.search(r"orphaned process \d+: .*sleep\(600\)", output), output
    for kind, (_, report) in LEAKS.items():
        section = re.search(rf"teardown of test_{kind} _+\n(.*?)\n(___|===)", output, re.DOTALL)
        assert section, (kind, output)
        assert re.search(report, section[1]), (kind, section[1])
        assert len(section[1].splitlines()) == 2, section[1]  # nothing else is blamed on it


def test_what_is_tidied_up_is_no_leak_and_seeds_are_the_same_in_every_test(tmp_path):
    source = """
import random, numpy

def test_tidy(tmp_path, monkeypatch):
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)
    with open("file", "w"), socket.socket():
        subprocess.run([sys.executable, "-c", "pass"])
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    segment = shared_memory.SharedMemory(create=True, size=64)
    segment.close()
    segment.unlink()

def test_ends_soon():
    threading.Timer(0.2, print).start()

@pytest.mark.parametrize("again", range(2))
def test_draws_the_same_numbers_each_time(again):
    kept.append((random.random(), numpy.random.rand(), torch.rand(1).item()))
    assert kept[-1] == kept[0]
"""
    assert "4 passed" in run_pytest(tmp_path, source)


def test_what_needs_more_than_python_runs_only_when_asked(tmp_path):
    markers = ("gpu", "root", "browser")
    source = "".join(f"\n@pytest.mark.{m}\ndef test_{m}(): pass\n" for m in markers)
    output = run_pytest(tmp_path, source)
    assert "3 skipped" in output, output
    for reason in ("a GPU", "root and iproute2", "chromium and playwright"):
        assert f"needs {reason}\n" in output, output
