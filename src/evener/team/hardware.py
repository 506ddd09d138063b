"""The team's devices in words, for people."""

from collections import Counter
from collections.abc import Sequence

from evener.team.members import Member

_KINDS = {"cuda": "GPU", "xpu": "GPU", "mps": "GPU", "cpu": "CPU rank"}


def hardware_summary(members: Sequence[Member]) -> str:
    """The devices of a team, such as ``2 GPUs (unequal) | NAME 16.0 GB | NAME 6.0 GB``.

    Like devices are told once, with their number. GB are of 2**30 bytes, as cards are sold.

    Args:
        members: One for each device.
    """
    words = Counter(_KINDS.get(m.device.partition(":")[0], "accelerator") for m in members)
    kinds = [
        _plural(words[word], word) for word in ("GPU", "accelerator", "CPU rank") if words[word]
    ]
    devices = Counter(_device(m) for m in members)
    likeness = ""
    if len(members) > 1:
        likeness = " (equal)" if len(devices) == 1 else " (unequal)"
    parts = [f"{n} x {device}" if n > 1 else device for device, n in devices.items()]
    return f"{' + '.join(kinds)}{likeness} | {' | '.join(parts)}"


def team_lines(members: Sequence[Member]) -> list[str]:
    """The team: its devices, and a line for each rank."""
    lines = [f"team of {len(members)}: {hardware_summary(members)}"]
    for m in members:
        slow = f", emulated {m.emulated:g}x slower" if m.emulated != 1 else ""
        half = f", {m.precision}" if m.precision != "fp32" else ""
        threads = f", {m.threads} threads" if m.device == "cpu" else ""
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
    """A device's memory, after some separator; empty where it is not known."""
    return f"{before}{member.memory_bytes / 2**30:.1f} GB" if member.memory_bytes else ""


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
