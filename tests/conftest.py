"""Around every test: the same seeds, and nothing left behind (``helpers/leaks.py``)."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Before torch is imported: ranks and workers share few cores, and one thread is enough for tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis

from helpers import leaks
from helpers.browsers import find_browser
from helpers.forking import Zygote
from helpers.launched import QUICK

if TYPE_CHECKING:
    from helpers.clocks import RankClocks

# The same examples in every run: what fails, fails for everybody. No deadline: machines are busy.
# --all tries more of them, `--hypothesis-profile=search` looks for new ones.
REPEATABLE = {"deadline": None, "derandomize": True, "database": None}
hypothesis.settings.register_profile("repeatable", **REPEATABLE, max_examples=40)
hypothesis.settings.register_profile("all", **REPEATABLE, max_examples=400)
hypothesis.settings.register_profile("search", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")

#: Marker -> what such a test needs.
NEEDS = {
    "gpu": "a GPU",
    "root": "root and iproute2",
    "browser": "chromium and playwright",
    "ray": "Ray (the extra `ray`)",
    "long": "more time than others",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also run tests that take long or need more than Python",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        hypothesis.settings.load_profile("all")
    leaks.mark_descendants()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(QUICK), *([before] if before else [])])
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells start background jobs so; whatever is tested would inherit it, and never stop.
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    Zygote.shut_down()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what this machine lacks, and without --all whatever needs more than Python."""
    asked = config.getoption("--all")
    for item in items:
        for marker, what in NEEDS.items():
            if item.get_closest_marker(marker) is None:
                continue
            if not asked:
                item.add_marker(pytest.mark.skip(reason=f"needs {what}"))
            elif not has(marker):
                item.add_marker(pytest.mark.skip(reason=f"needs {what}, which is not here"))


def has(marker: str) -> bool:
    """Whether this machine has what tests of a marker need."""
    from importlib.util import find_spec
    from shutil import which

    if marker == "long":
        return True
    if marker == "root":
        return os.geteuid() == 0 and all(map(which, ("ip", "tc", "nsenter", "unshare")))
    if marker == "browser":
        return find_spec("playwright") is not None and find_browser() is not None
    if marker == "ray":
        return find_spec("ray") is not None
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves something behind.

    That is: a process, a thread, an open file or socket, a shared-memory segment, a torch process
    group; a changed environment variable, current directory, signal handler or setting of torch.
    """
    before = leaks.Snapshot.take()
    yield
    if found := leaks.find_leaks(before):
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def no_orphans() -> Iterator[None]:
    """Fails a test file that leaves a process whose parent has died."""
    yield
    if found := leaks.find_orphans():
        pytest.fail("the tests of this file left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(autouse=True)
def same_seeds(no_leaks: None) -> None:
    """Seeds random, numpy and torch with 0."""
    leaks.seed_everything(0)


@pytest.fixture
def rank_clocks(monkeypatch: pytest.MonkeyPatch) -> "RankClocks":
    """Clocks for ranks on threads, on which time passes as the test says."""
    from helpers.clocks import RankClocks

    return RankClocks(monkeypatch)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent
