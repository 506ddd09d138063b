"""The process of a rank: it ends with its launcher, and reports its failure."""

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from evener.errors import RunEndedError
from evener.team.environment import LAUNCHED, DistributedTrainConfig
from evener.team.failures import add_notes, describe, exit_code_of, show_message
from evener.team.host import available_cores, program_of, threads_per_rank
from evener.team.signals import STOPPING
from evener.team.terminal import TERMINAL_FDS, allow_unmarked, say
from evener.team.wire import CHANNEL_FD, Channel

#: Set by evener's launcher: its process id.
PARENT_PID = "EVENER_PARENT_PID"

_PR_SET_PDEATHSIG = 1

_supervisors: list[Channel] = []


def is_supervised() -> bool:
    """Return whether this process has a supervisor; children of a rank have none."""
    return any(not channel.has_ended for channel in _supervisors)


def notify_supervisor(**message: Any) -> None:
    """Send a message to this rank's supervisor, if it has one; not from children of the rank."""
    for channel in _supervisors:
        channel.send(message)


def run_child(main: Callable[[], int | None]) -> int:
    """Run a rank's work and convert its exception to an exit code.

    In a process that evener's launcher started, the failure is sent to the launcher, which prints
    the first one of all ranks. Elsewhere it is printed here: the message of a ``UserError``,
    otherwise the traceback. ``SystemExit`` passes through; the launcher is notified if its code is
    not 0.

    Args:
        main: The work; returns an exit code, or ``None`` for 0.

    Returns:
        The exit code of the process.
    """
    try:
        if os.environ.get(LAUNCHED):
            prepare_rank()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see start_in_silence
        return main() or 0
    except SystemExit as stop:
        # Python may take seconds to end, and by then other ranks report that they lost this one.
        if exit_code_of(stop) and is_supervised():
            report_failure(stop)
        raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except RunEndedError as ended:
        say(f"evener: {ended}")
        return 0
    except Exception as error:  # the top of a process: every error must be reported
        if follows_from_ctrl_c(error):
            return 128 + signal.SIGINT
        return report_failure(error)


def follows_from_ctrl_c(error: BaseException) -> bool:
    """Return whether an import failed because of Ctrl-C."""
    chain: list[BaseException] = []
    each: BaseException | None = error if isinstance(error, ImportError | SystemError) else None
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return any(isinstance(one, KeyboardInterrupt) for one in chain)


def report_failure(error: Exception | SystemExit) -> int:
    """Report an exception to the launcher, or print it without one.

    Returns:
        The exit code of the process.
    """
    add_notes(error)
    report = describe(error)
    if is_supervised():
        notify_supervisor(failure=asdict(report))
    elif report.user_error:
        show_message(report.message, report.notes)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    return exit_code_of(error)


def apply_threads(config: DistributedTrainConfig) -> int:
    """Divide the host's cores among its ranks, unless evener's launcher has done so.

    ``OMP_NUM_THREADS`` of the user is respected, except for the 1 that torchrun sets by itself
    if it starts several ranks. In a process that runs alone, torch decides.

    Returns:
        Threads that torch now computes with.
    """
    import torch

    chosen = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = config.launched_by == "torchrun" and chosen == "1" and config.local_world_size > 1
    if config.launched_by in ("torchrun", "slurm", "the user") and (not chosen or by_torchrun):
        # SLURM may have bound each task to its own cores, which must not be divided again.
        bound = config.launched_by == "slurm" and available_cores() < (os.cpu_count() or 1)
        torch.set_num_threads(threads_per_rank(1 if bound else config.local_world_size))
    return torch.get_num_threads()


def prepare_rank() -> Channel | None:
    """Make this rank's process end with its parent, handle signals, and print lines at once.

    Returns:
        The connection to the supervisor, if this process has one.
    """
    die_with(int(os.environ[PARENT_PID]))
    _heed_signals()
    if given := os.environ.pop(CHANNEL_FD, None):
        _supervisors.append(Channel(socket.socket(fileno=int(given))))
        _supervisors[-1].send({"program": program_of(os.getpid())})
    if given_to_us := os.environ.pop(TERMINAL_FDS, None):
        allow_unmarked([*map(int, given_to_us.split(","))])
    faulthandler.enable()
    sys.unraisablehook = _show_unraisable
    write_lines_at_once()
    return _supervisors[-1] if given else None


def _heed_signals() -> None:
    """Restore the handling of signals that ask to stop, even if it was inherited as ignored.

    Shells let background jobs of scripts ignore SIGINT, so that Ctrl-C does not reach them. Ranks
    run in separate sessions, so a signal that reaches them comes from the launcher.
    """
    for signum in STOPPING:
        if signal.getsignal(signum) is signal.SIG_IGN:
            is_ctrl_c = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


def _show_unraisable(unraisable: Any) -> None:
    # Ctrl-C may interrupt a callback that cannot raise; Python would print its place.
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def write_lines_at_once() -> None:
    """Write each line as a whole, as soon as it ends.

    Through a pipe, lines would come late and all at once. PYTHONUNBUFFERED writes every argument of
    ``print`` separately, so lines of ranks would be mixed.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Pause Python's garbage collector while large libraries are imported: a fifth of their time.

    They create hundreds of thousands of permanent objects, which each collection would traverse.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends for any reason.

    Args:
        parent_pid: The parent at the start; if it has ended already, this process exits at once.
    """
    if sys.platform != "linux":
        return
    import ctypes  # only ranks need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
