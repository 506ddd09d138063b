"""What the thread of ASYNC hands back: errors that hold nothing, and results to nobody else."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from evener.comm import background
from evener.comm.background import BackgroundJob
from helpers.limits import PATIENCE_S


class Handle:
    """Stands for one of a process group, which must go with the last reference."""


class LostError(Exception):
    """What an exchange raises."""


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
def test_an_error_that_was_caught_keeps_no_handle_alive() -> None:
    held: list[weakref.ref[Handle]] = []
    job: BackgroundJob[None] = BackgroundJob("flight")

    def exchange() -> None:
        own = Handle()
        held.append(weakref.ref(own))
        raise LostError

    def land() -> None:
        own = Handle()
        held.append(weakref.ref(own))
        job.wait()

    job.start(exchange)
    with pytest.raises(LostError) as caught:
        land()
    del caught
    assert [handle() for handle in held] == [None, None]
    job.close()


def test_a_stale_exchange_hands_its_result_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_LIMIT_S", 0.0)
    job: BackgroundJob[str] = BackgroundJob("flight")
    hangs, continues = threading.Event(), threading.Event()
    job.start(lambda: "stale" if hangs.wait(PATIENCE_S) else "late")
    (thread,) = [one for one in threading.enumerate() if one.name == "flight"]
    job.close()  # gives up
    job.start(lambda: "new" if continues.wait(PATIENCE_S) else "late")
    hangs.set()
    thread.join(PATIENCE_S)
    is_ready = job.ready
    continues.set()
    assert not is_ready, "the new exchange is under way"
    assert job.wait() == "new"
