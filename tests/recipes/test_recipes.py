"""Every recipe runs, is short, and needs nothing but evener and torch."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.limits import PATIENCE_S
from helpers.pretraining import RunFolder
from helpers.recipes import RECIPES, lines_of_team, new_lines, output, output_of_ranks
from helpers.source import ROOT, tracked_files

ALL = [path for path in tracked_files() if path.is_relative_to(RECIPES) and path.suffix == ".py"]
MAX_LINES = 250


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ── all of them ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ALL, ids=relative)
def test_a_recipe_is_short_and_stands_alone(path: Path) -> None:
    assert (RECIPES / path.name).exists(), "a plain twin has a recipe"
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    tree = ast.parse(text)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
            is_private = (node.module or "").startswith("evener.") and node.module != "evener.ray"
            assert not is_private
    needed = {"ray"} if path.stem == "on_ray" else set()
    assert imported <= {"evener", "torch"} | needed | sys.stdlib_module_names
    assert ("evener" in imported) == (path.parent == RECIPES)
    assert "--smoke" in text
    assert relative(path) in (ast.get_docstring(tree) or ""), "how to start it"


# ── one by one ───────────────────────────────────────────────────────────────────────────────────


def test_quickstart_learns_as_its_plain_twin_does() -> None:
    plain = output(RECIPES / "plain" / "quickstart.py")
    texts = output_of_ranks(RECIPES / "quickstart.py")
    for lines in (plain.splitlines(), lines_of_team(texts)):
        (line,) = lines
        (accuracy,) = re.findall(r"epoch 0: accuracy ([\d.]+)%", line)
        assert float(accuracy) > 30  # of ten classes, after 24 steps


def test_own_dataloader_prints_what_its_plain_twin_prints() -> None:
    """Its sampler prescribes the order, so the same words are in the same batches."""
    # Worker processes leave their signal handler behind: a process of its own.
    (plain,) = output_of_ranks(RECIPES / "plain" / "own_dataloader.py", world_size=1)
    texts = output_of_ranks(RECIPES / "own_dataloader.py")
    lines = sorted(lines_of_team(texts))  # by epoch
    losses = [float(loss) for loss in re.findall(r"last loss ([\d.]+)", plain)]
    assert losses[1] < losses[0] / 2
    assert len(lines) == len(plain.splitlines())
    found = [float(loss) for loss in re.findall(r"last loss ([\d.]+)", "\n".join(lines))]
    assert found == pytest.approx(losses, rel=1e-3)  # AdamW magnifies roundings


def test_uneven_devices_compares_three_ways_to_the_same_loss() -> None:
    told = lines_of_team(output_of_ranks(RECIPES / "uneven_devices.py"))
    ways = {line.split("  ")[0]: line for line in told}
    lines = [ways.pop(way) for way in ("equal shares", "measured", "with a hint")]
    assert not ways
    # Others are what is measured, which depends on who else uses the cores; a hint goes before
    # that for the first windows only.
    assert re.findall(r"rank 0 does (\d+)%", lines[0]) == ["50"]
    losses = [float(re.findall(r"loss ([\d.]+)", line)[0]) for line in lines]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "arguments"), [("gan_manual.py", ["--shares", "3,1"]), ("reinforce_manual.py", [])]
)
def test_recipes_by_hand_print_what_plain_pytorch_prints(name: str, arguments: list[str]) -> None:
    plain = output(RECIPES / "plain" / name)
    first, second = output_of_ranks(RECIPES / name, *arguments)
    assert (first.count("\n"), second) == (10, "")
    # Four digits are printed; Adam amplifies the last bits of the first steps a little.
    told, expected = (re.findall(r"\d+(?:\.\d+)?", text) for text in (first, plain))
    assert [*map(float, told)] == pytest.approx([*map(float, expected)], rel=2e-3)


def test_managed_learns_and_saves(tmp_path: Path) -> None:
    printed = output(RECIPES / "managed.py", "--devices", "2", "--out", str(tmp_path))
    lines = printed.splitlines()
    epochs = [re.findall(r"-?\d+(?:\.\d+)?", line) for line in lines if "epoch" in line]
    assert [numbers[0] for numbers in epochs] == ["0", "1", "2"]
    losses = [float(numbers[1]) for numbers in epochs]
    assert losses[2] < losses[1] < losses[0]
    assert float(epochs[2][3]) > 80, "of the characters of new sequences; 14 is guessing"
    assert lines[-1].startswith("57 steps")
    assert "rnn.weight_ih_l0" in torch.load(tmp_path / "last.pt")


def test_local_sgd_exchanges_less_often_and_still_learns() -> None:
    told = lines_of_team(output_of_ranks(RECIPES / "local_sgd.py"))
    policies = {line.split()[0]: line for line in told}
    lines = [policies.pop(policy) for policy in ("sync", "cadence", "async")]
    assert not policies
    windows = [int(re.findall(r"in (\d+) windows", line)[0]) for line in lines]
    assert windows[0] == 2 * 4096 // 64
    assert max(windows[1:]) < windows[0]
    assert all(" 8192 samples " in line for line in lines)
    losses = [float(re.findall(r"held-out loss ([\d.]+)", line)[0]) for line in lines]
    assert max(losses) < 10  # the variance of the targets is 14


def test_log_to_your_tracker_writes_what_every_rank_did(tmp_path: Path) -> None:
    out = tmp_path / "logs" / "rings.jsonl"
    script = RECIPES / "log_to_your_tracker.py"
    launch = [sys.executable, "-m", "evener", "launch", "--nproc", "2"]
    done = subprocess.run(
        [*launch, str(script), "--smoke", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (accuracy,) = re.findall(rf"48 windows logged to {out}, accuracy ([\d.]+)%", done.stdout)
    assert float(accuracy) > 60
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    windows = [line for line in lines if "loss" in line]
    assert len(windows) == 48
    assert [line["step"] for line in windows] == [256 * k for k in range(1, 49)]
    assert all(line["rank_0/samples"] + line["rank_1/samples"] == 256 for line in windows)
    assert windows[-1]["loss"] < windows[0]["loss"] / 2
    # Whoever logs: what follows an epoch of 16 windows comes after them.
    assert [i for i, line in enumerate(lines) if "accuracy" in line] == [16, 33, 50]


def test_image_classification_runs_on_the_driver_on_unequal_ranks(tmp_path: Path) -> None:
    script = RECIPES / "image_classification.py"
    assert len(script.read_text().splitlines()) <= 120
    launch = [sys.executable, "-m", "evener", "launch", "--nproc", "2", "--emulate-slow", "1:3"]
    done = subprocess.run(
        [*launch, str(script), "--smoke", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    run = RunFolder(tmp_path / "pictures")
    assert run.summary["accuracy"] > 0.6  # of six classes
    assert run.summary["emulated"] == {"1": 3.0}
    assert {row["rank"]: row["samples"] > 0 for row in run.summary["ranks"]} == {0: True, 1: True}
    assert [event["window"] for event in run.of_type("eval")] == [40, 80, 96]
    assert [path.name for path in run.checkpoints] == ["step-0", "step-80", "step-96"]
    assert f"accuracy: {run.summary['accuracy']:.1%}\n" in done.stderr
    again = ["--smoke", "--resume", "--out", str(tmp_path)]  # it is complete: nothing to do
    assert output_of_ranks(script, *again, world_size=1) == [done.stdout]


@pytest.mark.ray
@pytest.mark.timeout(900)
def test_on_ray_reports_the_last_epoch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RECIPES / "on_ray.py"), "--smoke", "--out", str(tmp_path)],
        # Else everything else on these cores goes first, Ray writes to the user's folder, and it
        # uses the cluster of another test.
        env=os.environ
        | {"RAY_worker_niceness": "0", "HOME": str(tmp_path), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=5 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (loss,) = re.findall(r"^epoch 1: loss ([\d.]+) after 8192 samples$", done.stdout, re.MULTILINE)
    assert float(loss) < 0.9  # 1.1 is guessing
    assert [*tmp_path.glob("rings/checkpoint_*/manifest.json")]


# ── what porting takes ───────────────────────────────────────────────────────────────────────────


def test_porting_the_quickstart_takes_a_handful_of_lines() -> None:
    plain = (RECIPES / "plain" / "quickstart.py").read_text()
    ported = (RECIPES / "quickstart.py").read_text()
    assert new_lines(plain, ported) == [
        "from torch.utils.data import TensorDataset",
        "from evener import Ddp",
        "ddp = Ddp.setup(model, optimizer)",
        "device = ddp.device",
        "loader = ddp.loader(dataset, batch_size=256)",
        "for images, labels in loader.epoch(epoch):",
        "ddp.backward(loss)",
        "ddp.step()",
        "if ddp.is_main_process:",
        "ddp.close()",
    ]
