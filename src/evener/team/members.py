"""Who is in the team: what each rank says of itself."""

import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evener.devices import kind_of
from evener.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker of the team, as it introduces itself.

    Attributes:
        member: Name that stays the same when ranks are numbered anew.
        rank: Its rank now.
        host: Host name.
        pid: Process id.
        device: Torch device, such as ``cuda:0``.
        device_name: What the device is, for people.
        memory_bytes: Memory of the device, or of the host for a CPU rank; 0 where torch cannot
            tell.
        threads: Compute threads of a CPU rank.
        emulated: Factor by which the rank is slowed on purpose; 1 for real speed.
        precision: What its forward computes in: ``fp32``, ``bf16`` or ``fp16``.
        versions: Versions of Python, torch and evener.
    """

    member: str
    rank: int
    host: str
    pid: int
    device: str
    device_name: str
    memory_bytes: int
    threads: int
    emulated: float
    versions: Mapping[str, str]
    precision: str = "fp32"


def describe_self(
    rank: int,
    local_rank: int,
    device: torch.device,
    *,
    emulated: float = 1.0,
    precision: str = "fp32",
) -> Member:
    """This rank's own entry in the team."""
    host = socket.gethostname()
    name, memory = kind_of(device).describe(device)
    return Member(
        member=f"{host}/{device.type}/{local_rank}",
        rank=rank,
        host=host,
        pid=os.getpid(),
        device=str(device),
        device_name=name,
        memory_bytes=memory,
        threads=torch.get_num_threads(),
        emulated=emulated,
        versions=own_versions(),
        precision=precision,
    )


def own_versions() -> dict[str, str]:
    """Versions of Python, torch and evener in this process."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "evener": __version__,
    }
