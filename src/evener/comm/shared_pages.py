"""The control page of each rank: it alone writes there, and all others read."""

import json
import mmap
import os
import platform
import struct
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from evener.comm.notices import Notice, NoticeBoard
from evener.comm.shared_memory import MemoryPlace, create_file, map_file, reserve

#: Whether other cores see one core's writes in order, so that a flag may follow data. Python has no
#: fences with which to enforce it elsewhere.
KEEPS_ORDER: Final = platform.machine() in ("x86_64", "AMD64")

# Each word has two cache lines of its own: processors fetch lines in pairs.
_ARRIVED = 0
_ASLEEP = 16
_ENDED = 32
_NOTICE = 1024
_CELLS = 4096
_NOTICE_BYTES = _CELLS - _NOTICE
#: What fits beside the header of a cell travels there, and needs one barrier only.
PAYLOAD_BYTES: Final = 8192
# Number of the call, bytes of payload, checksum of label, label; then what differs by rank: place.
_CALL = struct.Struct("=qqq88s")
_PLACE = struct.Struct("=qqq")
_HEADER_BYTES = 256
_CELL_BYTES = _HEADER_BYTES + PAYLOAD_BYTES
_STAGE = -(-(_CELLS + 2 * _CELL_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
#: Bytes of a tensor outside of shared memory that are copied into it at a time; a multiple of
#: every element size.
STAGE_BYTES: Final = 2 << 20
PAGE_BYTES: Final = _STAGE + 2 * STAGE_BYTES


class Header(NamedTuple):
    """The call that a rank is in, which must be the same on all ranks.

    Attributes:
        number: Its number.
        size: Bytes of payload in the cell.
        checksum: Of its label.
        label: Its label, as far as it fits; padded with zeros.
    """

    number: int
    size: int
    checksum: int
    label: bytes


@final
class ControlPage:
    """The progress of one rank, the place of its tensor, and copies of tensors that lie elsewhere.

    There are two cells, used in turn: when a rank fills one again, all have read its content,
    because each has arrived with the other cell since. So it is with the two halves of the stage.

    Attributes:
        stage: ``(2, STAGE_BYTES)``, uint8; where tensors outside of shared memory are copied to.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the page of a rank; its memory is reserved."""
        self.content = map_file(descriptor, 0, PAGE_BYTES)
        self._words = self.content.cast("q")
        whole = torch.frombuffer(self.content, dtype=torch.uint8)
        self.stage = whole[_STAGE:].view(2, STAGE_BYTES)
        self._lock = threading.Lock()

    @staticmethod
    def create() -> int:
        """Return the descriptor of a new page, all zero.

        Raises:
            OSError: There is no memory for it, or the kernel refuses such files.
        """
        descriptor = create_file("evener-control")
        try:
            reserve(descriptor, 0, PAGE_BYTES)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    @property
    def arrived(self) -> int:
        """Return the last barrier at which the rank has arrived."""
        return self._words[_ARRIVED]

    def arrive(self, number: int) -> None:
        """Write that this rank has arrived at a barrier."""
        self._words[_ARRIVED] = number

    @property
    def asleep(self) -> int:
        """Return the barrier in which it sleeps and must be woken up; 0 for none."""
        return self._words[_ASLEEP]

    def sleep(self, number: int) -> None:
        """Write that this rank sleeps in a barrier; 0 for none."""
        self._words[_ASLEEP] = number

    @property
    def ended(self) -> int:
        """Return the barrier that it will not pass any more; 0 for none."""
        return self._words[_ENDED]

    def end(self, number: int) -> None:
        """Write that this rank does not pass a barrier any more."""
        self._words[_ENDED] = number

    def fence(self) -> None:
        """Make this thread's writes visible to others before it reads anything.

        Taking a lock is an instruction that x86 processors do not reorder with reads or writes.
        """
        with self._lock:
            pass

    def write(self, parity: int, header: bytes, place: MemoryPlace) -> None:
        """Fill a cell, but for its payload."""
        start = _CELLS + parity * _CELL_BYTES
        self.content[start : start + _CALL.size] = header
        _PLACE.pack_into(self.content, start + _CALL.size, *place)

    def header(self, parity: int) -> bytes:
        """Return the packed header in a cell."""
        start = _CELLS + parity * _CELL_BYTES
        return bytes(self.content[start : start + _CALL.size])

    def place(self, parity: int) -> MemoryPlace:
        """Return the place that a cell tells."""
        return MemoryPlace(
            *_PLACE.unpack_from(self.content, _CELLS + parity * _CELL_BYTES + _CALL.size)
        )

    def payload(self, parity: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the front of a cell's payload as a tensor."""
        start = payload_start(parity)
        return torch.frombuffer(self.content, dtype=dtype, count=numel, offset=start)

    @property
    def notice(self) -> Notice | None:
        """Return why the rank gave up waiting, if it did."""
        text = bytes(self.content[_NOTICE:_CELLS]).partition(b"\0")[0]
        return Notice(*json.loads(text)) if text else None

    def post(self, notice: Notice) -> None:
        """Write why this rank gives up waiting."""
        text = json.dumps(notice._replace(what=notice.what[: (_NOTICE_BYTES - 128) // 12])).encode()
        # The first byte last: who reads it before finds no notice yet.
        self.content[_NOTICE + 1 : _NOTICE + len(text)] = text[1:]
        self.content[_NOTICE] = text[0]


def payload_start(parity: int) -> int:
    """Return at which byte of ``ControlPage.content`` a cell's payload begins."""
    return _CELLS + parity * _CELL_BYTES + _HEADER_BYTES


def pack_header(header: Header) -> bytes:
    """Return a header as it lies in a cell."""
    return _CALL.pack(*header)


def unpack_header(packed: bytes) -> Header:
    """Return what ``pack_header`` has packed."""
    return Header(*_CALL.unpack(packed))


@final
class PageNotices(NoticeBoard):
    """Notices on the ranks' own pages."""

    def __init__(self, numbers: Sequence[int], pages: Sequence[ControlPage]) -> None:
        """Use the pages of these ranks.

        Args:
            numbers: The ranks' numbers in the team.
            pages: The page of each.
        """
        super().__init__(numbers)
        self._pages = dict(zip(numbers, pages, strict=True))

    def post(self, rank: int, notice: Notice) -> bool:
        """Write a notice on the rank's page."""
        self._pages[rank].post(notice)
        return True

    def read(self) -> dict[int, Notice] | None:
        """Return the notices by number of the rank."""
        told = {number: page.notice for number, page in self._pages.items()}
        return {number: notice for number, notice in told.items() if notice is not None}
