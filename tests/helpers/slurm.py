"""A stand-in for SLURM: ``srun`` starts tasks on this machine, one for each node of a component.

It knows the options of ``examples/pretrain_elastic.sbatch``. ``TEST_NODES`` names the nodes of each
component of a heterogeneous job, as JSON: ``[["new1"], ["old1", "old2"]]``.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_FLAGS = ("--no-kill", "--kill-on-bad-exit=0")
_OPTIONS = ("--cpus-per-task", "--het-group")


def install(folder: Path) -> Path:
    """Puts ``srun`` into a folder, for PATH."""
    folder.mkdir()
    script = folder / "srun"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" "$@"\n')
    script.chmod(0o755)
    return folder


def batch_environment(nodes: list[list[str]], job: int) -> dict[str, str]:
    """What a batch script sees, which runs on the first node."""
    return {
        "TEST_NODES": json.dumps(nodes),
        "SLURM_JOB_ID": str(job),
        "SLURMD_NODENAME": nodes[0][0],
    }


def commands_of(words: list[str]) -> list[list[str]]:
    """The command of each task."""
    components, commands = json.loads(os.environ["TEST_NODES"]), []
    while words:
        end = words.index(":") if ":" in words else len(words)
        block, words, group = words[:end], words[end + 1 :], 0
        while block[0].startswith("-"):
            name, _, value = block.pop(0).partition("=")
            if f"{name}={value}".rstrip("=") not in _FLAGS and name not in _OPTIONS:
                sys.exit(f"srun: unrecognized option {name!r}")
            group = int(value) if name == "--het-group" else group
        commands += [block] * len(components[group])
    return commands


def main(words: list[str]) -> int:
    """Runs a step to its end, and passes on the signal that comes before the time limit."""
    tasks = [subprocess.Popen(command) for command in commands_of(words)]
    signal.signal(signal.SIGUSR1, lambda signum, _: [task.send_signal(signum) for task in tasks])
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
