"""A damaged checkpoint is named and skipped, the one before is used, and nothing is half-loaded."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from evener import CheckpointError, Ddp
from evener.comm.base import Communicator
from helpers.tampering import forge
from helpers.teams import run_team, setup

DATA = [torch.tensor([float(n), 1.0]) for n in range(16)]


class Ema:
    """An average of the user's, which is part of the checkpoint."""

    def __init__(self) -> None:
        self.values = [0.0]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "mean": torch.ones(2)}

    def load_state_dict(self, state: Any) -> None:
        assert state["mean"].shape == (2,)
        self.values = [float(value) for value in state["values"]]


@contextmanager
def team(steps: int = 6, communicator: Communicator | None = None) -> Iterator[tuple[Ddp, Any]]:
    """A small model with all that a checkpoint can hold, and a function that trains it."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    with setup(communicator or Communicator(), model, optimizer, schedule) as ddp:
        ddp.register("ema", Ema())
        loader = ddp.loader(DATA, batch_size=4, max_steps=steps)

        def train() -> None:
            for epoch in range(3):
                for batch in loader.epoch(epoch):
                    ddp.backward(model(batch).square().mean())
                    ddp.step()

        yield ddp, train


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run, step-4 and step-6."""
    folder = tmp_path_factory.mktemp("pristine")
    for steps in (4, 6):
        with team(steps) as (ddp, train):
            if steps == 6:
                ddp.load(folder)
            train()
            ddp.save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-6"]
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


def weights(ddp: Ddp) -> dict[str, list[Any]]:
    return {name: value.tolist() for name, value in ddp.assembly.model.state_dict().items()}


def state(key: str, value: Any) -> Callable[[Path], None]:
    """Replaces a part of the document of a checkpoint's state."""

    def tamper(checkpoint: Path) -> None:
        document = json.loads((checkpoint / "state.json").read_bytes())
        forge(checkpoint, "state.json", json.dumps({**document, key: value}).encode())

    return tamper


def tensors(stem: str, change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Changes the tensors of a checkpoint."""

    def tamper(checkpoint: Path) -> None:
        found = load_file(checkpoint / f"{stem}.safetensors")
        change(found)
        forge(checkpoint, f"{stem}.safetensors", save(found, metadata={"format": "pt"}))

    return tamper


def shorten(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda found: found.update({name: found[name][:1].contiguous()})


lacks_a_weight = tensors("model", lambda found: found.pop("0.weight"))


#: What stands in the place of step-6, which is moved elsewhere -> the step that is then loaded.
NO_FOLDERS: dict[str, tuple[Callable[[Path, Path], object], int]] = {
    "a link to it": (Path.symlink_to, 6),
    "a link to itself": (lambda place, _: place.symlink_to(place), 4),
    "a FIFO": (lambda place, _: os.mkfifo(place), 4),
}


@pytest.mark.parametrize("kind", NO_FOLDERS)
def test_what_stands_in_the_place_of_a_checkpoint_is_replaced_by_the_next_save(
    kind: str, folder: Path
) -> None:
    place, (make, step) = folder / "step-6", NO_FOLDERS[kind]
    elsewhere = place.rename(folder.parent / "elsewhere")
    make(place, elsewhere)
    with team() as (ddp, train):
        ddp.load(folder)
        assert ddp.window == step
        train()
        ddp.save(folder)
    assert names_of(folder) == ["step-4", "step-6"]
    assert not place.is_symlink()
    with team() as (ddp, _):
        ddp.load(place)
    assert names_of(elsewhere) == names_of(place)  # what a link led to is somebody else's


#: What does not belong to the model or optimizer of this script is refused, and not passed over.
MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "another shape": (tensors("model", shorten("0.weight")), "'0.weight' is of shape"),
    "a weight that is missing": (lacks_a_weight, "'0.weight' is missing there"),
    "another number of optimizers": (state("optimizers", []), "optimizer 0 is missing there"),
    "a moment of another shape": (
        tensors("training", shorten("optimizers.0.state.0.exp_avg")),
        "state.0.exp_avg of optimizer 0 has the shape",
    ),
    "no schedulers": (state("schedule", []), "schedulers is 0 there and 1 here"),
    "another policy": (state("planner", {"policy": "x"}), "policy='x'"),
    "an average of the user's": (state("registered", {}), "no state of 'ema'"),
    "one that the user refuses": (state("registered", {"ema": {}}), "refused by its"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_loaded(
    kind: str, folder: Path
) -> None:
    damage, why = MISFITS[kind]
    damage(folder / "step-6")
    with team() as (ddp, train):
        before = weights(ddp)
        with pytest.raises(CheckpointError, match=why):
            ddp.load(folder)
        assert weights(ddp) == before
        assert ddp.window == 0
        train()
        assert ddp.window == 6


def test_what_one_rank_refuses_no_rank_loads(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    shutil.rmtree(other / "step-4")
    lacks_a_weight(other / "step-6")

    def body(comm: Communicator) -> bool:
        with team(communicator=comm) as (ddp, _):
            before = weights(ddp)
            with pytest.raises(CheckpointError, match=r"'0\.weight' is missing there"):
                ddp.load(other if comm.rank else folder)
            return weights(ddp) == before

    assert run_team(2, body) == [True, True]


# ── whatever is in it ────────────────────────────────────────────────────────────────────────────


def names_of(checkpoint: Path) -> list[str]:
    return sorted(path.name for path in checkpoint.iterdir())
