"""The team's devices in one line, for people."""

from collections import Counter
from collections.abc import Sequence

from evener.run.team.team import Member


def hardware_summary(members: Sequence[Member]) -> str:
    """The devices of a team, such as ``2 GPUs (unequal) | NAME 16.0 GB | NAME 6.0 GB``.

    Like devices are told once, with their number. GB are of 2**30 bytes, as cards are sold.

    Args:
        members: One for each device.
    """
    num_gpus = sum(1 for m in members if _is_gpu(m))
    num_cpus = len(members) - num_gpus
    kinds = [text for text in (_plural(num_gpus, "GPU"), _plural(num_cpus, "CPU rank")) if text]
    devices = Counter(_device(m) for m in members)
    likeness = ""
    if len(members) > 1:
        likeness = " (equal)" if len(devices) == 1 else " (unequal)"
    parts = [f"{n} x {device}" if n > 1 else device for device, n in devices.items()]
    return f"{' + '.join(kinds)}{likeness} | {' | '.join(parts)}"


def _device(member: Member) -> str:
    text = f"{member.device_name} {member.memory_bytes / 2**30:.1f} GB"
    if not _is_gpu(member):
        text += f" {_plural(member.threads, 'thread')}"
    if member.emulated != 1:
        text += f" (emulated {member.emulated:g}x slower)"
    return text


def _is_gpu(member: Member) -> bool:
    return not member.device.startswith("cpu")


def _plural(number: int, word: str) -> str:
    if not number:
        return ""
    return f"{number} {word}{'' if number == 1 else 's'}"
