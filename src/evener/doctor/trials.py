"""Test exchanges between ranks of this host. Each rank is a process: ``python -m`` this module.

A process can be killed even if NCCL or a driver hangs.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import torch

from evener.comm.addresses import LOOPBACK, bind
from evener.comm.messages import first_line
from evener.comm.shared import share_memory
from evener.devices import kind_of
from evener.doctor.host_facts import ExchangeTrials
from evener.errors import EvenerError
from evener.team.environment import DistributedTrainConfig
from evener.team.fixed import meet

#: Too large for the message of the call itself, so that it is exchanged like gradients.
_NUM_ELEMENTS: Final = 1 << 14


def try_exchange(devices: Sequence[torch.device], *, timeout_s: float) -> ExchangeTrials:
    """Let ranks exchange over Gloo, shared memory and, on GPUs, NCCL; return what failed.

    Args:
        devices: One for each rank, two or more: all CUDA devices, or all the CPU.
        timeout_s: Longest that it may take.
    """
    ranks: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + timeout_s
    with bind(LOOPBACK, 0) as reserved:
        place = [str(len(devices)), str(reserved.getsockname()[1])]
        for rank, device in enumerate(devices):
            command = [sys.executable, "-P", "-m", __name__, str(rank), *place, str(device)]
            ranks.append(
                subprocess.Popen(
                    [*command, str(timeout_s / 2)],  # so a waiting rank can name the missing one
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    on_gpus = devices[0].type == "cuda"
    suspect = "nccl_failure" if on_gpus else "gloo_failure"
    outcomes: list[dict[str, str]] = []
    try:
        for rank, process in enumerate(ranks):
            said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
            ended = f"the process of rank {rank} ended with exit code {process.returncode}"
            outcomes.append(json.loads(said) if said else {suspect: ended})
    except subprocess.TimeoutExpired:
        outcomes.append({suspect: f"the ranks have not answered within {timeout_s:g} s"})
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    failures = {name: text for each in reversed(outcomes) for name, text in each.items() if text}
    return ExchangeTrials(nccl_tried=on_gpus, **failures)


def _be_rank(rank: int, world_size: int, port: int, *, device: str, timeout_s: float) -> None:
    """Run a rank of ``try_exchange``; write what has failed to standard output."""
    own, failures, trial = torch.device(device), {}, "gloo_failure"
    place = DistributedTrainConfig.of_rank(rank, world_size, coordinator_port=port)
    try:
        comm, _ = meet(place, timeout_s)
        with comm:
            _, failures["memory_failure"] = share_memory(comm)
            comm.all_reduce(torch.ones(_NUM_ELEMENTS), what="a trial")
            if own.type == "cuda":
                trial = "nccl_failure"
                kind_of(own).select(own)
                failures[trial] = comm.add_nccl()
    except Exception as error:  # any error of a driver's library is a result
        failures[trial] = str(error) if isinstance(error, EvenerError) else first_line(error)
    os.write(1, json.dumps(failures).encode())
    os._exit(0)  # ending an NCCL group may hang


if __name__ == "__main__":
    numbers = (int(text) for text in sys.argv[1:4])
    _be_rank(*numbers, device=sys.argv[4], timeout_s=float(sys.argv[5]))
