"""Runs the command ``evener`` as a user does."""

import os
import subprocess
import sys
from pathlib import Path

from evener.observe.following import read_events

RUN_TIMEOUT_S = 300.0


def command_line() -> list[str]:
    """Return the command ``evener`` of this Python."""
    return [sys.executable, "-P", "-m", "evener"]


def clean_environment() -> dict[str, str]:
    """Return the environment without a number of threads, which evener chooses by itself."""
    return {k: v for k, v in os.environ.items() if k not in {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}}


def pretrain(folder: Path, *arguments: str, name: str) -> list[tuple[str, float]]:
    """Run ``evener pretrain`` into ``folder/name``; return its events by type and unix seconds.

    Raises:
        RuntimeError: It failed; holds its output.
    """
    command = [*command_line(), "pretrain", *arguments, "--out", str(folder), "--name", name]
    done = subprocess.run(
        command,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    events = read_events(folder / name / "events.jsonl")
    return [(str(event["type"]), float(event["t"])) for event in events]
