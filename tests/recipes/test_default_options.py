"""What the documents and recipes show works as it stands on one, two and three ranks.

Nothing is fixed here that a user would leave open: no shares, devices or time-outs. What is printed
or compared with plain PyTorch is checked elsewhere.
"""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

from helpers.classification import NEEDED
from helpers.forking import Zygote
from helpers.markdown import Block, blocks, is_example, is_example_of_a_loop
from helpers.ranks import Rank, run_ranks
from helpers.recipes import RECIPES, lines_of_team, output_of_ranks
from helpers.source import ROOT, tracked_files

WORLD_SIZES = (1, 2, 3)
LAUNCHED = ["gan_manual", "image_classification", "local_sgd", "log_to_your_tracker"]
LAUNCHED += ["own_dataloader", "quickstart", "reinforce_manual", "uneven_devices"]
#: Those in which the main rank prints, whichever that is; in the others rank 0 does.
FOLLOW_MAIN = ["local_sgd", "log_to_your_tracker", "own_dataloader", "quickstart", "uneven_devices"]
#: Recipe -> what it writes, where that would be the user's own folder.
OUTPUTS = {"image_classification": "runs", "log_to_your_tracker": "log.jsonl"}


def examples() -> list[tuple[str, Block]]:
    """The scripts of README.md and docs/ that train, each with its place."""
    found = []
    for path in tracked_files():
        if path.suffix != ".md" or path.parent not in (ROOT, ROOT / "docs"):
            continue
        found += [
            (f"{path.relative_to(ROOT)}:{block.line}", block)
            for block in blocks(path.read_text())
            if is_example(block)
        ]
    return found


EXAMPLES = examples()
MANAGED = [(place, block) for place, block in EXAMPLES if not is_example_of_a_loop(block)]
ON_TWO = [(place, block) for place, block in MANAGED if '["cpu", "cpu"]' in block.text]
OWN_LOOP = [(place, block) for place, block in EXAMPLES if is_example_of_a_loop(block)]


def run_script(rank: Rank, folder: str, text: str) -> None:
    """Runs a script in this rank's process, where nobody else's files are."""
    path = Path(folder) / f"rank-{rank.rank}"
    path.mkdir()
    (path / "script.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        runpy.run_path("script.py", run_name="__main__")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("example", OWN_LOOP, ids=lambda example: example[0])
def test_an_example_of_a_loop(example: tuple[str, Block], world_size: int, tmp_path: Path) -> None:
    if "Trainer" in example[1].text or "Pipeline" in example[1].text:
        Zygote.get().preload(*NEEDED)
    run_ranks(run_script, world_size, str(tmp_path), example[1].text)


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("example", ON_TWO, ids=lambda example: example[0])
def test_an_example_of_a_managed_run(
    example: tuple[str, Block], num_workers: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """The script starts its workers itself: as many as it has devices.

    As they stand, ``tests/contracts/test_documents.py`` runs all of them.
    """
    text = example[1].text.replace('["cpu", "cpu"]', repr(["cpu"] * num_workers))
    (tmp_path / "script.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path("script.py", run_name="__main__")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_recipe(name: str, world_size: int, tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path / OUTPUTS[name])] if name in OUTPUTS else []
    texts = output_of_ranks(RECIPES / f"{name}.py", *arguments, world_size=world_size)
    assert lines_of_team(texts)
    if name not in FOLLOW_MAIN:
        assert texts[1:] == [""] * (world_size - 1)


@pytest.mark.parametrize(  # 2: test_managed.py
    "num_workers", [pytest.param(1, marks=pytest.mark.long), 3]
)
def test_the_managed_recipe(num_workers: int, tmp_path: Path, monkeypatch: Any) -> None:
    words = ["--smoke", "--devices", str(num_workers), "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["managed.py", *words])
    runpy.run_path(str(RECIPES / "managed.py"), run_name="__main__")


def test_every_recipe_and_example_is_run() -> None:
    assert {path.stem for path in RECIPES.glob("*.py")} == {*LAUNCHED, "managed"}
    assert len(OWN_LOOP) >= 7
    assert len(MANAGED) >= 2
    assert ON_TWO
    for _, block in EXAMPLES:
        ast.parse(block.text)  # each stands alone: none continues the one before
        assert block.note[0] != "continues"
