"""Memory that processes of one host map together: files that have no name, and tensors in them."""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import NamedTuple, final

import torch
from torch import Tensor

from evener.comm.forks import NotInherited, leave_behind_in_children

if sys.platform == "linux":
    import fcntl

#: Pages are reserved in steps of so many bytes: a signal makes Linux start a step again, so one
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
#: ``place`` of a tensor that does not lie in shared memory.
NOWHERE = -1


class MemoryPlace(NamedTuple):
    """The place of a tensor in a rank's file, in bytes, as ranks send it to one another.

    Attributes:
        offset: Its first byte; ``NOWHERE`` where it lies elsewhere.
        piece: First byte of the piece that holds it, which is mapped as a whole.
        size: Bytes of that piece.
    """

    offset: int
    piece: int
    size: int


ELSEWHERE = MemoryPlace(NOWHERE, 0, 0)


def create_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which nobody can make shorter.

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


def map_file(descriptor: int, start: int, size: int) -> memoryview:
    """Map a part of a file whose memory is reserved.

    It stays mapped for as long as the view or a tensor over it lives, and needs no descriptor of
    its own: ``mmap.mmap`` would keep one for each part, of which a host with many ranks has too
    few.

    Args:
        descriptor: The file's.
        start: First byte; a multiple of the page size.
        size: Bytes.

    Raises:
        OSError: It cannot be mapped, such as for lack of addresses or memory.
    """
    return _Pages(descriptor, start, size).content()


@final
class _File:
    """The descriptor of this rank's file, open as long as a part of it is mapped."""

    def __init__(self) -> None:
        self.descriptor = create_file("evener")
        weakref.finalize(self, os.close, self.descriptor).atexit = False


class _Pages:
    """Where a part of a file is mapped; lives as long as a tensor lies there."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        library = ctypes.CDLL(None)
        # Looked up here: a forked child must not take the lock of the dynamic linker.
        self._map, self._unmap = _MMAP(("mmap", library)), _MUNMAP(("munmap", library))
        self._size = size
        self._address = 0
        self._address = self._place(mmap.MAP_SHARED | mmap.MAP_POPULATE, descriptor, start)

    def _place(self, flags: int, descriptor: int, start: int) -> int:
        both = mmap.PROT_READ | mmap.PROT_WRITE
        address = self._map(self._address, self._size, both, flags, descriptor, start)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {self._size} bytes: {os.strerror(number)}")
        return int(address)

    def content(self) -> memoryview:
        """Return the bytes; the pages are given back when nothing refers to them any more."""
        whole = (ctypes.c_ubyte * self._size).from_address(self._address)
        weakref.finalize(whole, self._give_back).atexit = False
        return memoryview(whole).cast("B")

    def _give_back(self) -> None:
        self._unmap(self._address, self._size)


@final
class _OwnPages(_Pages, NotInherited):
    """A part of this rank's file; may outlive the team, as a model keeps its parameters."""

    def __init__(self, file: _File, start: int, size: int) -> None:
        super().__init__(file.descriptor, start, size)
        self._file, self._start = file, start
        leave_behind_in_children(self)

    def leave_behind(self) -> None:
        """Give this forked child pages of its own, of which it gets copies when it writes."""
        self._place(mmap.MAP_PRIVATE | _MAP_FIXED, self._file.descriptor, self._start)


class _Piece(NamedTuple):
    """A part of this rank's file that is mapped as a whole.

    Attributes:
        address: Where it lies in this process.
        start: First byte in the file.
        content: The bytes; keeps the piece mapped.
    """

    address: int
    start: int
    content: Tensor


@final
class SharedMemory:
    """One file per rank, in which its tensors lie; each rank can map what is in the others'.

    Communicators that were split off one another use one ``SharedMemory``: their ranks are alive
    at the same time, and a tensor that lies here can be exchanged over each of them. It grows and
    never shrinks: a piece is given back when all of it is.

    A forked child sees what the rank sees, until it writes: a page that it writes to is its own.
    """

    def __init__(self, number: int) -> None:
        """Make an empty file.

        Args:
            number: Of this rank in the team.

        Raises:
            OSError: See ``create_file``.
        """
        file = _File()
        self._file: _File | None = file
        self.descriptor = file.descriptor
        self._number = number
        self._size = 0
        self._pieces: list[_Piece] = []
        #: Of each rank by number: its file, and what is mapped of it by first byte.
        self._files: dict[int, int] = {number: self.descriptor}
        self._mapped: dict[int, dict[int, Tensor]] = {number: {}}
        self._num_users = 1

    def use(self) -> None:
        """Count one more user, beside the one that has made this."""
        self._num_users += 1

    def release(self) -> None:
        """Count one user less; the last lets everything go but for tensors that are still held."""
        self._num_users -= 1
        if self._num_users == 0:
            self._close()

    def allocate(self, size: int) -> Tensor:
        """Return zeros, shape ``(size,)``, uint8, at the start of a page.

        Raises:
            OSError: See ``reserve``.
        """
        room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        start, file = self._size, self._file
        assert file is not None, "nothing is allocated after the end"
        reserve(self.descriptor, start, room)
        content = torch.frombuffer(_OwnPages(file, start, room).content(), dtype=torch.uint8)
        self._size += room
        self._pieces.append(_Piece(content.data_ptr(), start, content))
        self._mapped[self._number][start] = content
        return content[:size]

    def find(self, flat: Tensor) -> MemoryPlace:
        """Return where a tensor lies; ``ELSEWHERE`` where that is not in this rank's file."""
        address = flat.data_ptr()
        if flat.device.type == "cpu":
            for begin, start, content in self._pieces:
                size = content.numel()
                if begin <= address and address + flat.nbytes <= begin + size:
                    return MemoryPlace(start + address - begin, start, size)
        return ELSEWHERE

    def meet(self, number: int, descriptor: int) -> None:
        """Add the file of a peer; the descriptor belongs to this object from now on."""
        if number in self._files:
            os.close(descriptor)
        else:
            self._files[number] = descriptor
            self._mapped[number] = {}

    def view(self, number: int, place: MemoryPlace) -> Tensor:
        """Return the bytes of a rank's piece from ``place.offset`` on, uint8.

        Raises:
            OSError: It cannot be mapped.
        """
        mapped = self._mapped[number]
        if place.piece not in mapped:
            content = map_file(self._files[number], place.piece, place.size)
            mapped[place.piece] = torch.frombuffer(content, dtype=torch.uint8)
        return mapped[place.piece][place.offset - place.piece :]

    def leave_behind(self) -> None:
        """Close a forked child's copies of descriptors."""
        self._close()

    def _close(self) -> None:
        for number, descriptor in self._files.items():
            if number != self._number:
                os.close(descriptor)
        self._file = None
        self._files.clear()
        self._mapped.clear()
        self._pieces.clear()
