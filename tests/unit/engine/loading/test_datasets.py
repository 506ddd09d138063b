"""Hugging Face data sets in a loop of one's own, and loading a checkpoint with other data."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from evener.comm.base import Communicator
from evener.errors import CheckpointError
from helpers.loops import Numbered, flatten, linear, train
from helpers.teams import run_team, setup

SAMPLES, BATCH = 23, 5


@pytest.mark.parametrize("format_", [None, "torch"])
@pytest.mark.parametrize("options", [{}, {"prefetch": "thread"}], ids=["inline", "thread"])
def test_a_hugging_face_dataset_is_a_map_style_data_set(
    format_: str | None, options: dict[str, Any]
) -> None:
    rows = Numbered(SAMPLES).x.tolist()
    texts = [f"number {k}" for k in range(SAMPLES)]
    dataset = Dataset.from_dict({"id": list(range(SAMPLES)), "x": rows, "text": texts})
    dataset = dataset.with_format(format_)

    def body(comm: Communicator) -> tuple[Tensor, list[int]]:
        model, optimizer = linear()
        ids: list[int] = []
        with setup(comm, model, optimizer, shares=(3.0, 1.0)[: comm.world_size]) as ddp:
            loader = ddp.loader(dataset, batch_size=BATCH, micro_batch_size=2, **options)
            assert len(loader) == -(-SAMPLES // BATCH)
            for batch in loader.epoch(0):
                ids += batch["id"].tolist()
                assert batch["text"] == [texts[k] for k in batch["id"].tolist()]
                # Without a format a sample holds plain lists, which torch collates to columns.
                x = batch["x"] if format_ else torch.stack(batch["x"], 1).float()
                ddp.backward(model(x).square().mean())
                ddp.step()
        return flatten(model), ids

    alone, ids = body(Communicator())
    assert sorted(ids) == list(range(SAMPLES))
    team = run_team(2, body)
    assert Counter(k for _, seen in team for k in seen) == Counter(range(SAMPLES))
    assert len(team[0][1]) > len(team[1][1]) > 0
    for parameters, _ in team:
        torch.testing.assert_close(parameters, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", [True, False], ids=["before the loader", "after it"])
def test_another_size_or_seed_is_refused_by_name_unless_allowed(
    tmp_path: Path, before: bool
) -> None:
    def session(size: int, windows: int, seed: int = 0, load: Any = None) -> list[int]:
        """Trains for so many windows, after loading if that is wanted, and saves."""
        model, optimizer = linear()
        with setup(Communicator(), model, optimizer) as ddp:
            if load is not None and before:
                ddp.load(tmp_path, allow=load)
            loader = ddp.loader(Numbered(size), batch_size=BATCH, seed=seed, max_steps=windows)
            if load is not None and not before:
                ddp.load(tmp_path, allow=load)
            seen = train(ddp, loader, range(9))
            ddp.save(tmp_path)
            assert ddp.window == windows
        return seen

    session(20, 2)
    said = r"has .*{}.* this run has .*allow=\(\"data\",\)"
    with pytest.raises(CheckpointError, match=said.format("num_samples=20")):
        session(15, 5, load=())
    with pytest.raises(CheckpointError, match=said.format("seed=0")):
        session(20, 5, seed=1, load=())
    seen = session(15, 5, load=("data",))
    assert sorted(seen) == list(range(15))  # all of it, from its beginning
    # What does not differ goes on where it was, whatever is allowed.
    assert len(session(15, 6, load=("data",))) == BATCH
