import os
import signal
import threading
from multiprocessing.connection import wait

import pytest

from evener.team.signals import STOPPING, SignalQueue, StopSignals
from helpers.limits import PATIENCE_S


def handlers():
    return [signal.getsignal(signum) for signum in (*STOPPING, signal.SIGHUP, signal.SIGCHLD)]


@pytest.mark.parametrize("signum", STOPPING)
def test_a_stop_request_is_noted_and_handlers_are_put_back(signum):
    before = handlers()
    with StopSignals() as signals:
        assert signals.requested is None
        assert signals.exit_code(stopped=False) == 0
        assert signals.exit_code(stopped=True) == 143, "the signal went to another rank"
        os.kill(os.getpid(), signum)
        assert signals.requested is signum
    assert signals.exit_code(stopped=True) == 128 + signum
    assert handlers() == before


def test_who_presses_ctrl_c_thrice_waits_for_nothing():
    with StopSignals() as signals:
        for _ in range(2):  # one Ctrl-C, under torchrun
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested is signal.SIGINT


def test_ignored_signals_stay_ignored():
    previous = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert signals.requested is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_does_nothing_outside_the_main_thread():
    before, seen = handlers(), []

    def enter():
        with StopSignals() as signals:
            seen.extend([signals.requested, *handlers()])

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(PATIENCE_S)
    assert seen == [None, *before]


def test_the_queue_hands_out_signals_in_order_and_puts_handlers_back():
    before = handlers()
    with SignalQueue() as queue:
        assert queue.take() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGCHLD)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert wait([queue.fileno()], 10)
        assert queue.take() == [signal.SIGTERM, signal.SIGUSR1]
        assert queue.take() == []
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1
