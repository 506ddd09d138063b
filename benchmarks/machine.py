"""What every benchmark writes beside its figures: machine, commit, versions."""

import json
import os
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: Options that hold paths.
PATHS = ("json", "svg", "data")


def describe_machine() -> dict[str, Any]:
    """Processor, cores and memory."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [li for li in cpuinfo.read_text().splitlines() if li.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory_gib, 1)}


def load_average() -> float:
    """Programs that wanted a core, averaged over the last minute, this benchmark's included."""
    return round(os.getloadavg()[0], 2)


def load_before() -> float:
    """The load average before a measurement; says so where other programs take cores."""
    load, cores = load_average(), len(os.sched_getaffinity(0))
    if load > cores / 2:
        print(f"load average {load} on {cores} cores before the start: figures will be disturbed")
    return load


def describe_commit() -> str:
    """The commit of the tree, with ``+changes`` when it has uncommitted ones."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = "+changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + changed


def describe_versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    names = ("torch", "transformers", "numpy", "evener")
    compared = ("accelerate", "lightning-fabric", "torchft")
    found = {d.name for d in distributions()}
    names += tuple(name for name in compared if name in found)
    return {"python": sys.version.split()[0], **{n: version(n) for n in names}}


def write_report(
    arguments: Namespace, load_before: float, rows: Sequence[Mapping[str, Any]], **content: Any
) -> None:
    """Writes machine, commit, versions, command line and rows as JSON, if ``--json`` is given.

    Args:
        arguments: The command line; paths in it are not written.
        load_before: The load average before the measurement.
        rows: What was measured.
        **content: Further facts.
    """
    if arguments.json is None:
        return
    document = {
        "benchmark": Path(sys.argv[0]).stem,
        "machine": describe_machine(),
        "commit": describe_commit(),
        "versions": describe_versions(),
        "load_average": [load_before, load_average()],
        "arguments": {k: v for k, v in vars(arguments).items() if k not in PATHS},
        **content,
        "rows": rows,
    }
    Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {arguments.json}")
