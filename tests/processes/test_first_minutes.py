"""The first scripts of a newcomer, as processes with default options: what they print."""

import re
from pathlib import Path

import pytest

from helpers.launched import Sandbox
from helpers.markdown import blocks
from helpers.source import ROOT

TOY = """
import torch
from evener import Ddp

model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.tensor([[1.0], [2.0], [3.0]]).repeat(80, 1)
with Ddp.setup(model, optimizer, devices="cpu") as ddp:
    for features, targets in ddp.loader(torch.utils.data.TensorDataset(x, 2 * x), batch_size=4):
        ddp.backward(torch.nn.functional.mse_loss(model(features), targets))
        ddp.step()
    if ddp.is_main_process:
        print(f"the factor is {model.weight.item():.4f} after {ddp.window} batches")
"""


@pytest.fixture
def sandbox(tmp_path: Path):
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def test_a_toy_ends_with_its_result_and_no_warning(sandbox: Sandbox) -> None:
    """A second rank costs more than it brings, by milliseconds in all: nobody wants to know."""
    ended = sandbox.evener("launch", "--nproc", 2, sandbox.script(TOY)).end()
    assert (ended.code, ended.out) == (0, "the factor is 2.0000 after 60 batches\n"), ended.err
    assert "warning" not in ended.err


def test_the_script_of_the_readme_does_the_same_on_two_ranks(sandbox: Sandbox) -> None:
    text = (ROOT / "README.md").read_text()
    (block,) = (b for b in blocks(text) if b.note == ("file", "train.py"))
    script = sandbox.script(block.text)
    shown = re.search(r"^loss \S+ after \d+ steps; shares \[\d+, \d+\]$", text, re.MULTILINE)
    assert shown, "the README says what to expect"
    said = []
    for world_size in (1, 2):
        ended = sandbox.evener("launch", "--nproc", world_size, script).end()
        assert ended.code == 0, ended.err
        said.append(ended.out.strip())
    losses = [float(text.split()[1]) for text in (*said, shown[0])]
    assert losses[0] == pytest.approx(losses[1], abs=0.002)
    assert losses[0] == pytest.approx(losses[2], abs=0.02), "as shown, on other processors too"
    assert said[0].endswith("shares [1024]")
    assert min(map(int, re.findall(r"\d+", said[1].partition("[")[2]))) > 0, said[1]
