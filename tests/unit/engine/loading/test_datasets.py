"""Hugging Face data sets in a loop of one's own, and loading a checkpoint with other data."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.errors import CheckpointError
from helpers.teams import run_team, setup

LOCK = threading.Lock()
SAMPLES, BATCH = 23, 5


def table(format_: str | None) -> Dataset:
    draw = torch.Generator().manual_seed(5)
    columns = {
        "id": list(range(SAMPLES)),
        "x": torch.randn(SAMPLES, 4, generator=draw).tolist(),
        "label": [k % 3 for k in range(SAMPLES)],
        "text": [f"number {k}" for k in range(SAMPLES)],
    }
    return Dataset.from_dict(columns).with_format(format_)


def network() -> nn.Module:
    with LOCK:
        torch.manual_seed(0)
        return nn.Linear(4, 3)


def x_of(batch: dict[str, Any]) -> Tensor:
    # Without a format a sample holds plain lists, which collate to a list of columns, as in torch.
    return batch["x"] if isinstance(batch["x"], Tensor) else torch.stack(batch["x"], 1).float()


def train(
    comm: Communicator, dataset: Dataset, **options: Any
) -> tuple[Tensor, list[int], list[str]]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids: list[int] = []
    texts: list[str] = []
    shares = (3.0, 1.0)[: comm.world_size]
    with setup(comm, model, optimizer, shares=shares) as ddp:
        loader = ddp.loader(dataset, batch_size=BATCH, micro_batch_size=2, **options)
        assert len(loader) == -(-SAMPLES // BATCH)
        for batch in loader.epoch(0):
            ids += batch["id"].tolist()
            texts += batch["text"]
            ddp.backward(nn.functional.cross_entropy(model(x_of(batch)), batch["label"]))
            ddp.step()
        parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return parameters, ids, texts


@pytest.mark.parametrize("format_", [None, "torch"])
@pytest.mark.parametrize("options", [{}, {"prefetch": "thread"}], ids=["inline", "thread"])
def test_a_hugging_face_dataset_is_a_map_style_data_set(
    format_: str | None, options: dict[str, Any]
) -> None:
    dataset = table(format_)
    alone, ids, texts = train(Communicator(), dataset)
    assert sorted(ids) == list(range(SAMPLES))
    assert texts == [f"number {k}" for k in ids]
    team = run_team(2, lambda comm: train(comm, dataset, **options))
    assert Counter(k for _, seen, _ in team for k in seen) == Counter(range(SAMPLES))
    assert len(team[0][1]) > len(team[1][1]) > 0
    for parameters, _, _ in team:
        torch.testing.assert_close(parameters, alone, rtol=1e-5, atol=1e-6)


# ── going on with other data ─────────────────────────────────────────────────────────────────────


def session(
    folder: Path, num_samples: int, windows: int, *, seed: int = 0, before: bool = True, **load: Any
) -> list[int]:
    """Trains for so many windows, after loading if that is wanted; saves; returns what was seen."""
    model = network()
    seen: list[int] = []
    with setup(Communicator(), model, torch.optim.AdamW(model.parameters())) as ddp:
        dataset = table("torch").select(range(num_samples))
        if load and before:
            ddp.load(folder, **load["load"])
        loader = ddp.loader(dataset, batch_size=BATCH, seed=seed, max_steps=windows)
        if load and not before:
            ddp.load(folder, **load["load"])
        for epoch in range(9):
            for batch in loader.epoch(epoch):
                seen += batch["id"].tolist()
                ddp.backward(model(batch["x"]).square().mean())
                ddp.step()
        ddp.save(folder)
        assert ddp.window == windows
    return seen


@pytest.mark.parametrize("before", [True, False], ids=["before the loader", "after it"])
def test_another_size_or_seed_is_refused_by_name_unless_allowed(
    tmp_path: Path, before: bool
) -> None:
    session(tmp_path, 20, 2)
    for change, name in (({"num_samples": 15}, "num_samples=20"), ({"seed": 1}, "seed=0")):
        arguments: dict[str, Any] = {"num_samples": 20, **change}
        with pytest.raises(
            CheckpointError, match=rf"has .*{name}.* this run has .*allow=\(\"data\",\)"
        ):
            session(tmp_path, windows=5, before=before, load={}, **arguments)
    seen = session(tmp_path, 15, 5, before=before, load={"allow": ("data",)})
    assert sorted(seen) == list(range(15))  # all of it, from its beginning
    # What does not differ goes on where it was, whatever is allowed.
    rest = session(tmp_path, 15, 6, before=before, load={"allow": ("data",)})
    assert len(rest) == BATCH
