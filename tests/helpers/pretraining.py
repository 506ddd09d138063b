"""Tiny pretraining runs: text, configuration, ways to start them, and to wait for what they do.

``Lab`` is a folder with text and a configuration. ``lab.command(...)`` starts ``evener pretrain``
as users do, in processes of its own. ``lab.run(...)`` runs the same command line on forked ranks,
which saves the seconds that importing transformers takes: for all that is not about processes.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from evener.observe.events import FIELDS
from evener.observe.following import read_events
from helpers.forking import Zygote
from helpers.launched import Running, Sandbox
from helpers.limits import wait_until
from helpers.ranks import Rank, RankTeam

#: Hard limit for a whole run; it takes seconds, but others may use the same cores.
RUN_TIMEOUT_S = 120.0

#: What a rank imports before it can do anything.
NEEDED = ("evener.cli", "evener.tasks.causal_lm", "transformers.models.llama.modeling_llama")

LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
LLAMA = {**LAYER, "num_attention_heads": 2, "num_key_value_heads": 2}

#: Sizes divide nothing: 60 samples make 9 windows an epoch, the last one of 4 samples.
TINY: dict[str, Any] = {
    "data": {"path": "corpus", "seq_len": 32, "heldout_fraction": 0.2},
    "model": {"config": LLAMA},
    "batch_size": 7,
    "micro_batch_size": 3,
    "epochs": 2,
    "eval": {"every": 4},
    "checkpoint": {"every": 2, "keep_last": 4},
    "sample": {"num_tokens": 8},
}
NUM_SAMPLES = 60
WINDOWS_PER_EPOCH = 9
NUM_WINDOWS = 18

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def write_corpus(folder: Path, num_files: int = 12, *, seed: int = 1) -> None:
    """Text files of a few lines each, the same for the same seed."""
    draw = random.Random(seed)
    folder.mkdir(parents=True)
    for number in range(num_files):
        lines = [" ".join(draw.choices(WORDS, k=8)) for _ in range(3 + number % 4)]
        (folder / f"doc{number:02}.txt").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a run on forked ranks ended; texts and codes by rank."""

    codes: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def said(self) -> str:
        """What rank 0 printed."""
        return self.outputs[0]


@dataclass(frozen=True)
class RunFolder:
    """What a run leaves on disk."""

    path: Path

    @property
    def events(self) -> list[dict[str, Any]]:
        """All its events, which have the fields of their types, each of its kind."""
        skipped: list[str] = []
        events = read_events(self.path / "events.jsonl", lambda _, why: skipped.append(why))
        # A killed process may have torn a line.
        assert all("Invalid JSON" in why for why in skipped), skipped
        assert {event["type"] for event in events} <= FIELDS.keys()
        return events

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """Its events of one type."""
        return [event for event in self.events if event["type"] == kind]

    @property
    def checkpoints(self) -> list[Path]:
        """Its checkpoints, the oldest first."""
        found = (self.path / "checkpoints").glob("step-*")
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    @property
    def summary(self) -> dict[str, Any]:
        """What is in summary.json, with no multiple that cannot be."""
        document = yaml.safe_load((self.path / "summary.json").read_text())
        assert isinstance(document, dict)
        assert document["of_ideal"] is None or document["of_ideal"] <= 1.05
        return document

    def contents(self) -> dict[str, bytes]:
        """Every file and its bytes: equal before and after where nothing may be touched."""
        files = [path for path in self.path.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.path)): path.read_bytes() for path in sorted(files)}


@dataclass
class Lab:
    """A folder with a corpus and a configuration, and the runs in it."""

    folder: Path
    sandbox: Sandbox = field(init=False)

    def __post_init__(self) -> None:
        self.sandbox = Sandbox(self.folder)
        write_corpus(self.folder / "corpus")
        self.configure()

    def configure(self, name: str = "run.yaml", **changes: Any) -> Path:
        """Writes a configuration: ``TINY`` with some keys changed, ``None`` removes one."""
        document = {**TINY, **changes}
        path = self.folder / name
        path.write_text(yaml.safe_dump({k: v for k, v in document.items() if v is not None}))
        return path

    def path_of(self, name: str = "run") -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.folder / "runs" / name)

    def command(self, *arguments: object) -> Running:
        """Starts ``evener pretrain ARGUMENTS``."""
        return self.sandbox.evener("pretrain", *arguments)

    def run(self, *arguments: object, nproc: int = 1, expected: int | None = 0) -> Finished:
        """Runs ``evener pretrain ARGUMENTS`` on forked ranks.

        Args:
            *arguments: As on the command line, but for --nproc.
            nproc: Ranks.
            expected: Exit code that every rank must end with; ``None`` takes any.
        """
        with self.team(*arguments, nproc=nproc) as team:
            outcomes = team.wait(RUN_TIMEOUT_S)
        assert all(outcome.returned for outcome in outcomes), "\n".join(
            outcome.story() for outcome in outcomes
        )
        finished = Finished(
            codes=tuple(outcome.value for outcome in outcomes),
            outputs=tuple(outcome.output for outcome in outcomes),
        )
        if expected is not None:
            assert set(finished.codes) == {expected}, "\n".join(o.story() for o in outcomes)
        return finished

    def team(self, *arguments: object, nproc: int = 1) -> RankTeam:
        """Starts ``evener pretrain ARGUMENTS`` on forked ranks."""
        Zygote.get().preload(*NEEDED)
        command = ["pretrain", *map(str, arguments)]
        return RankTeam(be_evener, nproc, str(self.folder), command)

    def close(self) -> None:
        """Ends what still runs."""
        self.sandbox.close()


def be_evener(rank: Rank, folder: str, command: Sequence[str]) -> int:
    """What a rank's process does when evener's launcher has started it; returns its exit code."""
    from evener.cli import main

    os.chdir(folder)
    os.environ["EVENER_PARENT_PID"] = str(os.getppid())
    return main(command)


# ── waiting ──────────────────────────────────────────────────────────────────────────────────────


def wait_for_events(run: RunFolder, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Waits until the events of a run fulfil a condition."""
    file = run.path / "events.jsonl"
    wait_until(lambda: file.exists() and condition(read_events(file)), RUN_TIMEOUT_S)


# ── judging ──────────────────────────────────────────────────────────────────────────────────────


def refused(lab: Lab, *arguments: object, code: int = 1, nproc: int = 1) -> str:
    """What rank 0 says when it refuses to run: one line, without a traceback."""
    finished = lab.run(*arguments, nproc=nproc, expected=None)
    assert finished.codes[0] == code, finished.said
    assert "Traceback" not in finished.said
    (error,) = [line for line in finished.said.splitlines() if line.startswith("error: ")]
    assert error == finished.said.splitlines()[-1]
    return error


def relative_difference(first: Path, second: Path, file: str = "model.safetensors") -> float:
    """2-norm of the difference of two folders' parameters, relative to that of the first."""
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / file) for path in (first, second))
    assert ours.keys() == theirs.keys()
    squared = sum(float(((ours[k].astype("f8") - theirs[k]) ** 2).sum()) for k in ours)
    norm = sum(float((ours[k].astype("f8") ** 2).sum()) for k in ours)
    return float((squared / norm) ** 0.5)
