"""Ports of public scripts: defaults, three ranks, one of them slow; one is started as users do it.

Each must end, and end as on one rank; its counters, which are the user's own code, must have seen
each sample once. The slow rank is emulated.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.data.order import Permutation
from evener.engine.emulate import EMULATE_SLOW
from helpers.limits import PATIENCE_S
from helpers.ranks import Rank, be_script, run_ranks, run_ranks_to_end

SCRIPTS = Path(__file__).parent / "ported"
#: Sums of float64 in another order, magnified by some twenty steps of Adam.
TOLERANCE = 1e-8

Results = list[dict[str, Any]]


def run_alone(_: Rank, name: str, folder: str) -> dict[str, Any]:
    sys.argv = [name, "--out", folder]
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    results: dict[str, Any] = torch.load(Path(folder) / "rank-0.pt")
    return results


def launch_three(name: str, folder: Path) -> Results:
    """What each rank's script has left, by rank."""
    launcher = ["-m", "evener", "launch", "--nproc", "3", "--emulate-slow", "2:4"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPTS / f"{name}.py"), "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return results_of_three(folder, done.stderr)


def fork_three(name: str, folder: Path) -> Results:
    """As ``launch_three``, on ranks that need not import torch."""
    env = {EMULATE_SLOW: "2:4"}
    command = [str(SCRIPTS / f"{name}.py"), "--out", str(folder)]
    ranks = run_ranks_to_end(be_script, 3, *command, env=env)
    said = "\n".join(rank.story() for rank in ranks)
    assert [rank.value for rank in ranks] == [0] * 3, said
    return results_of_three(folder, said)


def results_of_three(folder: Path, said: str) -> Results:
    assert "emulated 4x slower" in said
    assert "Warning" not in said
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(3)]


def compare(
    name: str, tmp_path: Path, num_samples: int, *, as_users: bool = False
) -> tuple[dict[str, Any], Results]:
    """Runs a script on one rank and on three; checks samples and parameters."""
    [alone] = run_ranks(run_alone, 1, name, str(tmp_path))
    team = launch_three(name, tmp_path) if as_users else fork_three(name, tmp_path)
    assert alone["samples"] == alone["progress"] == num_samples
    assert sum(rank["samples"] for rank in team) == num_samples
    assert [rank["progress"] for rank in team] == [num_samples] * 3
    for rank in team[1:]:
        assert torch.equal(rank["parameters"], team[0]["parameters"])
    return alone, team


def difference(alone: dict[str, Any], team: Results) -> float:
    expected = alone["parameters"]
    return float((team[0]["parameters"] - expected).norm() / expected.norm())


def told_by_any(team: Results, name: str) -> dict[int, float]:
    """Figures by window, as those ranks have them that were there; they must agree."""
    figures: dict[int, float] = {}
    for rank in team:
        figures |= rank[name]
    for rank in team:
        assert rank[name].items() <= figures.items()
    return figures


def test_a_gan(tmp_path: Path) -> None:
    alone, team = compare("gan", tmp_path, 3 * 203, as_users=True)
    assert difference(alone, team) <= TOLERANCE
    # `i == 0` is true once an epoch on a rank that had work in it.
    for rank in team:
        assert min(rank["samples"], 1) <= rank["first batches"] <= 3


def test_a_cnn_with_batch_norm_and_meters(tmp_path: Path) -> None:
    """Parameters differ from those of one rank: BatchNorm sees the local micro-batch."""
    alone, team = compare("cnn_meters", tmp_path, 3 * 209)
    for rank in team:
        assert rank["best_acc1"] == team[0]["best_acc1"]
        assert rank["losses"] == team[0]["losses"]
        assert torch.equal(rank["statistics"], team[0]["statistics"])
    for epoch in range(3):
        # Each window is counted by one rank, which main rank there is; each sample by its own.
        assert sum(rank["counts"][epoch][0] for rank in team) == 209
        assert sum(rank["counts"][epoch][1] for rank in team) == 209
    assert alone["losses"][2] < alone["losses"][0] / 2
    assert team[0]["losses"][2] < team[0]["losses"][0] / 2
    assert alone["best_acc1"] > 0.9
    assert team[0]["best_acc1"] > 0.9


def test_a_gpt_with_accumulation_and_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    alone, team = compare("gpt", tmp_path, 156 + 156 + 2 * 24)
    assert difference(alone, team) <= TOLERANCE
    assert [rank["steps"] for rank in (alone, *team)] == [16] * 4
    # A parked rank is told nothing of windows, and any rank may be parked.
    assert told_by_any(team, "rates") == alone["rates"]
    assert told_by_any(team, "evaluations") == pytest.approx(alone["evaluations"], rel=TOLERANCE)
    assert max(alone["rates"].values()) == alone["rates"][5] == pytest.approx(1e-2)
    assert list(alone["rates"]) == list(range(1, 17))


def test_a_classifier_with_f1(tmp_path: Path) -> None:
    alone, team = compare("classifier_f1", tmp_path, 4 * 301)
    assert difference(alone, team) <= TOLERANCE
    for rank in team:
        assert torch.equal(rank["target"], alone["target"])
        assert torch.equal(rank["predicted"], alone["predicted"])
        assert rank["scores"] == alone["scores"]
    valid = runpy.run_path(str(SCRIPTS / "classifier_f1.py"))["reviews"](101, 2)
    assert alone["target"].tolist() == [label for _, label in valid]  # in the data set's order
    assert alone["scores"][-1] > 0.5


@pytest.mark.parametrize(
    ("world_size", "ratios"),
    [(1, None), (2, None), (3, None), (3, [3, 0, 1])],
    ids=["1 rank", "2 ranks", "3 ranks", "a rank without a share"],
)
def test_a_diffusion_model_with_an_average_of_its_weights(
    world_size: int, ratios: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    plain = runpy.run_path(str(SCRIPTS / "diffusion_plain.py"))
    size = plain["NUM_SAMPLES"]
    orders = [Permutation(size, 0, epoch) for epoch in range(plain["EPOCHS"])]
    default = torch.get_default_dtype()
    try:
        expected = plain["train"]([order[p] for p in range(size)] for order in orders)
    finally:
        torch.set_default_dtype(default)
    options = ["--out", str(tmp_path), "--ratios", json.dumps(ratios)]
    ranks = run_ranks_to_end(be_script, world_size, str(SCRIPTS / "diffusion.py"), *options)
    assert [rank.value for rank in ranks] == [0] * world_size, ranks[0].story()
    for rank in range(world_size):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        assert found["updates"] == plain["EPOCHS"] * 4
        for name, theirs in expected.items():
            ours = found[name]
            assert float((ours - theirs).norm() / theirs.norm()) <= 1e-12, (rank, name)
