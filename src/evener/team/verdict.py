"""Finds out, from how all ranks ended, which one failed first and what to say about it (pure)."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.errors import CollectiveMismatchError
from evener.team.failures import FailureReport

_LIKELY_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "most likely the machine or the job's memory limit ran out (`dmesg` tells); use a smaller "
        "micro-batch, a smaller model or fewer ranks"
    ),
    signal.SIGBUS: "most likely shared memory is full; `df -h /dev/shm` shows it",
    signal.SIGILL: "most likely this torch was built for another processor",
    signal.SIGSEGV: "a crash in native code; the stack printed above shows where",
    signal.SIGABRT: "native code gave up; its message is above",
}


@dataclass(slots=True, kw_only=True)
class RankRecord:
    """What is known of one rank's process.

    Attributes:
        rank: Which rank.
        pid: Its process.
        has_ended: Whether its supervisor has seen its end.
        code: Exit code, ``-n`` when signal n ended it; 0 while it runs.
        time: Unix seconds at which its supervisor saw the end.
        report: What the rank wrote about its failure, if it did.
        signals: Signals that its supervisor has sent to it.
        desertion: How it has left others waiting for it, in words; empty if it has not.
    """

    rank: int
    pid: int
    has_ended: bool = False
    code: int = 0
    time: float = 0.0
    report: FailureReport | None = None
    signals: set[int] = field(default_factory=set)
    desertion: str = ""

    @property
    def failed(self) -> bool:
        """Whether it fails or ended badly, and not merely as it was told to."""
        if self.desertion:
            return True
        if self.report is not None and not self.report.is_exit:
            return True
        if self.code < 0:
            return -self.code not in self.signals
        return self.code != 0 and not self.signals


def first_failure(outcomes: Sequence[RankRecord]) -> RankRecord | None:
    """The failure that the others followed from; ``None`` if no rank failed.

    Not simply the earliest: a rank that lost its peer may say so before the launcher has seen the
    peer's end. So errors that speak of other ranks come last, whenever they came; before them those
    of ranks that came for different things, where one of them had a reason of its own.
    """

    def order(outcome: RankRecord) -> tuple[bool, bool, float]:
        report = outcome.report
        if report is None:
            return False, False, outcome.time
        came_apart = report.user_error and report.kind == CollectiveMismatchError.__name__
        return report.follow_up, came_apart, report.time

    return min((o for o in outcomes if o.failed), key=order, default=None)


def exit_code(outcomes: Sequence[RankRecord], stop_signal: int | None) -> int:
    """What the launcher should exit with.

    Args:
        outcomes: All ranks.
        stop_signal: The signal with which the launcher was asked to stop, if it was.
    """
    first = _shown_failure(outcomes, stop_signal)
    if first is not None:
        return first.code if first.code > 0 else 1
    if stop_signal is not None and any(o.code for o in outcomes):
        return 128 + stop_signal
    return 0


def explain(outcomes: Sequence[RankRecord], stop_signal: int | None) -> str:
    """The words for a person, ready to print; empty if there is nothing to say."""
    first = _shown_failure(outcomes, stop_signal)
    if first is None:
        return ""
    others = [o for o in outcomes if o.failed and o is not first]
    alone = len(outcomes) == 1
    if first.report is not None and first.report.user_error:
        text = f"error: {first.report.message}\n"
        if first.report.notes:
            text += f"{first.report.notes}\n"
        others = [o for o in others if o.report is None or o.report.message != first.report.message]
        if not alone and not all(o.report for o in outcomes):
            text += f"(on rank {first.rank}; the other ranks were stopped)\n"
    elif first.report is not None and not first.report.is_exit:
        head = "" if alone else f"rank {first.rank} (pid {first.pid}) failed:\n"
        text = _early_end(first, outcomes) + head + first.report.traceback
    else:
        text = f"error: {silent_end(first)}\n"
    if others:
        text += "also ended: " + ", ".join(_in_short(o) for o in others) + "\n"
    return text


def _shown_failure(outcomes: Sequence[RankRecord], stop_signal: int | None) -> RankRecord | None:
    first = first_failure(outcomes)
    # When ranks are told to stop, some lose their peers on the way out: that is no failure.
    if stop_signal is not None and first is not None and first.report and first.report.follow_up:
        return None
    return first


def silent_end(outcome: RankRecord) -> str:
    """Words for the end of a rank that left no report."""
    who = f"rank {outcome.rank} (pid {outcome.pid})"
    if outcome.desertion:
        return f"{who} {outcome.desertion}"
    if outcome.code >= 0:
        return f"{who} ended with exit code {outcome.code}; its output above may say why"
    name = _signal_name(-outcome.code)
    cause = _LIKELY_CAUSES.get(-outcome.code, "something outside of this run sent it")
    return f"{who} was killed by {name}: {cause}"


def _early_end(first: RankRecord, outcomes: Sequence[RankRecord]) -> str:
    # A script that returns early on one rank ends well; its peers can only say that it has gone.
    gone = [o.rank for o in outcomes if o.code == 0 and o.report is None]
    if not gone or first.report is None or not first.report.follow_up:
        return ""
    who, has = ("rank", "has") if len(gone) == 1 else ("ranks", "have")
    return (
        f"error: {who} {', '.join(map(str, gone))} {has} ended with exit code 0 while others were "
        "at work; let every rank go through the whole script, or leave a loop by `break` on all\n"
    )


def _in_short(outcome: RankRecord) -> str:
    if outcome.report is not None and not outcome.report.is_exit:
        return f"rank {outcome.rank} ({outcome.report.kind})"
    if outcome.code < 0:
        return f"rank {outcome.rank} ({_signal_name(-outcome.code)})"
    return f"rank {outcome.rank} (exit code {outcome.code})"


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
