"""A job that runs when its result is asked for, or in a thread before."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, Generic, TypeVar, final

T = TypeVar("T")

#: Longest that ``close`` waits for a job.
_LIMIT_S: Final = 10.0


@final
class BackgroundJob(Generic[T]):
    """Runs one job at a time.

    In the background, each job has its own thread, which is not a daemon. So no thread waits for
    work if a script ends without closing its team, and none is killed inside a collective while the
    interpreter shuts down. Each has its own future: the result of a job that ``close`` has given up
    is dropped.

    Args:
        thread_name: Name of the threads; empty to run jobs inside ``wait``.
    """

    def __init__(self, thread_name: str) -> None:
        self._name = thread_name
        self._thread: threading.Thread | None = None
        self._run: Callable[[], T] | None = None
        self._future: Future[T] = Future()

    def start(self, run: Callable[[], T]) -> None:
        """Take a job, and begin it in the background; the previous one has ended."""
        if not self._name:
            self._run = run
            return
        self._future = Future()
        args = (run, self._future)
        self._thread = threading.Thread(target=_finish, args=args, name=self._name)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Return whether ``wait`` would not wait for a thread."""
        return not self._name or self._future.done()

    def wait(self) -> T:
        """Return the result of the job, which has deadlines of its own; raise what it raised."""
        if not self._name:
            run, self._run = self._run, None
            assert run is not None, "no job was started"
            return run()
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
        """Wait for a job that is under way, which has been asked to end, and forget it."""
        self._run = None
        if self._thread is not None:
            self._thread.join(_LIMIT_S)
            self._thread = None


def _finish(run: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(run())
    except BaseException as error:
        # Drop the frames: they would keep handles of a broken group alive, and ranks that are not
        # neighbours of the lost one would then hang.
        error.__context__ = error.__cause__ = None
        future.set_exception(error.with_traceback(None))
