"""Runs the exchange of a window of local steps: at its landing, or in a thread before."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, Generic, NamedTuple, TypeVar, final

from torch import Tensor

from evener.engine.results import Round
from evener.planning.plans import LocalPlan

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
        self._job: Callable[[], T] | None = None

    def start(self, job: Callable[[], T]) -> None:
        """Take a job; the previous one has ended."""
        self._job = job

    @property
    def ready(self) -> bool:
        """Return whether ``wait`` would return without waiting for a thread."""
        return True

    def wait(self) -> T:
        """Return the result of the job; raises what the job has raised."""
        job, self._job = self._job, None
        assert job is not None, "no job was started"
        return job()

    def close(self) -> None:
        """Wait for a job that is under way, which has been told to end, and forget it."""
        self._job = None


@final
class BackgroundExchanger(Exchanger[T]):
    """Runs each job in a thread of its own.

    Each job has its own thread, which is not a daemon. So no thread waits for work if a script ends
    without closing its team, and none is killed inside a collective while the interpreter shuts
    down. Each has its own future: a job that ``close`` has given up gives its result to nobody.

    Args:
        name: Name of the threads.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._thread: threading.Thread | None = None
        self._future: Future[T] = Future()

    def start(self, job: Callable[[], T]) -> None:
        """Begin the job in a thread."""
        self._future = Future()
        run = partial(_run, job, self._future)
        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Return whether the job has ended."""
        return self._future.done()

    def wait(self) -> T:
        """Wait for the job; it has deadlines of its own."""
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(0.2)  # in slices, so that signal handlers run in between
        self._thread = None
        future, self._future = self._future, Future()
        try:
            return future.result()
        finally:
            del future  # or the traceback would hold this frame, and this frame the error

    def close(self) -> None:
        """Wait for a job that is under way, and forget its result."""
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
            self._thread = None


def _run(job: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:
        # Drop the frames: they would keep handles of a broken group alive, and ranks that are not
        # neighbours of the lost one would then hang.
        error.__context__ = error.__cause__ = None
        future.set_exception(error.with_traceback(None))
