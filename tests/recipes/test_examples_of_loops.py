"""What README.md and docs/ show of a loop runs as it stands on three ranks.

Nothing is fixed here that a user would leave open: no shares, devices or time-outs. All other
examples are run by ``tests/contracts/test_documents.py``.
"""

import runpy
from pathlib import Path

import pytest

from helpers.classification import NEEDED
from helpers.forking import Zygote
from helpers.markdown import Block, blocks, is_example, is_example_of_a_loop
from helpers.ranks import Rank, run_ranks
from helpers.source import ROOT, tracked_files

EXAMPLES = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{block.line}")
    for path in tracked_files()
    if path.suffix == ".md" and path.parent in (ROOT, ROOT / "docs")
    for block in blocks(path.read_text())
    if is_example(block) and is_example_of_a_loop(block)
]


def run_script(rank: Rank, folder: str, text: str) -> None:
    """Runs a script in this rank's process, where nobody else's files are."""
    path = Path(folder) / f"rank-{rank.rank}"
    path.mkdir()
    (path / "script.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        runpy.run_path("script.py", run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_of_a_loop(example: Block, tmp_path: Path) -> None:
    assert example.note[0] != "continues", "each stands alone"
    if "Trainer" in example.text or "Pipeline" in example.text:
        Zygote.get().preload(*NEEDED)
    run_ranks(run_script, 3, str(tmp_path), example.text)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 7
