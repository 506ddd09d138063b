"""The ranks of a benchmark, which take turns at what it compares.

All ways that a benchmark compares live in the same processes and run one after another in each
round. So a round is short, and a machine whose speed drifts favours no way. Ratios are formed
inside a round, between figures that were taken within seconds of one another.
"""

import json
import os
import random
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evener.team.environment import DistributedTrainConfig
from evener.team.launch import LaunchPlan, launch

TIMEOUT_S = 300.0
_FOLDER = "EVENER_BENCHMARK_FOLDER"
_LOOPBACK = "127.0.0.1"
#: Variable with the address of rank 0, if ranks are on several machines.
ADDRESS = "EVENER_BENCHMARK_ADDRESS"


def is_rank() -> bool:
    """Return whether this process is a rank that ``run_ranks`` has started."""
    return _FOLDER in os.environ


def run_ranks(
    count: int,
    *,
    threads: int = 1,
    case: Any = None,
    start: Callable[[Sequence[str]], int] | None = None,
) -> list[dict[str, Any]]:
    """Run this script again as ``count`` ranks, and return the rows that they leave.

    Ends this process if a rank fails.

    Args:
        count: How many ranks.
        threads: On how many threads each rank computes.
        case: What they measure (JSON), as ``Team.case``.
        start: Runs the ranks to their end and returns their status; by default on this machine.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(case), encoding="utf-8")
        os.environ |= {_FOLDER: name, "OMP_NUM_THREADS": str(threads)}
        try:
            command = [sys.executable, *sys.argv]
            status = start(command) if start else launch(command, LaunchPlan(nproc=count))
        finally:
            del os.environ[_FOLDER]
        if status:
            raise SystemExit(status)
        return json.loads((folder / "rows.json").read_text(encoding="utf-8"))


class Team:
    """This rank among the ranks of a benchmark, and how they wait for one another between turns.

    They meet in torch's default process group, over Gloo, so a rank that waits takes no core.

    Attributes:
        rank: This rank.
        world_size: How many there are.
        case: What was given to ``run_ranks``.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._folder = Path(os.environ[_FOLDER])
        self.case = json.loads((self._folder / "case.json").read_text(encoding="utf-8"))
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(self._folder / "store"), self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of every rank; each gives as many."""
        mine = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine)
        return [row.tolist() for row in rows]

    def first(self, value: int) -> int:
        """Return the value that rank 0 gives, on all ranks."""
        return int(self.gather([value])[0][0])

    def environment(self) -> DistributedTrainConfig:
        """Return where the same ranks meet as a team of evener, each time on another port."""
        port = str(self.first(_free_port() if self.rank == 0 else 0))
        place = {"MASTER_ADDR": os.environ.get(ADDRESS, _LOOPBACK), "MASTER_PORT": port}
        return DistributedTrainConfig.from_env(os.environ | place)

    def tell(self, text: str) -> None:
        """Print a line, once."""
        if self.rank == 0:
            print(text, flush=True)

    def finish(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Leave rank 0's rows for the process that started the ranks."""
        if self.rank == 0:
            (self._folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        self.barrier()
        dist.destroy_process_group()


def shuffled(names: Sequence[str], rounds: int) -> Iterator[list[str]]:
    """Yield an order of the names for each round, the same on every rank."""
    generator = random.Random(0)
    for _ in range(rounds):
        yield generator.sample(list(names), len(names))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
