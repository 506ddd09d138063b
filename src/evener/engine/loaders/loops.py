"""A user's loop over a loader, as it stands in the code: which errors come from its body."""

import dis
import re
from dataclasses import dataclass, field
from types import CodeType

from evener.places import users_frame


@dataclass(slots=True)
class Loop:
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
    skipped: str = field(default="", kw_only=True)

    @classmethod
    def here(cls) -> "Loop":
        """Return the loop that this call was made under."""
        frame = users_frame()
        if frame is None:
            return cls()
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        return cls(frame.f_code, frame.f_lasti, place)

    def holds(self, error: BaseException) -> bool:
        """Return whether an exception has passed through the loop's body."""
        body, entry = self._body(), error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code is self.code and entry.tb_lasti in body:
                return True
            entry = entry.tb_next
        return False

    def explain(self, error: BaseException, rank: int) -> str:
        """Return why a name has no value after a loop whose body did not run; empty otherwise.

        Args:
            error: Any exception; only a ``NameError`` about a name that the body sets counts.
            rank: This rank.
        """
        found = re.search("'(.+?)'", str(error)) if isinstance(error, NameError) else None
        if found is None or not self.skipped or not self._sets(found[1], error):
            return ""
        return (
            f"evener: the body of the loop at {self.place} did not run on rank {rank}: "
            f"{self.skipped}. So {found[1]!r} has no value here. The result of a window is the "
            "same on every rank. Remedy: set last = None before the loop, keep "
            "`if result := ddp.step(): last = result` in it, and use last.loss (that is "
            "result.loss, the mean over all ranks) where last is not None; or use result.loss in "
            "ddp.on_commit(fn), which runs for every window on every rank that is not parked"
        )

    def _body(self) -> range:
        """Offsets of the body's instructions; empty where this is not a ``for`` loop."""
        for instruction in dis.get_instructions(self.code) if self.code is not None else ():
            if instruction.offset == self.start and instruction.opname == "FOR_ITER":
                return range(self.start, instruction.argval)
        return range(0)

    def _sets(self, name: str, error: BaseException) -> bool:
        """Return whether the body sets the name, and the error came through the same code."""
        entry = error.__traceback__
        while entry is not None and entry.tb_frame.f_code is not self.code:
            entry = entry.tb_next
        if self.code is None or entry is None:
            return False
        body = self._body()
        return any(
            name == i.argval or (isinstance(i.argval, tuple) and name in i.argval)
            for i in dis.get_instructions(self.code)
            if i.offset in body and i.opname.startswith("STORE_")
        )
