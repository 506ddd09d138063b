"""What torch can compute on: the CPU and every kind of accelerator, behind one interface."""

import copy
import platform
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import nn

from evener.cgroups import read_group_limits

#: Half precision that a device is good at; ``"fp32"`` where it is at none.
Half = Literal["bf16", "fp16", "fp32"]

_FAST_FP16: Final = (7, 0)
"""CUDA compute capability from which on fp16 is faster than fp32 on matrices (Volta, Turing)."""


@final
class Milestone:
    """A point in what a thread has queued on a device.

    Args:
        event: An event of torch's module for the device, with timing, that was recorded there.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Return when the device has come to this point."""
        self._event.synchronize()

    def hold(self) -> None:
        """Let what this thread queues from now on wait for this point; the host does not wait."""
        self._event.wait()

    def seconds_to(self, later: "Milestone") -> float:
        """Return the device's seconds from this point to a later one; wait until it is there."""
        later.wait()
        return float(self._event.elapsed_time(later._event)) / 1000


class DeviceKind:
    """A kind of device, such as the CUDA GPUs of this host (ROCm's are CUDA devices to torch).

    What kinds have in common is done by torch's module for them (``torch.cuda``, ``torch.xpu``;
    see ``torch.get_device_module``).

    Attributes:
        name: Torch's device type, such as ``"cuda"``.
        pins_memory: Whether copies from page-locked host memory are faster.
        has_addresses: Whether ``data_ptr()`` is an address to which offsets can be added, rather
            than a handle: then DLPack carries a part of a tensor, of which elsewhere torch loses
            the offset (pytorch/pytorch#168177).
        keeps_parameters: Whether ``module.to(device)`` leaves a module its ``Parameter`` objects.
        has_queue: Whether the host queues work on a device and runs ahead of it.
        has_milestones: Whether events show how far a device has come with its queue. Where they do
            not, the host waits for the device whenever it matters.
    """

    name: str
    pins_memory: bool = False
    has_addresses: bool = True
    keeps_parameters: bool = True
    has_queue: bool = True
    has_milestones: bool = False

    @property
    def module(self) -> Any:
        """Torch's module for these devices."""
        return torch.get_device_module(self.name)

    def describe(self, device: torch.device) -> tuple[str, int]:
        """Return a device's name, and its memory in bytes; 0 if torch does not know."""
        properties = self.module.get_device_properties(device)
        return str(properties.name), int(properties.total_memory)

    def free_bytes(self, device: torch.device) -> int:
        """Return how much memory of a device is free; 0 if torch does not know it."""
        return int(self.module.mem_get_info(device)[0])

    def count(self) -> int:
        """Devices that torch finds here."""
        return int(self.module.device_count())

    def select(self, device: torch.device) -> None:
        """Make a device this thread's current one."""
        self.module.set_device(device)

    def finish(self, device: torch.device) -> None:
        """Wait for what this thread has queued on a device, and for no other thread's stream."""
        self.module.current_stream(device).synchronize()

    def mark(self, device: torch.device) -> Milestone:
        """Mark what this thread's work on a device has come to; where it ``has_milestones``."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(device))
        return Milestone(event)

    @contextmanager
    def beside(self, device: torch.device, milestone: Milestone) -> Iterator[None]:
        """Queue what a block does beside other work on a device, but behind a milestone."""
        with self.module.stream(self.module.Stream(device)):
            milestone.hold()
            yield

    def seed(self, seed: int) -> None:
        """Seed the generator from which a model on the current device draws."""
        self.module.manual_seed(seed)

    def free_cache(self) -> None:
        """Give memory back that torch keeps for later."""
        self.module.empty_cache()

    def pin(self, memory: torch.Tensor) -> None:
        """Lock host memory in place where that makes copies to and from devices faster."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin``, before the memory goes."""

    def has_float64(self, device: torch.device) -> bool:
        """Return whether a device knows this dtype."""
        return True

    def half(self, device: torch.device) -> Half:
        """Return the half precision that a device computes in faster than in fp32."""
        return "fp32"

    def architecture(self, device: torch.device) -> str:
        """Return what kernels are compiled for, such as ``sm_61``; empty if torch does not know."""
        return ""


@final
class Cpu(DeviceKind):
    """This host's processor; evener has a rank compute on it as on one device."""

    name = "cpu"
    has_queue = False

    def describe(self, device: torch.device) -> tuple[str, int]:
        """Return the processor's name and the host's memory."""
        import psutil  # takes 10 ms to load

        return _cpu_name(), int(psutil.virtual_memory().total)

    def free_bytes(self, device: torch.device) -> int:
        """Return what a new process can have, the limit of its control group included."""
        import psutil

        available, limit = int(psutil.virtual_memory().available), read_group_limits().free_bytes
        return available if limit is None else min(available, limit)

    def select(self, device: torch.device) -> None:
        """Nothing to select."""

    def finish(self, device: torch.device) -> None:
        """Nothing is queued."""

    def seed(self, seed: int) -> None:
        """Done by ``data.randomness``, which guards the CPU's generator."""

    def free_cache(self) -> None:
        """Nothing is kept."""


@final
class Cuda(DeviceKind):
    """NVIDIA's GPUs, and AMD's by ROCm."""

    name = "cuda"
    pins_memory = True
    has_milestones = True

    def pin(self, memory: torch.Tensor) -> None:
        """Let the driver know the memory; where it refuses, copies are slower, and no more."""
        library: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
        library.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo ``pin``."""
        library: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it so
        library.cudaHostUnregister(memory.data_ptr())

    def half(self, device: torch.device) -> Half:
        """bf16 where the card has it, else fp16 where it has tensor cores.

        Older cards, such as a GTX 1060, compute in fp16 more slowly than in fp32.
        """
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16"
        return "fp16" if torch.cuda.get_device_capability(device) >= _FAST_FP16 else "fp32"

    def architecture(self, device: torch.device) -> str:
        """``sm_86`` for capability 8.6; of AMD's, such as ``gfx90a``, without its features."""
        properties = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return str(properties.gcnArchName).partition(":")[0]
        return f"sm_{properties.major}{properties.minor}"


@final
class Xpu(DeviceKind):
    """Intel's GPUs."""

    name = "xpu"
    pins_memory = True

    def has_float64(self, device: torch.device) -> bool:
        """Data-centre cards have it; Arc cards and integrated graphics mostly do not."""
        return bool(torch.xpu.get_device_capability(device).get("has_fp64"))

    def half(self, device: torch.device) -> Half:
        """bf16 where the card does not merely emulate it."""
        capability = torch.xpu.get_device_capability(device)
        return "bf16" if capability.get("has_bfloat16_conversions") else "fp32"


@final
class Mps(DeviceKind):
    """The GPU of an Apple chip: one, without float64, in the memory of the host."""

    name = "mps"
    has_addresses = False

    def describe(self, device: torch.device) -> tuple[str, int]:
        """Return the name, and how much of the host's memory the system lets the GPU take."""
        return "Apple GPU", int(torch.mps.recommended_max_memory())

    def free_bytes(self, device: torch.device) -> int:
        """Return how much memory of the host is free."""
        return _CPU.free_bytes(device)

    def select(self, device: torch.device) -> None:
        """There is one."""

    def finish(self, device: torch.device) -> None:
        """Wait for all that is queued."""
        torch.mps.synchronize()

    def has_float64(self, device: torch.device) -> bool:
        """It does not."""
        return False


@final
class OtherAccelerator(DeviceKind):
    """Devices of a backend that is no part of torch, by torch's conventions for its module.

    What only some of them have is not relied on.

    Args:
        name: The backend's device type, such as ``"npu"``.
    """

    has_addresses = False
    keeps_parameters = False

    def __init__(self, name: str) -> None:
        self.name = name

    def describe(self, device: torch.device) -> tuple[str, int]:
        """Return the backend's name; torch requires no more of a module."""
        return self.name, 0

    def free_bytes(self, device: torch.device) -> int:
        """Return how much memory is free, if the backend can say; not all of them can."""
        with suppress(AttributeError):
            return super().free_bytes(device)
        return 0

    def finish(self, device: torch.device) -> None:
        """Wait for all that is queued: whether there are streams is not known."""
        self.module.synchronize(device)

    def has_float64(self, device: torch.device) -> bool:
        """Some have, and some have not."""
        return False

    def seed(self, seed: int) -> None:
        """Seed every device's generator: the one way that torch requires of a backend."""
        self.module.manual_seed_all(seed)

    def free_cache(self) -> None:
        """Give memory back where the backend offers that; not all of them do."""
        with suppress(AttributeError):
            self.module.empty_cache()


_BUILT_IN: Final[tuple[DeviceKind, ...]] = (Cuda(), Xpu(), Mps())
_CPU: Final = Cpu()
_moving: Final = threading.Lock()
_KNOWN: Final[dict[str, DeviceKind]] = {kind.name: kind for kind in (_CPU, *_BUILT_IN)}


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind that a device is of."""
    return _KNOWN.get(device.type) or OtherAccelerator(device.type)


@final
class DeviceQueue:
    """What this thread queues on a device.

    Args:
        device: The device.

    Attributes:
        has_milestones: See ``DeviceKind``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._kind = device, kind_of(device)
        self.has_milestones = self._kind.has_milestones

    def mark(self) -> Milestone:
        """Mark what has been queued so far; where it ``has_milestones``."""
        return self._kind.mark(self._device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Queue a copy into host memory; it has arrived at the next milestone.

        That memory is page-locked where the kind of device has that, or the host would wait for the
        copy. Torch keeps it for the next one.
        """
        pinned = self._kind.pins_memory
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        return host.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        """Wait for what has been queued so far."""
        self._kind.finish(self._device)


def queue_of(device: torch.device) -> DeviceQueue | None:
    """Return the queue of a device; ``None`` for one that computes synchronously."""
    return DeviceQueue(device) if kind_of(device).has_queue else None


def count_accelerators() -> dict[str, int]:
    """Devices of this host by kind of accelerator; the kind that ``auto`` takes comes first."""
    counts = {kind.name: n for kind in _BUILT_IN if (n := kind.count())}
    # Asked last, as counting devices in this way may start CUDA, which does not survive a fork.
    if not counts and torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        if current is not None:
            counts[current.type] = OtherAccelerator(current.type).count()
    return counts


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device; its parameters stay the objects that optimizers hold."""
    if kind_of(device).keeps_parameters:
        module.to(device)
        return
    with _moving:  # ranks may be threads, and this setting is the process's
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.to(device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


def copied(module: nn.Module, device: torch.device, memo: Mapping[int, Any] | None = None) -> Any:
    """Return a copy of a module on a device, without a second one where the module lies.

    Args:
        module: It stays as it is.
        device: Where the copy shall live.
        memo: By ``id``, what the copy shall hold instead of a copy; as for ``copy.deepcopy``.
    """
    known = dict(memo or {})
    with torch.no_grad():
        for p in module.parameters():
            if id(p) not in known:
                known[id(p)] = type(p)(p.to(device, copy=True), p.requires_grad)
        for buffer in module.buffers():
            known.setdefault(id(buffer), buffer.to(device, copy=True))
    return copy.deepcopy(module, known)


def float64_device(device: torch.device) -> torch.device:
    """Where to compute in float64 with what lies on a device: there, or else on the CPU."""
    return device if kind_of(device).has_float64(device) else torch.device("cpu")


def pins_memory() -> bool:
    """Return whether batches get faster to this host's accelerator from page-locked memory."""
    return any(_KNOWN[name].pins_memory for name in count_accelerators() if name in _KNOWN)


def free_cached_memory() -> None:
    """Give memory of this host's accelerators back that torch keeps for later."""
    for name in count_accelerators():
        kind_of(torch.device(name)).free_cache()


def _cpu_name() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
