"""The members of a team: the facts of each rank, and the team as text."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from evener.devices import kind_of
from evener.version import __version__

_KINDS = {"cuda": "GPU", "xpu": "GPU", "mps": "GPU", "cpu": "CPU rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """The facts of a worker of the team; only ``rank`` is set for an absent one.

    Attributes:
        member: Name that stays the same when ranks are renumbered.
        rank: Its present rank.
        host: Host name.
        pid: Process id.
        device: Torch device, such as ``cuda:0``.
        device_name: The device's model, as text.
        memory_bytes: Memory of the device, or of the host for a CPU rank; 0 if unknown.
        threads: Compute threads of a CPU rank.
        emulated: Factor by which the rank is slowed on purpose; 1 for real speed.
        precision: Precision of its forward pass: ``fp32``, ``bf16`` or ``fp16``.
        versions: Versions of Python, torch and evener.
    """

    rank: int
    member: str = ""
    host: str = ""
    pid: int = 0
    device: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    threads: int = 0
    emulated: float = 1.0
    versions: Mapping[str, str] = field(default_factory=dict)
    precision: str = "fp32"

    @property
    def place(self) -> tuple[str, str]:
        """Return its host and its device."""
        return self.host, self.device


def describe_self(
    rank: int,
    local_rank: int,
    device: torch.device,
    *,
    emulated: float = 1.0,
    precision: str = "fp32",
) -> Member:
    """Return the facts of this rank."""
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
    """Return the versions of Python, torch and evener in this process."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "evener": __version__,
    }


def hardware_summary(members: Sequence[Member]) -> str:
    """Return the devices of a team, such as ``2 GPUs (unequal) | NAME 16.0 GB | NAME 6.0 GB``.

    Equal devices are listed once, with their number. GB are 2**30 bytes, as vendors count them.

    Args:
        members: One for each device.
    """
    words = Counter(_KINDS.get(m.device.partition(":")[0], "accelerator") for m in members)
    kinds = [
        _plural(words[word], word) for word in ("GPU", "accelerator", "CPU rank") if words[word]
    ]
    devices = Counter(_device(m) for m in members)
    equality = ""
    if len(members) > 1:
        equality = " (equal)" if len(devices) == 1 else " (unequal)"
    parts = [f"{n} x {device}" if n > 1 else device for device, n in devices.items()]
    return f"{' + '.join(kinds)}{equality} | {' | '.join(parts)}"


def team_lines(members: Sequence[Member]) -> list[str]:
    """Return the team: its devices, and a line for each rank."""
    lines = [f"team of {len(members)}: {hardware_summary(members)}"]
    for m in members:
        slow = f", emulated {m.emulated:g}x slower" if m.emulated != 1 else ""
        half = f", {m.precision}" if m.precision != "fp32" else ""
        threads = f", {_plural(m.threads, 'thread')}" if m.device == "cpu" else ""
        lines.append(
            f"  rank {m.rank}  {m.device:7} {m.device_name}{_memory(m, before=' | ')}{threads}"
            f"{half}{slow} | {m.host} pid {m.pid}"
        )
    return lines


def _device(member: Member) -> str:
    text = f"{member.device_name}{_memory(member, before=' ')}"
    if member.device == "cpu":
        text += f" {_plural(member.threads, 'thread')}"
    if member.emulated != 1:
        text += f" (emulated {member.emulated:g}x slower)"
    return text


def _memory(member: Member, *, before: str) -> str:
    """Return a device's memory after a separator; empty if it is unknown."""
    return f"{before}{member.memory_bytes / 2**30:.1f} GB" if member.memory_bytes else ""


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
