"""Memory that processes of one host map together: files that have no name, and tensors in them."""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import final

import torch
from torch import Tensor

from evener.comm.forks import NotInherited, close_in_children

if sys.platform == "linux":
    import fcntl

#: Pages are reserved in steps of this size: a signal makes Linux start a step again, so one
#: step must be shorter than the time between the signals of a profiler.
_STEP_BYTES = 16 << 20
#: Python's mmap has no name for it.
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_MMAP = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    *[ctypes.c_int] * 3,
    ctypes.c_long,
    use_errno=True,
)
_MUNMAP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
#: The place of a tensor that does not lie in shared memory.
NOWHERE = -1


def create_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which no process can make shorter.

    It has no path and ends with the last descriptor and mapping, so a crash leaves nothing behind,
    and the size of ``/dev/shm`` does not matter.

    Args:
        name: Seen in ``/proc`` only.

    Raises:
        OSError: The kernel has no such files, or a sandbox (seccomp) refuses them.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{sys.platform} has no memfd_create")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # A mapping of a file that gets shorter ends its process by SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def reserve(descriptor: int, start: int, size: int) -> None:
    """Make a file at least ``start + size`` bytes long, with memory behind all of them.

    Without memory behind it, the first write to a page may end the process by SIGBUS when none is
    left. Here that is an error, or the end that a container's limit brings to any allocation.

    Raises:
        OSError: There is not so much memory, or a limit forbids it.
    """
    for step in range(start, start + size, _STEP_BYTES):
        os.posix_fallocate(descriptor, step, min(_STEP_BYTES, start + size - step))


def map_file(descriptor: int, size: int) -> memoryview:
    """Map the front of a file, of which no more than what is reserved may be used.

    It stays mapped for as long as the view or a tensor over it lives, and needs no descriptor of
    its own: ``mmap.mmap`` would keep one for each file, of which a host with many ranks has too
    few.

    Args:
        descriptor: The file's.
        size: Bytes; may be more than the file has.

    Raises:
        OSError: It cannot be mapped, such as for lack of addresses or memory.
    """
    return _Pages(descriptor, size).content()


class _Pages:
    """Where a file is mapped; lives as long as a tensor lies there."""

    def __init__(self, descriptor: int, size: int) -> None:
        library = ctypes.CDLL(None)
        # Looked up here: a forked child must not take the lock of the dynamic linker.
        self._map, self._unmap = _MMAP(("mmap", library)), _MUNMAP(("munmap", library))
        self._size = size
        self.address = 0
        self.address = self._place(mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, size)

    def _place(self, flags: int, descriptor: int, size: int) -> int:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._map(self.address, size, both, flags, descriptor, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)}")
        return int(address)

    def content(self) -> memoryview:
        """Return the bytes; the pages are given back when nothing refers to them any more."""
        whole = (ctypes.c_ubyte * self._size).from_address(self.address)
        weakref.finalize(whole, self._give_back).atexit = False
        return memoryview(whole).cast("B")

    def _give_back(self) -> None:
        self._unmap(self.address, self._size)


@final
class _OwnPages(_Pages, NotInherited):
    """This rank's file; may outlive the team, as a model keeps its parameters.

    Attributes:
        used: Bytes of it with memory behind them.
    """

    def __init__(self) -> None:
        self.used = 0
        self.descriptor = create_file("evener")
        weakref.finalize(self, os.close, self.descriptor).atexit = False
        super().__init__(self.descriptor, _room())
        close_in_children(self)

    def close_in_child(self) -> None:
        """Give this forked child pages of its own, of which it gets copies when it writes."""
        if self.used:
            self._place(mmap.MAP_PRIVATE | _MAP_FIXED, self.descriptor, self.used)


def _room() -> int:
    """Return for how many bytes there are addresses in a file: more than it can ever have."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


@final
class SharedMemory:
    """One file per rank, in which its tensors lie; each rank maps those of all others.

    Communicators that were split off one another use one ``SharedMemory``: their ranks are alive
    at the same time, and a tensor that lies here can be exchanged over each of them. It grows and
    never shrinks: it is given back when no tensor lies there any more.

    A forked child sees what the rank sees, until it writes: a page that it writes to is its own.

    Attributes:
        descriptor: Of this rank's file.
    """

    def __init__(self, number: int) -> None:
        """Make an empty file.

        Args:
            number: Of this rank in the team.

        Raises:
            OSError: See ``create_file``.
        """
        own = _OwnPages()
        self._own: _OwnPages | None = own
        self.descriptor = own.descriptor
        #: The file of each rank, by its number.
        self._files = {number: own.content()}
        self._number = number
        self._num_users = 1

    def use(self) -> None:
        """Count one more user, beside the one that has made this."""
        self._num_users += 1

    def release(self) -> None:
        """Count one user less; the last releases everything but tensors that are still held."""
        self._num_users -= 1
        if self._num_users == 0:
            self.close_in_child()

    def allocate(self, size: int) -> Tensor:
        """Return zeros, shape ``(size,)``, uint8, at the start of a page.

        Raises:
            OSError: See ``reserve``.
        """
        own = self._own
        assert own is not None, "nothing is allocated after the end"
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        reserve(self.descriptor, own.used, room)
        content = self._files[self._number][own.used : own.used + room]
        own.used += room
        return torch.frombuffer(content, dtype=torch.uint8)[:size]

    def find(self, flat: Tensor) -> int:
        """Return the first byte of a tensor in this rank's file; ``NOWHERE`` if not there."""
        own = self._own
        if flat.device.type == "cpu" and own is not None:
            place = flat.data_ptr() - own.address
            if place >= 0 and place + flat.nbytes <= own.used:
                return place
        return NOWHERE

    def meet(self, number: int, descriptor: int) -> None:
        """Add the file of a peer; the descriptor is closed in any case.

        Raises:
            OSError: It cannot be mapped.
        """
        try:
            if number not in self._files:
                self._files[number] = map_file(descriptor, _room())
        finally:
            os.close(descriptor)

    def view(self, number: int, place: int, size: int) -> Tensor:
        """Return bytes of a rank's file, uint8."""
        content = self._files[number][place : place + size]
        return torch.frombuffer(content, dtype=torch.uint8)

    def close_in_child(self) -> None:
        """Release everything; tensors that are still held keep their memory."""
        self._own = None
        self._files.clear()
