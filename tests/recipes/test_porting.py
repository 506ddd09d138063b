"""The diffs of ``docs/porting.md``: both sides end with the same parameters.

A batch is the whole data set (see ``helpers/project.py``), so that the order of samples does not
matter. Sums in another order leave 1e-6 of float32. AdamW divides by small roots, which magnifies
that where a gradient is nearly zero: the bound is for all parameters together.
"""

import ast
import os
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.markdown import Block, blocks
from helpers.ports import free_port
from helpers.ranks import Rank, run_ranks
from helpers.recipes import new_lines
from helpers.source import ROOT

PORTING = ROOT / "docs" / "porting.md"
DIFFS = {
    block.note[1].partition(",")[0]: block
    for block in blocks(PORTING.read_text())
    if block.note[0] == "port"
}
TOLERANCE = 2e-5


def sides(block: Block) -> tuple[str, str]:
    """The script before and the script after."""
    lines = block.text.splitlines()
    assert all(not line or line[0] in " +-" for line in lines)
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before + "\n", after + "\n"


#: The names of scripts, for as long as their process lives. When torch's own DDP is freed, its
#: process group waits for a thread of Gloo, which may wait for the interpreter's lock that the one
#: who frees it holds.
KEPT: list[dict[str, Any]] = []


def execute(script: str) -> dict[str, Tensor]:
    """Runs a script in this process; what its ``model`` has become."""
    from helpers import project

    sys.modules["project"] = project
    names: dict[str, Any] = {"__name__": "__main__"}
    KEPT.append(names)
    exec(compile(script, "porting.md", "exec"), names)
    return {
        f"{model} {name.removeprefix('module.')}": p.detach().cpu()
        for model in ("model", "generator", "discriminator")
        if model in names
        for name, p in names[model].named_parameters()
    }


def run_before(rank: Rank, script: str, folder: str, port: int) -> dict[str, Tensor]:
    os.chdir(folder)
    warnings.simplefilter("ignore")  # the other libraries' own
    # torch opens the port itself. On the one that rank 0 listens on already, a rank that connects
    # before torch does would wait for an answer for ever.
    os.environ["MASTER_PORT"] = str(port)
    return execute(script)


def run_after(rank: Rank, script: str, folder: str) -> dict[str, Tensor]:
    os.chdir(folder)
    return execute(script)


def run_after_unevenly(rank: Rank, script: str, folder: str) -> dict[str, Tensor]:
    import evener

    original = evener.Ddp.setup

    def setup(*args: Any, config: Any = None, **options: Any) -> Any:
        ratios = (5, 2, 1)[: rank.world_size]
        uneven = replace(config or evener.DdpConfig(), partition_ratios=ratios, quiet=True)
        return original(*args, config=uneven, **options)

    evener.Ddp.setup = setup  # type: ignore[method-assign]
    return run_after(rank, script, folder)


def compare(name: str, folder: Path, *, world_size_before: int) -> None:
    """Both sides, the new one with default options, and with shares 5:2:1."""
    before, after = sides(DIFFS[name])
    expected = run_ranks(run_before, world_size_before, before, str(folder), free_port())[0]
    theirs = torch.cat([t.flatten() for t in expected.values()])
    for world_size, run in [(2, run_after), (3, run_after_unevenly)]:
        own = folder / f"{world_size} ranks"
        own.mkdir()
        results = run_ranks(run, world_size, after, str(own))
        for rank, found in enumerate(results):
            assert found.keys() == expected.keys()
            ours = torch.cat([found[key].flatten() for key in expected])
            difference = float((ours - theirs).norm() / theirs.norm())
            assert difference <= TOLERANCE, f"rank {rank} of {world_size}: {difference}"


@pytest.mark.parametrize("name", ["ddp", "ddp-gpt"])
def test_a_ddp_script_and_its_port_end_alike(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, world_size_before=2)


@pytest.mark.parametrize("name", ["gan", "vae"])
def test_a_script_for_one_device_and_its_port_end_alike(name: str, tmp_path: Path) -> None:
    """Optimizers in turns are handed nothing that does not count; sums stay sums."""
    compare(name, tmp_path, world_size_before=1)


@pytest.mark.parametrize("name", ["accelerate", "trainer"])
def test_a_port_from_a_library_ends_as_the_library_does(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path, world_size_before=1)


def test_the_port_from_fabric_is_that_from_accelerate() -> None:
    """Fabric is not installed here: its port must be the one that was compared."""
    before, after = sides(DIFFS["fabric"])
    ast.parse(before)
    assert after == sides(DIFFS["accelerate"])[1]


@pytest.mark.parametrize("name", [n for n, b in DIFFS.items() if "lines" in b.note[1]])
def test_the_number_of_lines_is_what_it_says(name: str) -> None:
    (said,) = re.findall(r", (\d+) lines", DIFFS[name].note[1])
    assert len(new_lines(*sides(DIFFS[name]))) == int(said) <= (6 if name.startswith("ddp") else 8)


def test_every_diff_is_compared() -> None:
    assert set(DIFFS) == {"ddp", "ddp-gpt", "gan", "vae", "accelerate", "fabric", "trainer"}
    diffs = [b for b in blocks(PORTING.read_text()) if b.language == "diff"]
    assert len(diffs) == len(DIFFS)
