"""Runs the exchange of a window of local steps: at its landing, or in a thread before."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar, final

from torch import Tensor

from evener.engine.results import Round
from evener.planning.local_plan import LocalPlan

T = TypeVar("T")

#: Longest that ``close`` waits for a job.
_LIMIT_S: Final = 10.0


class Exchanged(NamedTuple):
    """The result of an exchange.

    Attributes:
        over: The plan of the window.
        found: Its first round.
        next_plan: As numbers; none when something was not finite.
        differences: The exchanged buffers, where a rank has changed any.
    """

    over: LocalPlan
    found: Round
    next_plan: tuple[float, ...] = ()
    differences: Tensor | None = None


class Exchanger(Generic[T]):
    """Runs one job at a time, inside ``wait``."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], T]] = []

    def start(self, job: Callable[[], T]) -> None:
        """Take a job; the previous one has ended."""
        self._jobs.append(job)

    @property
    def ready(self) -> bool:
        """Return whether ``wait`` would return without waiting for a thread."""
        return True

    def wait(self) -> T:
        """Return the result of the job; raises what the job has raised."""
        return self._jobs.pop()()

    def close(self) -> None:
        """Wait for a job that is under way, which has been told to end, and forget all."""
        self._jobs.clear()


@final
class BackgroundExchanger(Exchanger[T]):
    """Runs each job in a thread of its own.

    Each job has its own thread, which is not a daemon. So no thread waits for work if a script ends
    without closing its team, and none is killed inside a collective while the interpreter shuts
    down.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._thread: threading.Thread | None = None
        self._done = threading.Event()

    def start(self, job: Callable[[], T]) -> None:
        """Begin the job in a thread."""
        self._done.clear()
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Return whether the job has ended."""
        return self._done.is_set()

    def wait(self) -> T:
        """Wait for the job; it has deadlines of its own."""
        assert self._thread is not None
        while not self._done.wait(0.2):  # in slices, so that signal handlers run in between
            pass
        self._thread.join()
        self._thread = None
        return super().wait()

    def close(self) -> None:
        """Wait for a job that is under way, and forget its result."""
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
            self._thread = None
        super().close()

    def _run(self, job: Callable[[], T]) -> None:
        try:
            result = job()
            self._jobs.append(lambda: result)
        except BaseException as error:
            # Drop the frames: they would keep handles of a broken group alive, and ranks that are
            # not neighbours of the lost one would then hang.
            error.__context__ = error.__cause__ = None
            self._jobs.append(partial(_raise, error.with_traceback(None)))
        finally:
            self._done.set()


def _raise(error: BaseException) -> NoReturn:
    try:
        raise error
    finally:
        del error  # or its traceback would hold this frame, and this frame the error
