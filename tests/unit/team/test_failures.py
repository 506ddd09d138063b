import errno
import os
import re
import socket
import sys
from dataclasses import asdict

import pytest
from torch.distributed import DistNetworkError

from evener.errors import (
    CollectiveMismatchError,
    ConfigError,
    DataError,
    PeerLostError,
    RunEndedError,
)
from evener.team import child
from evener.team.child import notify_supervisor, report_failure, run_child
from evener.team.failures import FailureReport, describe
from evener.team.host import program_of
from evener.team.wire import CHANNEL_FD, JOINING, Channel, Message


def caught(error):
    try:
        raise error
    except type(error) as same:
        return same


@pytest.mark.parametrize(
    ("error", "user_error", "follow_up", "code"),
    [
        (ValueError("x"), False, False, 1),
        (ConfigError("x"), True, False, 2),
        (DataError("x"), True, False, 1),
        (PeerLostError("x"), False, True, 1),
        (CollectiveMismatchError("x"), True, False, 1),
        (RuntimeError("x"), False, False, 1),
        (RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc] reset"), False, True, 1),
        (DistNetworkError("x"), False, True, 1),
        (BlockingIOError(errno.EAGAIN, "x"), False, False, 1),  # of a socket that does not wait
    ],
)
def test_what_kind_of_failure_it_is(error, user_error, follow_up, code):
    report = describe(caught(error))
    assert (report.user_error, report.follow_up, report.exit_code) == (user_error, follow_up, code)
    assert report.kind == type(error).__name__
    assert report.message == str(error)
    assert report.traceback.startswith("Traceback")


class Launcher:
    """What a launcher hears of this process, as its rank 1."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def hear(self) -> Message:
        heard: Message = {}
        for message in self.channel.receive():
            heard |= message
        return heard


@pytest.fixture
def launcher(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setenv(CHANNEL_FD, str(theirs.detach()))
    monkeypatch.setenv(child.PARENT_PID, str(os.getppid()))
    monkeypatch.setattr(child, "_supervisors", [])
    monkeypatch.setattr(child, "die_with", lambda pid: None)
    own = child.prepare_rank()
    assert CHANNEL_FD not in os.environ
    launcher = Launcher(Channel(ours))
    assert launcher.hear() == {"program": program_of(os.getpid())}
    yield launcher
    own.close()
    ours.close()


def test_news_arrive_whole(launcher):
    report = describe(caught(ValueError("ünï\ncode \udcff" + "x" * 1000)))
    assert launcher.hear() == {}
    notify_supervisor(place=JOINING)
    notify_supervisor(failure=asdict(report))
    heard = launcher.hear()
    assert FailureReport(**heard["failure"]) == report
    assert (heard["place"], launcher.channel.has_ended) == (JOINING, False)


def test_a_rank_tells_its_launcher_and_not_the_terminal(launcher, capsys):

    def fail():
        raise ConfigError("lr is -1")

    assert run_child(fail) == 2
    assert launcher.hear()["failure"]["message"] == "lr is -1"
    assert capsys.readouterr() == ("", "")


def test_without_a_launcher_a_user_error_is_one_line(capsys):
    assert report_failure(caught(DataError("no text in /data"))) == 1
    assert capsys.readouterr().err == "error: no text in /data\n"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), r"may have \d+ files .* \(`ulimit -n`\)"),
        (OSError(errno.ENFILE, "Too many open files in system"), "end other programs"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "start fewer ranks"),
        (RuntimeError("can't start new thread"), r"processes and threads \(`ulimit -u`\)"),
    ],
)
def test_what_the_system_has_no_more_of_is_one_line_with_its_limit(capsys, error, words):
    assert report_failure(caught(error)) == 1
    first, place = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {re.escape(str(error))}; .*{words}", first)
    assert place.startswith(f"evener: raised at {__file__}:")


def test_a_worker_that_comes_after_the_end_of_the_run_has_not_failed(launcher, capsys):
    def come_late():
        raise RunEndedError("the team has done its run to the end")

    assert run_child(come_late) == 0
    assert launcher.hear() == {}
    assert capsys.readouterr().err == "evener: the team has done its run to the end\n"


@pytest.mark.parametrize(("given", "code"), [(7, 7), ("no more data", 1), (0, None), (None, None)])
def test_the_launcher_knows_of_system_exit_before_python_has_ended(launcher, given, code):
    with pytest.raises(SystemExit):
        run_child(lambda: sys.exit(given))
    heard = launcher.hear()
    report = FailureReport(**heard["failure"]) if heard else None
    assert (report.exit_code if report else None) == code
    assert report is None or (report.is_exit and not report.follow_up)
