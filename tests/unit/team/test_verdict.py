import signal
from dataclasses import replace

import pytest

from evener.team.failures import FailureReport, ProcessRecord, first_failure, judge


def report(rank, time, kind="ValueError", *, follow_up=False, user_error=False, code=1, text=""):
    return FailureReport(
        time=time,
        kind=kind,
        message=text or f"message of {kind}",
        traceback=f"Traceback of rank {rank}\n{kind}\n",
        user_error=user_error,
        follow_up=follow_up,
        exit_code=code,
    )


def outcome(rank, code=0, time=0.0, what=None, signals=()):
    return ProcessRecord(
        rank=rank,
        pid=100 + rank,
        code=code,
        time=time,
        report=what,
        signals=set(signals),
    )


def left(rank, time, code):
    return report(rank, time, "SystemExit", code=code)


def lost(rank, time):
    return report(rank, time, "PeerLostError", follow_up=True)


@pytest.mark.parametrize(
    ("outcomes", "first"),
    [
        # by the time in the report, not by when the process was gone
        ([outcome(0, 1, 5.0, report(0, 2.0)), outcome(1, 1, 4.0, report(1, 3.0))], 0),
        # an error about other ranks follows from one of theirs, even if it was noticed earlier
        ([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, 1, 3.0, report(1, 2.0))], 1),
        ([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, -9, 3.0)], 1),
        ([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, 3, 3.0)], 1),
        ([outcome(0, 1, 2.0, lost(0, 2.0)), outcome(1, 1, 3.0, lost(1, 1.0))], 1),
        # doing what the launcher said is no failure
        ([outcome(0, -15, 1.0, signals=[15]), outcome(1, 1, 2.0, report(1, 2.0))], 1),
        ([outcome(0, 143, 1.0, signals=[15]), outcome(1, 1, 2.0, report(1, 2.0))], 1),
        ([outcome(0, 143, 1.0, left(0, 1.0, 143), [15]), outcome(1, 1, 2.0, report(1, 2.0))], 1),
        # leaving by sys.exit is a failure, and others lose the rank before it is gone
        ([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, 7, 9.0, left(1, 0.5, 7))], 1),
        # but dying of something else is
        ([outcome(0, -11, 1.0, signals=[15]), outcome(1, 1, 2.0, lost(1, 0.5))], 0),
        ([outcome(0), outcome(1)], None),
    ],
)
def test_the_failure_that_came_first(outcomes, first):
    found = first_failure(outcomes)
    assert (found.rank if found else None) == first


@pytest.mark.parametrize(
    ("outcomes", "stop", "code"),
    [
        ([outcome(0), outcome(1)], None, 0),
        ([outcome(0, 7), outcome(1, -15, signals=[15])], None, 7),
        ([outcome(0, -9), outcome(1, -15, signals=[15])], None, 1),
        ([outcome(0, -15, signals=[15]), outcome(1, 2, what=report(1, 1.0, code=2))], None, 2),
        # a stop by signal
        ([outcome(0, 130, signals=[2]), outcome(1, 130, signals=[2])], signal.SIGINT, 130),
        ([outcome(0, -2, signals=[2]), outcome(1, -2, signals=[2])], signal.SIGINT, 130),
        ([outcome(0, -9, signals=[15, 9]), outcome(1, 143, signals=[15])], signal.SIGTERM, 143),
        ([outcome(0, 143, signals=[15]), outcome(1, 1, what=lost(1, 1.0))], signal.SIGTERM, 143),
        # ranks that were not sent the signal themselves end as by SIGTERM
        ([outcome(0, 143, signals=[15]), outcome(1, 130, signals=[2])], signal.SIGTERM, 130),
        # it was over before it had to stop
        ([outcome(0), outcome(1)], signal.SIGTERM, 0),
        # it failed while stopping, such as at the checkpoint
        ([outcome(0, 1, what=report(0, 1.0)), outcome(1, 143, signals=[15])], signal.SIGTERM, 1),
    ],
)
def test_exit_codes(outcomes, stop, code):
    assert judge(outcomes, stop)[0] == code


def test_a_traceback_with_its_rank_and_the_others_in_one_line():
    text = judge([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, 1, 3.0, report(1, 2.0))], None)[1]
    assert text == (
        "rank 1 (pid 101) failed:\nTraceback of rank 1\nValueError\n"
        "also ended: rank 0 (PeerLostError)\n"
    )


def test_a_rank_that_left_by_sys_exit_is_named_with_its_code_and_without_a_traceback():
    ended = [outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1, 7, 9.0, left(1, 0.5, 7))]
    assert judge(ended, None)[1] == (
        "error: rank 1 (pid 101) ended with exit code 7; its output above may show why\n"
        "also ended: rank 0 (PeerLostError)\n"
    )
    assert judge(ended, None)[0] == 7


def test_a_rank_that_ended_well_while_others_were_at_work_is_named_first():
    text = judge([outcome(0, 1, 2.0, lost(0, 1.0)), outcome(1), outcome(2)], None)[1]
    assert text.startswith(
        "error: rank 1 (pid 101) and rank 2 (pid 102) ended with exit code 0 while others were at "
        "work; let every rank run the whole script"
    )
    assert "ddp.weighted_mean" in text
    assert "ddp.loader(max_steps=...)" in text


def test_a_user_error_of_all_ranks_is_said_once():
    same = [report(r, 1.0 + r, user_error=True, text="batch_size is 0") for r in range(3)]
    text = judge([outcome(r, 2, 5.0, same[r]) for r in range(3)], None)[1]
    assert text == "error: batch_size is 0\n"


def test_a_standby_that_ended_well_was_killed_by_nothing():
    assert "ended with exit code 0" in outcome(0).silent_end


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            -signal.SIGKILL,
            ["was killed by SIGKILL", "not by the kernel for lack of memory", "kill -9"],
        ),
        (-signal.SIGSEGV, ["was killed by SIGSEGV", "native code"]),
        (-signal.SIGBUS, ["SIGBUS", "/dev/shm"]),
        (-signal.SIGRTMAX, ["was killed by SIGRTMAX"]),
        (-40, ["was killed by signal 40"]),
        (3, ["ended with exit code 3", "output above"]),
    ],
)
def test_an_end_without_a_report(code, words):
    text = judge([outcome(0, -15, signals=[15]), outcome(1, code)], None)[1]
    assert text.startswith("error: rank 1 (pid 101) ")
    for word in words:
        assert word in text


def test_memory_is_blamed_for_a_kill_only_if_it_was_short():
    killed = replace(outcome(1, -signal.SIGKILL), memory_was_short=True)
    assert "was killed by SIGKILL: memory ran out" in judge([outcome(0), killed], None)[1]
