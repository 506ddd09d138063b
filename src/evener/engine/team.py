"""The team as one rank sees it: who is in it, and meetings that all must join alike."""

import json
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch

from evener.comm.base import Communicator
from evener.devices import kind_of
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ProtocolError,
)
from evener.places import here
from evener.version import __version__


class Meeting(IntEnum):
    """What a rank wants when it meets the others; all must want the same."""

    PLAN = 1
    CALIBRATION = 2
    WINDOW = 3
    FLUSH = 4
    MEAN = 5
    SAVE = 6
    REHEARSAL = 7
    PARKED = 8
    CALL = 9
    IDLE = 10
    STEP = 11
    EVALUATE = 12
    GATHER = 13

    @property
    def deed(self) -> str:
        """The meeting in words, for errors."""
        return {
            Meeting.PLAN: "starting an epoch (loader.epoch)",
            Meeting.CALIBRATION: "timing its device before the first window",
            Meeting.WINDOW: "closing a window (ddp.step, or the loader of a rank without a share)",
            Meeting.FLUSH: "ending an epoch (the loader is exhausted, or break has left it)",
            Meeting.MEAN: "averaging a value (ddp.weighted_mean)",
            Meeting.SAVE: "saving (ddp.save)",
            Meeting.REHEARSAL: "measuring speeds",
            Meeting.PARKED: "parked, waiting to be called back",
            Meeting.CALL: "calling parked ranks",
            Meeting.IDLE: "waiting in the loader, with nothing to do in this window",
            Meeting.STEP: "closing a window (ddp.step, outside of a map-style ddp.loader)",
            Meeting.EVALUATE: "starting an evaluation (iterating over its loader)",
            Meeting.GATHER: "gathering rows (ddp.gather, or the end of an evaluation's loop)",
        }[self]


# What a rank without work may take part in: it goes along with whatever the others do.
_WITH_IDLE = (Meeting.WINDOW, Meeting.FLUSH, Meeting.STEP, Meeting.IDLE)


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


class Team:
    """Members joined by a communicator.

    Every exchange starts with a *meeting*: a row of float64 that says what the rank wants, in
    which window, and whether it wants to stop. Ranks that want different things find out there,
    before any tensor is exchanged, instead of hanging or mixing unlike data.
    """

    def __init__(self, comm: Communicator, *, payload_length: int) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.world_size = comm.world_size
        self.payload_length = payload_length
        #: Whether ranks have come for different things, after which nothing is certain.
        self.is_at_odds = False

    def meet(
        self,
        kind: Meeting,
        *,
        window: int,
        leaving: int = 0,
        payload: Sequence[float] = (),
        timeout_s: float | None = None,
    ) -> tuple[list[list[float]], int]:
        """Exchanges a row with every member; all ranks call it together.

        Args:
            kind: What this rank wants.
            window: This rank's window counter; must be the same everywhere.
            leaving: 0 goes on; 1 wants to stop after this window; 2 wants to drop this window.
            payload: At most ``payload_length`` numbers, padded with zeros.
            timeout_s: Deadline; ``None`` takes the communicator's.

        Returns:
            The payloads in rank order, and the largest ``leaving`` of all ranks.

        Raises:
            CollectiveMismatchError: Ranks came for different things.
        """
        if len(payload) > self.payload_length:
            raise ProtocolError(
                f"payload of {len(payload)} numbers, room for {self.payload_length}"
            )
        padding = [0.0] * (self.payload_length - len(payload))
        row = [float(kind), float(window), float(leaving), *payload, *padding]
        # The same words on every rank: what a rank wants is in its row, so that ranks which want
        # different things meet all the same, and each can say who wanted what.
        try:
            rows = self.comm.all_gather_rows(row, what="a meeting of the team", timeout_s=timeout_s)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(
                f"{error} (rank {self.comm.number} was {kind.deed} in window {window})",
                missing=error.missing,
            ) from None
        if not _fits(rows):
            self.is_at_odds = True
            raise CollectiveMismatchError(_mismatch(self.comm.numbers, rows, self._places()))
        return [r[3:] for r in rows], int(max(r[2] for r in rows))

    def _places(self) -> list[str]:
        """Where each rank is in the user's code, as far as ranks can say it."""
        try:
            told = self.comm.all_gather_bytes(
                here().encode(), what="places of ranks", timeout_s=min(10.0, self.comm.timeout_s)
            )
        except CollectiveError:
            return [""] * self.world_size
        return [place.decode() for place in told]

    def introduce(
        self, greeting: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> list[dict[str, Any]]:
        """Gives every rank every rank's greeting, in rank order; all ranks call it together."""
        payload = json.dumps(greeting).encode()
        answers = self.comm.all_gather_bytes(payload, what="greetings", timeout_s=timeout_s)
        return [json.loads(answer) for answer in answers]


def _fits(rows: Sequence[Sequence[float]]) -> bool:
    """Whether all ranks have come for the same."""
    present = [r for r in rows if r[0] != Meeting.PARKED] or rows
    if any(r[1] != present[0][1] for r in present):
        return False
    busy = {r[0] for r in present if r[0] != Meeting.IDLE} or {float(Meeting.IDLE)}
    if len(busy) > 1:
        return False
    kind = busy.pop()
    if any(r[0] == Meeting.IDLE for r in present) and kind not in _WITH_IDLE:
        return False
    return len(present) == len(rows) or kind == Meeting.CALL


def _mismatch(numbers: Sequence[int], rows: Sequence[Sequence[float]], users: Sequence[str]) -> str:
    deeds = [
        f"rank {number} is {Meeting(int(row[0])).deed}{place and f' at {place}'}"
        for number, row, place in zip(numbers, rows, users, strict=True)
    ]
    places = {int(row[1]) for row in rows}
    where = f"in window {places.pop()}" if len(places) == 1 else f"in windows {sorted(places)}"
    kinds = {int(row[0]) for row in rows}
    if kinds == {Meeting.STEP, Meeting.FLUSH}:
        why = (
            "Over a stream, or without ddp.loader, every rank has to make as many updates. Remedy: "
            "leave a loop over a stream on all ranks at the same ddp.window; without a loader, one "
            "that has nothing left goes along, by ddp.backward(loss, weight=0) or, with a "
            "DistributedTrainer, train_batch(None); DistributedTrainer.train_epoch does so itself"
        )
    elif Meeting.GATHER in kinds:
        why = (
            "Remedy: call ddp.gather on all ranks equally often in each round of an evaluation's "
            "loop, and leave that loop on all ranks in the same round. To evaluate on fewer "
            "samples, give ddp.eval_loader a torch.utils.data.Subset instead"
        )
    else:
        why = (
            "Ranks go round the loop a different number of times, so a local counter must not "
            "decide about a collective. Remedy: call it in ddp.on_commit(fn), which runs on every "
            "rank, or after the epoch"
        )
    return f"ranks joined different collectives {where}: {'; '.join(deeds)}. {why}"


def describe_self(
    rank: int,
    local_rank: int,
    device: torch.device,
    *,
    emulated: float,
    versions: Mapping[str, str],
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
        versions=versions,
        precision=precision,
    )


def own_versions() -> dict[str, str]:
    """Versions of Python, torch and evener in this process."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "evener": __version__,
    }


def member_document(member: Member) -> dict[str, Any]:
    """The member as plain JSON types."""
    return {**asdict(member), "versions": dict(member.versions)}
