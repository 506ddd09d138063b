"""Read a task's place from srun's variables: its number, its team and the host of task 0.

A step that spans components of a heterogeneous job is one team. Its tasks are numbered component by
component, and its counts are those of all components. But its list of nodes is sorted by name, so
the host of task 0 is the first one of the first component in the step.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from evener.errors import ConfigError

#: Ports derived from the job's number are in this range, below Linux's ephemeral ports.
PORTS = range(20_000, 30_000)

# Step numbers from here on are special: the batch script, the shell of `salloc` and others.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether ``srun`` started this process as a task.

    False in a batch script and in the shell of ``salloc``: they have a job but are not ranks.
    """
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_PROCID"):
        return False
    step = _step_text(environ)
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def read_place(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return this process's place in its step, over all components of a heterogeneous job.

    Returns:
        Fields of ``DistributedTrainConfig``: ``rank``, ``world_size``, ``local_rank``,
        ``local_world_size`` and ``coordinator_addr``, the host of task 0 or a batch script's
        ``MASTER_ADDR``.

    Raises:
        ConfigError: A variable that ``srun`` sets is missing or invalid; or this is task 0, and the
            other tasks would look for it on another host.
    """
    # The step's own count first: `srun --preserve-env` leaves the job's in SLURM_NTASKS.
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    rank, local_rank = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_LOCALID")
    if rank >= world_size:
        raise ConfigError(
            f"SLURM_PROCID is {rank}, but the step has {world_size} tasks (SLURM_NTASKS); start "
            "all ranks with one srun"
        )
    # Tasks by node may be those of the whole job, and a step may have fewer.
    local_world_size = min(max(_tasks_on_this_node(environ), local_rank + 1), world_size)
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "coordinator_addr": environ.get("MASTER_ADDR") or _host_of_task_0(environ, rank),
    }


def choose_port(environ: Mapping[str, str]) -> int:
    """Return a port derived from job and step, the same in every task."""
    job, step = _integer(environ, "SLURM_JOB_ID"), int(_step_text(environ))
    # Steps of one job may run at once: with a prime stride, they and neighbouring jobs differ.
    return PORTS[(job + 1009 * step) % len(PORTS)]


def hosts_of(compact: str) -> Iterator[str]:
    """Yield the hosts of a SLURM host list, in its order.

    Args:
        compact: The list, such as ``"node[01-03,7],gpu2"``.

    Raises:
        ConfigError: Brackets do not match, or there is no host.
    """
    entry = re.compile(r"(?:[^\[\],\s]|\[[\w,-]+\])+")
    entries = entry.findall(compact)
    if not entries or entries == ["(null)"] or re.search(r"[\[\]]", entry.sub("", compact)):
        raise ConfigError(
            f"SLURM's host list is {compact!r}, which names no first host; set MASTER_ADDR to the "
            "host of task 0 (`scontrol show hostnames` lists them)"
        )
    for one in entries:
        texts = re.split(r"[\[\]]", one)  # every other one was in brackets
        choices = [_numbers(text) if place % 2 else [text] for place, text in enumerate(texts)]
        yield from map("".join, product(*choices))


def _numbers(listed: str) -> Iterator[str]:
    for part in listed.split(","):
        low, dash, high = part.partition("-")
        if dash and low.isdecimal() and high.isdecimal():
            yield from (str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
        else:
            yield part


def _host_of_task_0(environ: Mapping[str, str], rank: int) -> str:
    names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    own = next((environ[name] for name in names if environ.get(name)), None)
    if own is None:
        raise ConfigError(
            "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set, so the host of task 0 is not "
            "known; start with srun, or set MASTER_ADDR"
        )
    host = _first_of_components(environ, own) or next(hosts_of(own))
    here = environ.get("SLURMD_NODENAME")
    if rank == 0 and here and here != host:
        raise ConfigError(
            f"task 0 runs on {here}, but the step's hosts are {own!r}, so the other tasks would "
            f"look for it on {host}; set MASTER_ADDR={here} before srun, or give srun the "
            "component of task 0 first"
        )
    return host


def _first_of_components(environ: Mapping[str, str], own: str) -> str | None:
    """Return the step's first host, in the order of a job's components; ``None`` without any."""
    taking_part = set(hosts_of(own))
    for number in range(int(environ.get("SLURM_HET_SIZE", 0))):
        for host in hosts_of(environ[f"SLURM_JOB_NODELIST_HET_GROUP_{number}"]):
            if host in taking_part:
                return host
    return None


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    if ids := environ.get("SLURM_GTIDS"):
        return len(ids.split(","))
    by_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts = [  # such as "2(x3),1"
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", by_node)
        for _ in range(int(times or 1))
    ]
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else 1


def _step_text(environ: Mapping[str, str]) -> str:
    return environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""


def _integer(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        text = environ.get(name)
        if text is None:
            continue
        if not text.isdecimal():
            raise ConfigError(
                f"{name} is {text!r}, which is not a number; srun sets it, so start with srun and "
                "do not change it"
            )
        return int(text)
    raise ConfigError(
        f"{names[0]} is not set, though this looks like a SLURM step; start with srun, "
        "or unset SLURM_PROCID to run alone"
    )
