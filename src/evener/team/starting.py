"""Start a plainly started script again for each rank, through evener's launcher.

The process becomes the launcher (``exec``), so nothing that the script has loaded so far stays in
memory, and every rank, also rank 0, runs the script from its beginning. It never imports torch.
"""

import multiprocessing
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from evener.errors import ConfigError
from evener.team.signals import start_in_silence
from evener.team.terminal import say


def start_all_ranks(devices: Sequence[str], *, optional: bool, quiet: bool) -> None:
    """Run the script once for each device; return only if that is impossible.

    Args:
        devices: One for each rank, by local rank.
        optional: Whether the user did not ask for several devices: then, if the script cannot be
            started again, continue with one rank and print how to use all.
        quiet: Do not print what is done.

    Raises:
        ConfigError: The script cannot be started again, and several devices were requested.
    """
    if len(devices) < 2:
        return
    names = ", ".join(devices)
    try:
        program = how_started()
    except ConfigError as error:
        if not optional:
            raise ConfigError(
                f"devices names {len(devices)} devices ({names}), but {error}"
            ) from None
        if not quiet:
            say(f"evener: using {devices[0]} of {names}: {error}")
        return
    how = None if quiet else f"once for each of {names}"
    _become(["evener.team.launch", str(len(devices))], program, how)


def start_elastic_team(limits: str, *, quiet: bool) -> NoReturn:
    """Run the script in an elastic team with the most workers that it may have.

    Args:
        limits: Fewest and most workers, as ``MIN:MAX``.
        quiet: Do not print what is done.

    Raises:
        ConfigError: The script cannot be started again.
    """
    try:
        program = how_started()
    except ConfigError as error:
        raise ConfigError(f"elastic is {limits!r}, but {error}") from None
    how = None if quiet else f"in an elastic team of {limits} workers"
    _become(["evener.team.launch", limits], program, how)


def _become(launcher: Sequence[str], program: Sequence[str], how: str | None) -> NoReturn:
    """Become the launcher of the program, and print how it is run unless ``how`` is ``None``."""
    # The launcher unblocks Ctrl-C when it can handle it.
    with start_in_silence():
        if how is not None:
            shown = Path(program[0]).name if program[0] != "-m" else program[1]
            say(f"evener: {shown} was started plainly: running it {how}")
        sys.stdout.flush()
        sys.stderr.flush()
        rank = [*_python(), "evener.team.script", *program]
        os.execv(sys.executable, [*_python(), *launcher, *rank])


def how_started() -> list[str]:
    """Return script and arguments, or ``-m``, module and arguments, with which Python was started.

    Changes that the script made to ``sys.argv`` or its current folder are kept.

    Raises:
        ConfigError: It cannot be started again; the message has cause and remedy.
    """
    main, ipython = sys.modules["__main__"], sys.modules.get("IPython")
    script = getattr(main, "__file__", None) or ""  # absolute
    module = main.__spec__.name if main.__spec__ is not None else ""
    installed = map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts"))
    why = ""
    if ipython is not None and ipython.get_ipython() is not None:
        why = "a notebook is one process"
    elif multiprocessing.parent_process() is not None:
        why = "this is a child process, which is not started again"
    elif threading.current_thread() is not threading.main_thread():
        why = "Ddp.setup was called outside the main thread, where it cannot start ranks"
    elif any(Path(script).is_relative_to(path) for path in installed):
        why = f"the script is run by {script}, such as a test runner, which would be run again"
    elif module in ("", "__main__") and not Path(script).is_file():
        why = "Python was not started with a script"
    if why:
        raise ConfigError(
            f"{why}; to use all devices put the training into a script and run `python SCRIPT` or "
            "`evener launch SCRIPT`"
        )
    start = [script] if module in ("", "__main__") else ["-m", module]
    return [*start, *sys.argv[1:]]


def _python() -> list[str]:
    # As in multiprocessing: -W, -X, -O and similar flags are passed on.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *([] if "-P" in flags else ["-P"]), "-m"]
