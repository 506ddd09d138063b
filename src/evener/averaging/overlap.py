"""Sums a window's gradients piece by piece, while backward computes those of other layers."""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from evener.averaging.feedback import ErrorFeedback
from evener.averaging.norms import norm_of, norms_of
from evener.comm.background import BackgroundJob
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.comm.flat_groups import FlatGroup
from evener.devices import Milestone, kind_of

_LOOK_S: Final = 1.0


@dataclass(slots=True, eq=False)
class Piece:
    """Gradients that are summed by one call.

    Attributes:
        group: Where they lie.
        start: First element in ``group.grad``.
        stop: Last-plus-one element there.
        indices: Flat numbers of its parameters.
        has_flags: Whether it is the flags of its group, which are known after the last backward.
        due: Gradients that are still to come before it leaves.
        made: The point in a device's queue at which its gradients are there; ``None`` if they
            are there when the host reports it.
        leaves_s: When it leaves, on ``time.monotonic``, if this rank's slowness is emulated.
        ready: Set when it may leave.
        has_left: Whether it has left.
    """

    group: FlatGroup
    start: int
    stop: int
    indices: list[int]
    has_flags: bool = False
    due: int = 0
    made: Milestone | None = None
    leaves_s: float = 0.0
    ready: threading.Event = field(default_factory=threading.Event)
    has_left: bool = False


@final
class OverlappedExchange:
    """Exchanges gradients in a thread of its own, while this rank's last backward is under way.

    In the first window with given ranks, nothing leaves: it is seen how many gradients each
    parameter gets, in which order, and how long backward takes. Then ``cut`` sets how large pieces
    are. A piece leaves as soon as its parameters have as many gradients as in the window before.
    Pieces leave in one order on all ranks. One rank may be far ahead of another: its pieces then
    wait for the other's. A gradient that comes after its piece has left is kept apart, and summed
    in an exchange of its own. So every sum is right, whatever the loop does; only its time may
    differ.

    On a device with a queue, pieces leave in streams of their own, behind what computes their
    gradients, and the host waits for nothing before ``judge``.

    What a round of rows leads to is not known while pieces leave. If any rank has begun, all take
    part to the end, also if the window is not applied: see ``join`` and ``discard``.

    Args:
        flat: The ranks' buffers.
        feedback: Of the buffers' gradients; exact by default.

    Attributes:
        feedback: As given.
        has_begun: Whether pieces of this window leave, or have left.
    """

    def __init__(self, flat: FlatBuffers, feedback: ErrorFeedback | None = None) -> None:
        self._flat = flat
        self.feedback = ErrorFeedback() if feedback is None else feedback
        self._comms: Sequence[Communicator] = ()
        self._jobs: list[BackgroundJob[None]] = []
        #: Bytes of a piece; 0 before ``cut``.
        self._piece_bytes = 0
        self._pieces: list[Piece] = []
        self._piece_of: list[Piece] = []
        self._hooks: list[RemovableHandle] = []
        #: By parameter, whether it was trained when hooks were placed.
        self._trained: list[bool] = []
        #: How many gradients each parameter has got in the last micro-batch of the window before.
        self._expected: list[int] = []
        self._counts: list[int] = []
        self._counts_now = False
        #: When each parameter's last gradient of the window came, as a number.
        self._arrived: list[int] = []
        self._num_arrived = 0
        #: Parameters that had no gradient when their pieces left.
        self._missing: set[int] = set()
        self._late: dict[int, Tensor] = {}
        self._has_late = self._is_abandoned = False
        #: How far this rank is ahead of the slower device that it emulates.
        self._ahead_s: Callable[[], float] = _not_ahead
        self._backward_end_s = math.inf
        #: When pieces of this window have begun and ceased to travel.
        self._travels: list[tuple[float, float]] = []
        #: Begins and ends of the backward passes of the last micro-batch.
        self._laps: list[Milestone | float] = []
        self._processor_s = 0.0
        self.has_begun = False
        #: Parameters, and the 2-norms of their gradients: of each one or of all together.
        self._measured: list[tuple[Sequence[int], Tensor]] = []
        self._non_finite: int | None = None

    @property
    def is_on(self) -> bool:
        """Return whether windows are exchanged in this way at all."""
        return bool(self._comms)

    @property
    def hidden_s(self) -> float:
        """Return the seconds for which pieces travelled before this rank's backward was over."""
        hidden_s = until_s = 0.0
        for start_s, end_s in sorted(self._travels):  # of several at once, too
            end_s = min(end_s, self._backward_end_s)
            hidden_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
        return hidden_s

    @property
    def is_late(self) -> bool:
        """Return whether a gradient has come after its piece had left."""
        return bool(self._late)

    def use(self, comms: Sequence[Communicator]) -> None:
        """Exchange over these, piece by piece in turns; with none, not at all."""
        self.abandon()
        self._comms = comms
        self._jobs = [BackgroundJob("evener-gradients") for _ in comms]
        self._close_hooks()
        self._piece_of = []  # ranks that have just come know no order
        self._piece_bytes = 0

    # ── backward ─────────────────────────────────────────────────────────────────────────────────

    def before_backward(self, window: int, ahead_s: Callable[[], float] | None = None) -> None:
        """Let pieces leave in the backward that comes, which is of the share's last micro-batch.

        Args:
            window: Its number.
            ahead_s: Returns how many seconds this rank is ahead of the slower device that it
                emulates, if it does: pieces leave so much later.
        """
        self._ahead_s = ahead_s or _not_ahead
        if not self._counts_now:
            self._count_anew()
            if self._piece_bytes and any(self._expected) and not self.has_begun:
                self._begin(window)
        elif self.has_begun:
            self._flat.hide(self._left())
        self._laps.append(self._now())
        self._processor_s -= time.process_time()

    def after_backward(self) -> None:
        """Keep apart what has come too late, and show gradients again."""
        if self._counts_now:
            self._laps.append(self._now())
            self._processor_s += time.process_time()
        if not self.has_begun:
            return
        for i, grad in self._flat.reveal(self._left()).items():
            self._late[i] = self._late[i] + grad if i in self._late else grad

    def _now(self) -> Milestone | float:
        device = self._flat.groups[0].data.device
        if kind_of(device).has_milestones:
            return kind_of(device).mark(device)
        return time.monotonic() + self._ahead_s()

    @property
    def backward_s(self) -> float:
        """Return the seconds of the last micro-batch's backward; wait until a device is done."""
        total_s = 0.0
        for start, end in zip(self._laps[::2], self._laps[1::2], strict=False):
            if isinstance(start, Milestone):
                assert isinstance(end, Milestone)
                total_s += start.seconds_to(end)
            else:
                assert isinstance(end, float)
                total_s += end - start
        return total_s

    @property
    def busy_cores(self) -> float:
        """Return how many cores that backward has kept busy, on average."""
        backward_s = self.backward_s
        return self._processor_s / backward_s if backward_s > 0.0 else 0.0

    def flush(self) -> list[Tensor]:
        """Let the rest leave, as no backward follows.

        Returns:
            Norms of gradients; ``judge`` takes their values.
        """
        flat = self._flat
        self._backward_end_s = time.monotonic()
        flat.settle()
        for piece in self._pieces:
            if not piece.has_left:
                if piece.has_flags:  # of a group, it is the last one
                    inside = self._missing - self._late.keys()
                    flat.flag(piece.group, inside.intersection(piece.group.indices))
                self._leave(piece)
        for i, grad in self._late.items():
            self._measure([i], [grad])
        return [norms for _, norms in self._measured]

    def judge(self, norms: Iterable[Sequence[float]]) -> int | None:
        """Return the first parameter whose gradient holds an inf or a NaN on this rank, if any.

        Args:
            norms: The values of what ``flush`` returned.
        """
        for (indices, _), values in zip(self._measured, norms, strict=True):
            for i, norm in zip(indices, values, strict=False):
                if not math.isfinite(norm):
                    return i if self._non_finite is None else self._non_finite
        return None

    def _count_anew(self) -> None:
        self._flat.add_unfrozen()
        parameters = self._flat.parameters
        if len(parameters) != len(self._piece_of):
            self._cut_anew()
        if self._trained != [parameter.requires_grad for parameter in parameters]:
            self._watch()
        self._counts, self._counts_now = [0] * len(parameters), True
        self._laps, self._processor_s = [], 0.0
        self._arrived, self._num_arrived = [0] * len(parameters), 0

    def _left(self) -> list[int]:
        return [i for piece in self._pieces if piece.has_left for i in piece.indices]

    @property
    def num_bytes(self) -> int:
        """Return how much is exchanged in a window."""
        return sum(group.grad.nbytes for group in self._flat.groups)

    def cut(self, piece_bytes: int) -> None:
        """Exchange in pieces of this size, above 0, from the next window on."""
        expected = self._expected
        self._piece_bytes = piece_bytes
        self._cut_anew()
        self._expected = expected

    def _cut_anew(self) -> None:
        """Cut the buffers, whose parameters may have become more, into pieces."""
        self._expected, self._pieces = [0] * len(self._flat.parameters), []
        least_bytes = self._piece_bytes or self.num_bytes
        pieces: dict[int, Piece] = {}
        for group, bucket in self._flat.buckets_of(None):
            flags_start = group.grad_values.numel()
            piece = Piece(group, bucket.start, min(bucket.stop, flags_start), [])
            self._pieces.append(piece)
            for i, offset in zip(group.indices, group.offsets, strict=True):
                if not bucket.start <= offset < bucket.stop:
                    continue
                if (offset - piece.start) * group.grad.element_size() >= least_bytes:
                    piece.stop, stop = offset, piece.stop
                    piece = Piece(group, offset, stop, [])
                    self._pieces.append(piece)
                piece.indices.append(i)
                pieces[i] = piece
            if bucket.stop > flags_start:
                self._pieces.append(Piece(group, flags_start, bucket.stop, [], has_flags=True))
        self._piece_of = [pieces[i] for i in range(len(pieces))]

    def _watch(self) -> None:
        """Register hooks for the gradients of the parameters that are trained now."""
        self._close_hooks()
        self._trained = [parameter.requires_grad for parameter in self._flat.parameters]
        # A parameter and its hook must not keep one another alive.
        arrive = partial(_arrive, weakref.ref(self))
        for i, parameter in enumerate(self._flat.parameters):
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(arrive, i))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)

    def arrive(self, i: int) -> None:
        """Count a gradient that autograd has accumulated."""
        if not self._counts_now:
            return
        self._counts[i] += 1
        self._num_arrived += 1
        self._arrived[i] = self._num_arrived
        piece = self._piece_of[i]
        if self.has_begun and self._counts[i] <= self._expected[i]:
            piece.due -= 1
            if not piece.due:
                self._leave_early(piece)

    @property
    def order(self) -> list[int]:
        """Return when this window has completed each parameter's gradient, as a number."""
        return self._arrived if self._counts_now else []

    def sort(self) -> None:
        """Let pieces leave in this order from the next window on; all ranks have the same."""
        if when := self.order:
            last = [max((when[i] for i in piece.indices), default=0) for piece in self._pieces]
            places = sorted(
                range(len(last)), key=lambda place: (self._pieces[place].has_flags, last[place])
            )
            self._pieces = [self._pieces[place] for place in places]

    # ── the exchange ─────────────────────────────────────────────────────────────────────────────

    def _begin(self, window: int) -> None:
        self.has_begun, self._is_abandoned = True, False
        self._backward_end_s = math.inf
        self._missing, self._measured, self._non_finite = set(), [], None
        for piece in self._pieces:
            piece.due = sum(self._expected[i] for i in piece.indices)
            piece.has_left = False
            piece.made, piece.leaves_s, piece.ready = None, 0.0, threading.Event()
            if not (piece.due or piece.has_flags):
                self._leave_early(piece)
        lost = [self.feedback.of(piece.group.grad) for piece in self._pieces]
        self._start(window, [piece.group.grad.data for piece in self._pieces], lost)

    def _start(
        self, window: int, buffers: Sequence[Tensor], losses: Sequence[Tensor | None]
    ) -> None:
        """Exchange the pieces of ``buffers``, one for each, with what was ``lost`` of those."""
        numbered = [
            (number, piece, buffer[piece.start : piece.stop], _part_of(lost, piece))
            for number, (piece, buffer, lost) in enumerate(
                zip(self._pieces, buffers, losses, strict=True)
            )
        ]
        step = len(self._comms)

        def exchange(comm: Communicator, first: int) -> None:
            for number, piece, tensor, lost in numbered[first::step]:
                while not piece.ready.wait(_LOOK_S):
                    if not threading.main_thread().is_alive():
                        return  # the script has ended without closing its team
                while not self._is_abandoned and (left_s := piece.leaves_s - time.monotonic()) > 0:
                    time.sleep(min(left_s, _LOOK_S))
                if self._is_abandoned:
                    return
                started_s = time.monotonic()
                device, made = tensor.device, piece.made
                with nullcontext() if made is None else kind_of(device).beside(device, made):
                    what = f"gradients of window {window}, piece {number}"
                    comm.all_reduce(tensor, what=what, lost=lost)
                self._travels.append((started_s, time.monotonic()))

        for first, (job, comm) in enumerate(zip(self._jobs, self._comms, strict=True)):
            job.start(partial(exchange, comm, first))

    def _leave_early(self, piece: Piece) -> None:
        piece.leaves_s = time.monotonic() + self._ahead_s()
        self._leave(piece)
        self._flat.hide(piece.indices)

    def _leave(self, piece: Piece) -> None:
        self._missing.update(self._flat.complete(piece.indices))
        group, device = piece.group, piece.group.grad.device
        if kind_of(device).has_milestones:
            each = [self._flat.place_of(i, group.grad) for i in piece.indices]
            self._measure(piece.indices, each)
        else:
            self._measure(piece.indices, [group.grad_values[piece.start : piece.stop]])
        self._release(piece)

    def _release(self, piece: Piece) -> None:
        device = piece.group.grad.device
        if kind_of(device).has_milestones:
            piece.made = kind_of(device).mark(device)
        piece.has_left = True
        piece.ready.set()

    def _measure(self, indices: Sequence[int], gradients: list[Tensor]) -> None:
        """Take norms, before sums take the gradients' places.

        The host sees at once what a processor computes. What a device computes it reads later, so
        that has a norm for each parameter, in float64, in which no finite gradient overflows.
        """
        if not gradients:
            return
        if kind_of(gradients[0].device).has_milestones:
            self._measured.append((indices, norms_of(gradients, torch.float64, each=True)))
            return
        norm = norm_of([gradients])
        self._measured.append((indices, torch.tensor([norm], dtype=torch.float64)))
        if not math.isfinite(norm) and self._non_finite is None:
            found = self._flat.first_non_finite(among=indices)
            self._non_finite = indices[0] if found is None else found  # a late one is not there

    def join(self, window: int, *, contributes: bool, has_late: bool) -> None:
        """Take part in what some rank has begun, with what ``gather`` has put into the buffers.

        Args:
            window: Its number.
            contributes: Whether the window is applied. Otherwise the buffers are left alone.
            has_late: Whether a rank has ``is_late``.
        """
        self._has_late = has_late
        if self.has_begun:
            return
        if len(self._flat.parameters) != len(self._piece_of):
            self._cut_anew()
        self.has_begun, self._is_abandoned, self._late = True, False, {}
        self._backward_end_s = 0.0
        for piece in self._pieces:
            piece.made, piece.leaves_s, piece.ready = None, 0.0, threading.Event()
        buffers = {piece.group.grad: piece.group.grad.data for piece in self._pieces}
        losses = {grad: self.feedback.of(grad) for grad in buffers}
        if not contributes:
            buffers = {grad: torch.zeros_like(grad) for grad in buffers}
            losses = {
                grad: None if lost is None else torch.zeros_like(lost)
                for grad, lost in losses.items()
            }
        for piece in self._pieces:
            self._release(piece)
        grads = [piece.group.grad for piece in self._pieces]
        self._start(window, [buffers[grad] for grad in grads], [losses[grad] for grad in grads])

    def finish(self) -> None:
        """Wait until the buffers hold the sums; all ranks call it together."""
        try:
            for job in self._jobs:
                job.wait()
            if self._has_late:
                self._add_late()
        except BaseException:
            for comm in self._comms:  # or another piece may land in a later window
                comm.close()
            self.abandon()
            raise
        self._reset()

    def _add_late(self) -> None:
        comm = self._comms[0]
        for number, group in enumerate(self._flat.groups):
            late = torch.zeros_like(group.grad)
            for i in group.indices:
                if i in self._late:
                    self._flat.place_of(i, late).copy_(self._late[i])
            comm.all_reduce(late, what=f"late gradients, group {number}")
            group.grad.add_(late)

    def discard(self) -> None:
        """Wait until all have taken part; forget the sums, and what rounding took from them."""
        if self.has_begun:
            for piece in self._pieces:
                piece.has_left = True
                piece.ready.set()
            self._has_late = False
            self.finish()
            self.feedback.clear()

    def abandon(self) -> None:
        """End what is under way, whose connections are closed; idempotent."""
        self._comms = ()
        if self.has_begun:
            self._is_abandoned = True
            for piece in self._pieces:
                piece.ready.set()
            for job in self._jobs:
                job.close()
            self._reset()

    def _reset(self) -> None:
        self.has_begun, self._has_late, self._late = False, False, {}

    def end_window(self, *, is_applied: bool) -> None:
        """Count again in the next window.

        Args:
            is_applied: Whether to expect as many gradients there as in this one.
        """
        if self._counts_now and is_applied:
            self._expected = self._counts
        self._counts_now = False
        self._travels = []

    def _close_hooks(self) -> None:
        self._trained = []
        while self._hooks:
            self._hooks.pop().remove()

    def close(self) -> None:
        """End what is under way, whose connections are closed, and remove the hooks; idempotent."""
        self.abandon()
        self._close_hooks()


def _not_ahead() -> float:
    return 0.0


def _part_of(lost: Tensor | None, piece: Piece) -> Tensor | None:
    return None if lost is None else lost[piece.start : piece.stop]


def _arrive(weak: "weakref.ref[OverlappedExchange]", i: int, _: Tensor) -> None:
    overlap = weak()
    if overlap is not None:
        overlap.arrive(i)
