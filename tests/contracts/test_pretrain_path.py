"""``evener pretrain`` goes to its first step by the path that docs/architecture.md tells."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from evener import cli
from evener.team import launch
from helpers.forking import Zygote
from helpers.pretraining import NEEDED, RUN_TIMEOUT_S, Lab, be_evener
from helpers.ranks import Rank, RankTeam
from helpers.source import PACKAGE, ROOT

#: A function of evener: its file, and its name in it.
Hop = tuple[str, str]
#: What makes the first optimizer step.
LAST: Hop = ("engine/habits.py", "Habits.step")


def told(heading: str) -> list[Hop]:
    """The hops that the document names below a heading, in their order."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = text.partition(f"\n{heading}\n")
    section = re.split(r"^#", rest, flags=re.MULTILINE)[0]
    return re.findall(r"^\d+\. `([\w/.]+)` → `([\w.]+)`", section, re.MULTILINE)


class Walk:
    """Notes when functions of evener are called, up to the last hop.

    Attributes:
        calls: The number of a function's first call; of its newest one, where that was under way at
            the last hop.
        stack: The functions that were under way at the last hop, the outermost first.
    """

    def __init__(self) -> None:
        self.calls: dict[Hop, int] = {}
        self.stack: list[Hop] = []
        self._newest: dict[Hop, int] = {}
        self._count = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """A profile function; see ``sys.setprofile``."""
        if event != "call" or (hop := hop_of(frame)) is None:
            return
        self._count += 1
        self.calls.setdefault(hop, self._count)
        self._newest[hop] = self._count
        if hop == LAST:
            sys.setprofile(None)
            under_way: FrameType | None = frame
            while under_way is not None:
                if (hop := hop_of(under_way)) is not None:
                    self.stack.insert(0, hop)
                    self.calls[hop] = self._newest[hop]
                under_way = under_way.f_back


def hop_of(frame: FrameType) -> Hop | None:
    """The function of evener that a frame runs."""
    file, name = frame.f_code.co_filename, frame.f_code.co_qualname
    if not file.startswith(f"{PACKAGE}/") or "<" in name:
        return None  # of others; a module, a lambda, a comprehension, a function in a function
    return file.removeprefix(f"{PACKAGE}/"), name


def traced(rank: Rank, folder: str, command: list[str]) -> tuple[dict[Hop, int], list[Hop]]:
    """What a rank calls on its way to the first step, and what is under way there."""
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        assert be_evener(rank, folder, command) == 0
    finally:
        sys.setprofile(None)
    return walk.calls, walk.stack


def check_order(hops: list[Hop], calls: dict[Hop, int]) -> None:
    """Every hop is called, each after the one before it."""
    assert hops, "the document names no way below this heading"
    missing = [hop for hop in hops if hop not in calls]
    assert not missing, f"the document names what is not called: {missing}"
    assert hops == sorted(hops, key=calls.__getitem__), "the document names another order"


def test_a_rank_goes_the_way_that_is_written_down(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    Zygote.get().preload(*NEEDED)
    command = ["pretrain", "run.yaml", "--set", "max_steps=1"]
    with RankTeam(traced, 1, str(lab.folder), command) as team:
        (outcome,) = team.wait(RUN_TIMEOUT_S)
    lab.close()
    assert outcome.returned, outcome.story()
    calls, stack = outcome.value
    hops = told("### In each rank")
    assert hops[-1] == LAST
    check_order(hops, calls)
    left_out = [hop for hop in stack if hop not in hops]
    assert not left_out, f"what is under way at the first step is not written down: {left_out}"


def test_the_launcher_goes_the_way_that_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    monkeypatch.chdir(lab.folder)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    # The ranks themselves are those of the other test.
    monkeypatch.setattr(launch._Launcher, "run", lambda *given: given[3].close())
    walk = Walk()
    sys.setprofile(walk.note)
    try:
        cli.main(["pretrain", "run.yaml", "--nproc", "1"])
    finally:
        sys.setprofile(None)
    lab.close()
    check_order(told("### In the launcher"), walk.calls)
