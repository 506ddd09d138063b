"""``import evener`` is cheap and changes nothing; the command line answers without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.limits import PATIENCE_S

LOOK = """
import json, logging, os, signal, sys, threading, warnings
def look():
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "variables": dict(os.environ),
        "handlers": [repr(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
        "loggers": [repr(logging.root.handlers), logging.root.level],
        "filters": [repr(f) for f in warnings.filters],
        "excepthook": repr(sys.excepthook),
        "path": sys.path,
    }
"""

# A part of what torch costs in the same process: about 0.15 on a quiet machine.
SHARE_OF_TORCH = 0.25

# What public names may bring in beside torch; anything else needs a reason.
BROUGHT_IN = {
    *("annotated_types", "cloudpickle", "numpy", "pydantic", "pydantic_core", "safetensors"),
    *("typing_extensions", "typing_inspection", "yaml"),
    *("annotated_doc", "shellingham", "typer"),  # for `Job`, whose options the command line has
}

# Most of these cost more than evener itself; the others are ours, and come when they are used.
HEAVY = {"torch", "numpy", "transformers", "peft", "pydantic", "rich", "typer", "yaml", "psutil"}


def run(program: str) -> dict:
    # Users have compiled modules: without them, the compiler would be most of what is measured.
    keeps_bytecode = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK + program],
        env=keeps_bytecode,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_changes_nothing_and_brings_in_only_itself():
    seen = run(
        """
before, modules = look(), set(sys.modules)
import evener
after = look()
print(json.dumps({"before": before, "after": after, "new": sorted(set(sys.modules) - modules)}))
"""
    )
    assert seen["before"] == seen["after"]
    assert not {name.split(".")[0] for name in seen["new"]} & HEAVY
    ours = {name for name in seen["new"] if name.startswith("evener")}
    assert ours == {"evener", "evener.version"}


def test_using_every_public_name_costs_little_over_torch_and_changes_nothing():
    # What torch has made is frozen: a pass of the garbage collector over it takes longer than all
    # of evener, is part of torch's cost, and comes at a chance moment.
    program = """
import gc, time
started_s = time.process_time()
import torch, torch.distributed, torch.utils.data
torch_s = time.process_time() - started_s
before, modules = look(), set(sys.modules)
gc.freeze()
started_s = time.process_time()
import evener
for name in evener.__all__:
    getattr(evener, name)
spent_s = time.process_time() - started_s
new = {name.split(".")[0] for name in set(sys.modules) - modules}
seen = {"before": before, "after": look(), "new": sorted(new)}
print(json.dumps({**seen, "spent_s": spent_s, "torch_s": torch_s}))
"""
    seen = run(program)
    assert seen["before"] == seen["after"]
    brought_in = {n for n in seen["new"] if not n.startswith("_")} - sys.stdlib_module_names
    assert brought_in - {"cython_runtime", "evener"} <= BROUGHT_IN
    # Processor time, in proportion to torch's own where the machine is slow, and the best of five:
    # whoever else uses the caches makes it more, never less.
    for _ in range(4):
        if is_cheap(seen):
            break
        seen = run(program)
    assert is_cheap(seen), (seen["spent_s"], seen["torch_s"])


def is_cheap(seen: dict) -> bool:
    return seen["spent_s"] <= max(0.2, SHARE_OF_TORCH * seen["torch_s"])


def test_the_command_line_helps_without_torch():
    command = Path(sys.executable).with_name("evener")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(command), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "pretrain" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    heavy = {"numpy", "pydantic", "rich", "torch", "transformers", "yaml"}
    assert not imported & heavy
