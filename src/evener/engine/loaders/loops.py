"""A user's loop over a loader, as it stands in the code: which errors come from its body."""

import dis
import re
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import wraps
from types import CodeType
from typing import Any, ParamSpec

from evener.places import users_frame

P = ParamSpec("P")


@dataclass(slots=True)
class UserLoop:
    """A loop that has asked a loader for its first batch.

    Attributes:
        code: The code that the loop is part of; ``None`` where it is not the user's.
        start: Offset of the instruction that asks for the next batch.
        place: File and line, for people.
        skipped: Why the body did not run on this rank; empty where it did, or may yet.
    """

    code: CodeType | None = None
    start: int = -1
    place: str = ""
    skipped: str = field(default="", init=False)

    @classmethod
    def here(cls) -> "UserLoop":
        """Return the loop that this call was made under."""
        frame = users_frame()
        if frame is None:
            return cls()
        code = frame.f_code
        return cls(code, frame.f_lasti, f"{code.co_filename}:{frame.f_lineno}")

    def skip(self, why: str) -> None:
        """Say why the body does not run on this rank, or that it does, with an empty text."""
        self.skipped = why

    def holds(self, error: BaseException) -> bool:
        """Return whether an exception has passed through the loop's body."""
        body = self._body()
        return any(body[0].offset <= at <= body[-1].offset for at in self._passed(error) if body)

    def explain(self, error: BaseException, rank: int) -> str:
        """Return why a name has no value after a loop whose body did not run; empty otherwise.

        Args:
            error: Any exception; only a ``NameError`` about a name that the body sets counts.
            rank: This rank.
        """
        found = re.search("'(.+?)'", str(error)) if isinstance(error, NameError) else None
        if not (found and self.skipped and self._passed(error) and self._sets(found[1])):
            return ""
        return (
            f"evener: the body of the loop at {self.place} did not run on rank {rank}: "
            f"{self.skipped}. So {found[1]!r} has no value here. The result of a window is the "
            "same on every rank. Remedy: set last = None before the loop, keep "
            "`if result := ddp.step(): last = result` in it, and use last.loss (that is "
            "result.loss, the mean over all ranks) where last is not None; or use result.loss in "
            "ddp.on_commit(fn), which runs for every window on every rank that is not parked"
        )

    def _passed(self, error: BaseException) -> list[int]:
        """Return where in the loop's code, as offsets, an exception has passed through."""
        offsets, entry = [], error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code is self.code:
                offsets.append(entry.tb_lasti)
            entry = entry.tb_next
        return offsets

    def _body(self) -> list[dis.Instruction]:
        """Return the instructions of the body; none where this is not a ``for`` loop."""
        code = list(dis.get_instructions(self.code)) if self.code is not None else []
        ends = (i.argval for i in code if i.offset == self.start and i.opname == "FOR_ITER")
        end = next(ends, self.start)
        return [i for i in code if self.start <= i.offset < end]

    def _sets(self, name: str) -> bool:
        """Return whether the body sets the name."""
        return any(
            name == i.argval or (isinstance(i.argval, tuple) and name in i.argval)
            for i in self._body()
            if i.opname.startswith("STORE_")
        )


def closed_at_exit(
    epoch: Callable[P, Generator[Any, None, None]],
) -> Callable[P, Generator[Any, None, None]]:
    """Close generators that a script still holds when it ends, as after ``it = iter(loader)``.

    Python would end them after it has cleared modules, so their own code would fail.
    """

    @wraps(epoch)
    def open_epoch(*args: P.args, **kwargs: P.kwargs) -> Generator[Any, None, None]:
        batches = epoch(*args, **kwargs)
        weakref.finalize(batches, _close, weakref.ref(batches))
        return batches

    return open_epoch


def _close(held: weakref.ref[Generator[Any, None, None]]) -> None:
    if (batches := held()) is not None:
        batches.close()
