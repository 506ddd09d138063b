"""Runs ``evener pretrain`` as a user does, and reads what it leaves."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.observe.following import read_events

RUN_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Run:
    """A finished run; ``began_t`` is when its command was started, in unix seconds."""

    began_t: float
    elapsed_s: float
    summary: dict[str, Any]
    events: list[dict[str, Any]]

    def until(self, kind: str, *, last: bool = False) -> float:
        """Seconds from the start of the command to the first event of a type, or the last."""
        times = [float(e["t"]) for e in self.events if e["type"] == kind]
        return times[-1 if last else 0] - self.began_t


def command_line() -> list[str]:
    """The command ``evener`` of this Python, also where it sees the packages of another one."""
    return [sys.executable, "-P", "-m", "evener"]


def clean_environment() -> dict[str, str]:
    """The environment without a number of threads, which evener chooses by itself."""
    return {k: v for k, v in os.environ.items() if k not in {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}}


def pretrain(folder: Path, *arguments: str, name: str) -> Run:
    """Runs ``evener pretrain`` into ``folder/name``; raises with its output when it fails."""
    command = [*command_line(), "pretrain", *arguments, "--out", str(folder), "--name", name]
    began_t, began_s = time.time(), time.perf_counter()
    done = subprocess.run(
        command,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    elapsed_s = time.perf_counter() - began_s
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return Run(
        began_t=began_t,
        elapsed_s=elapsed_s,
        summary=json.loads((folder / name / "summary.json").read_text()),
        events=read_events(folder / name / "events.jsonl"),
    )


def settings(keys: Sequence[str]) -> list[str]:
    """``key=value`` texts as options."""
    return [word for key in keys for word in ("--set", key)]
