"""What the thread of ASYNC hands back: results, and errors that hold nothing."""

import gc
import weakref

import pytest

from evener.comm.background import BackgroundJob


class Handle:
    """Stands for one of a process group, which must go with the last reference."""


class LostError(Exception):
    """What an exchange raises."""


@pytest.fixture
def exchanger():
    with_thread = BackgroundJob("test")
    yield with_thread
    with_thread.close()


@pytest.fixture
def _without_collector():
    gc.disable()
    yield
    gc.enable()


def test_the_result_of_a_job_comes_back(exchanger):
    exchanger.start(lambda: 7)
    assert exchanger.wait() == 7


@pytest.mark.usefixtures("_without_collector")
def test_an_error_that_was_caught_keeps_no_handle_alive(exchanger):
    def exchange() -> None:
        own = Handle()
        held.append(weakref.ref(own))
        raise LostError

    def land() -> None:
        own = Handle()
        held.append(weakref.ref(own))
        exchanger.wait()

    held: list[weakref.ref[Handle]] = []
    exchanger.start(exchange)
    with pytest.raises(LostError) as caught:
        land()
    del caught
    assert [handle() for handle in held] == [None, None]
