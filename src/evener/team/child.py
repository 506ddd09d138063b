"""What a rank's process does around its work: die with its launcher, and say why it failed."""

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

#: Set by evener's launcher: its own process number.
PARENT_PID = "EVENER_PARENT_PID"

_PR_SET_PDEATHSIG = 1

_supervisors: list[Channel] = []


def is_supervised() -> bool:
    """Return whether a supervisor listens to this process: not to children of a rank."""
    return any(not channel.has_ended for channel in _supervisors)


def notify_supervisor(**message: Any) -> None:
    """Tell the supervisor of this rank, where there is one, and not from children of the rank."""
    for channel in _supervisors:
        channel.send(message)


def run_child(main: Callable[[], int | None]) -> int:
    """Run a rank's work and turn what it raises into an exit code.

    In a process that evener's launcher started, the failure goes to the launcher, which prints the
    first one of all ranks; elsewhere it is printed here: the message of a ``UserError``, otherwise
    the traceback. ``SystemExit`` passes through; the launcher is told of one that is not 0.

    Args:
        main: The work; returns an exit code, or ``None`` for 0.

    Returns:
        What the process should exit with.
    """
    try:
        if os.environ.get(LAUNCHED):
            prepare_rank()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # see start_in_silence
        return main() or 0
    except SystemExit as stop:
        # Python may take seconds to end, and by then others have told that they lost this rank.
        if exit_code_of(stop) and is_supervised():
            report_failure(stop)
        raise
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except RunEndedError as ended:
        say(f"evener: {ended}")
        return 0
    except Exception as error:  # the top of a process: whatever it is, it has to be reported
        if follows_from_ctrl_c(error):
            return 128 + signal.SIGINT
        return report_failure(error)


def follows_from_ctrl_c(error: BaseException) -> bool:
    """Return whether a library could not be imported because Ctrl-C came."""
    chain: list[BaseException] = []
    each: BaseException | None = error if isinstance(error, ImportError | SystemError) else None
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__ or each.__context__
    return any(isinstance(one, KeyboardInterrupt) for one in chain)


def report_failure(error: Exception | SystemExit) -> int:
    """Tell the launcher, or else the terminal, about an exception.

    Returns:
        What the process should exit with.
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
    """Share the host's cores among its ranks where evener's launcher has not done so.

    ``OMP_NUM_THREADS`` is left as the user set it, but for the 1 that torchrun sets by itself
    whenever it starts several ranks. A process that runs alone is left to torch.

    Returns:
        Threads that torch now computes with.
    """
    import torch

    chosen = os.environ.get("OMP_NUM_THREADS")
    by_torchrun = config.launched_by == "torchrun" and chosen == "1" and config.local_world_size > 1
    if config.launched_by in ("torchrun", "slurm", "the user") and (not chosen or by_torchrun):
        # SLURM may have bound each task to cores of its own, which are then not to be shared again.
        bound = config.launched_by == "slurm" and available_cores() < (os.cpu_count() or 1)
        torch.set_num_threads(threads_per_rank(1 if bound else config.local_world_size))
    return torch.get_num_threads()


def prepare_rank() -> Channel | None:
    """Let this rank's process die with its parent, heed signals, and show what it prints at once.

    Returns:
        The connection to the supervisor, where this process has been given one.
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
    """Let signals that ask to stop do so, also where this process has inherited to ignore them.

    Shells let background jobs of scripts ignore SIGINT, so that Ctrl-C does not reach them. Ranks
    have sessions of their own, so what reaches them is sent by the launcher.
    """
    for signum in STOPPING:
        if signal.getsignal(signum) is signal.SIG_IGN:
            is_ctrl_c = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


def _show_unraisable(unraisable: Any) -> None:
    # Ctrl-C may come in a callback that cannot raise it; Python would print where that was.
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def write_lines_at_once() -> None:
    """Write each line when it ends, and as a whole.

    Through a pipe lines would come late and all at once; with PYTHONUNBUFFERED, which writes every
    argument of ``print`` by itself, those of other ranks would come in between.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


@contextmanager
def loading_libraries() -> Iterator[None]:
    """Keep Python from looking for garbage while large libraries come in: a fifth of their time.

    They make hundreds of thousands of objects that stay, and each look goes through all of them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens.

    Args:
        parent_pid: The parent as it was at the start; if it has gone already, this exits at once.
    """
    if sys.platform != "linux":
        return
    import ctypes  # only ranks need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
