"""Reads what srun tells a task: its number, its team and the host of task 0."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from evener.errors import ConfigError

#: Ports derived from the job's number lie in this range, below the ports that Linux hands out.
PORTS = range(20_000, 30_000)

# Step numbers from here on are SLURM's own: the batch script, the shell of `salloc`, and such.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTask:
    """One task of a step that ``srun`` started.

    Attributes:
        rank: Number of the task in the step.
        world_size: Tasks in the step, over all components of a heterogeneous job.
        local_rank: Number of the task on its node.
        local_world_size: Tasks on this node.
        host: Host of task 0.
        port: Derived from job and step, so that every task comes to the same one.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process as a task.

    False in a batch script and in the shell of ``salloc``: those have a job but start no ranks.
    """
    if not environ.get("SLURM_JOB_ID") or not environ.get("SLURM_PROCID"):
        return False
    step = _step_text(environ)
    return step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def read_task(environ: Mapping[str, str]) -> SlurmTask:
    """This process's place in its step.

    Raises:
        ConfigError: A variable that ``srun`` sets is missing or makes no sense.
    """
    spans = _spans_components(environ)
    # SLURM_NTASKS counts all components of a heterogeneous step; otherwise the step's own count is
    # the safer one, as `srun --preserve-env` leaves the job's in SLURM_NTASKS.
    counts = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"]
    world_size = _integer(environ, *(counts[1:] if spans else counts))
    local_rank = _integer(environ, "SLURM_LOCALID")
    job, step = _integer(environ, "SLURM_JOB_ID"), int(_step_text(environ))
    return SlurmTask(
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=max(_tasks_on_this_node(environ), local_rank + 1),
        host=_first_host(environ, spans),
        # Steps of one job may run at once: a prime stride keeps them and neighbouring jobs apart.
        port=PORTS[(job + 1009 * step) % len(PORTS)],
    )


def first_host(compact: str) -> str:
    """First host of a SLURM host list.

    Args:
        compact: Such as ``"node[01-03,7],gpu2"``, whose first host is ``node01``.

    Raises:
        ConfigError: Brackets do not match, or there is no host.
    """
    host = ""
    rest = compact.strip()
    while rest and rest[0] not in ", \t":
        if rest[0] != "[":
            host, rest = host + rest[0], rest[1:]
            continue
        inside, closed, rest = rest[1:].partition("]")
        number = re.match(r"\w+", inside)
        if not closed or number is None:
            raise ConfigError(_bad_list(compact))
        host += number.group()
    if not host or "]" in host or host == "(null)":
        raise ConfigError(_bad_list(compact))
    return host


def _bad_list(compact: str) -> str:
    return (
        f"SLURM's host list is {compact!r}, which names no first host; set MASTER_ADDR to the host "
        "of task 0 (`scontrol show hostnames` lists them)"
    )


def _first_host(environ: Mapping[str, str], spans: bool) -> str:
    # The step's own list covers one component; srun merges all into the job's list for the tasks of
    # a step that spans several, component 0 first.
    merged = [
        "SLURM_JOB_NODELIST",
        "SLURM_JOB_NODELIST_HET_GROUP_0",
        "SLURM_JOB_NODELIST_PACK_GROUP_0",
    ]
    plain = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]
    names = [*merged, *plain] if spans else [*plain, *merged]
    for name in names:
        if environ.get(name):
            return first_host(environ[name])
    raise ConfigError(
        "SLURM_STEP_NODELIST and SLURM_JOB_NODELIST are not set, so the host of task 0 is not "
        "known; start with srun, or set MASTER_ADDR"
    )


def _spans_components(environ: Mapping[str, str]) -> bool:
    # Older releases call a heterogeneous job a pack.
    components = environ.get("SLURM_HET_SIZE") or environ.get("SLURM_PACK_SIZE") or "1"
    if not components.isdecimal() or int(components) < 2:
        return False
    # A step in one component of such a job has all its tasks there.
    own = environ.get("SLURM_STEP_NUM_TASKS", "")
    return own != environ.get("SLURM_NTASKS", "") or not own


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    if ids := environ.get("SLURM_GTIDS"):
        return len(ids.split(","))
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    node = environ.get("SLURM_NODEID", "0")
    counts: list[int] = []
    for part in (per_node or "1").split(","):  # such as "2(x3),1"
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return 1
        counts += [int(match[1])] * int(match[2] or 1)
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
                f"{name} is {text!r}, which is no number; srun sets it, so start with srun and do "
                "not change it"
            )
        return int(text)
    raise ConfigError(
        f"{names[0]} is not set, though this looks like a SLURM step; start with srun, "
        "or unset SLURM_PROCID to run alone"
    )
