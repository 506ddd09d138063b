"""Starts a script that was started plainly once more for each rank, through evener's launcher.

The process turns into the launcher (``exec``), so nothing of what the script has loaded so far
stays in memory, and every rank, rank 0 among them, runs the script from its beginning. It never
imports torch.
"""

import multiprocessing
import os
import re
import site
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from evener.errors import ConfigError
from evener.team.signals import start_in_silence
from evener.team.terminal import say

# Options of the interpreter, of which the last may have an argument, in the same word or the next.
_OPTIONS = re.compile(r"-[^cmWX]*(?:([cmWX])(.*))?", re.DOTALL)
_LONG_WITH_ARGUMENT = ("--check-hash-based-pycs",)


def start_all_ranks(devices: Sequence[str], *, optional: bool, quiet: bool) -> None:
    """Run the script once for each device; return only where that is impossible.

    Args:
        devices: One for each rank, by local rank.
        optional: The user did not ask for several: where the script cannot be started again, go on
            with one rank and say how to use all.
        quiet: Do not say what is being done.

    Raises:
        ConfigError: The script cannot be started again, and several devices were asked for.
    """
    if len(devices) < 2:
        return
    names = ", ".join(devices)
    try:
        program, folder = how_started()
    except ConfigError as error:
        if not optional:
            raise ConfigError(
                f"devices names {len(devices)} devices ({names}), but {error}"
            ) from None
        if not quiet:
            say(f"evener: using {devices[0]} of {names}: {error}")
        return
    how = None if quiet else f"once for each of {names}"
    _become(["evener.team.launch", str(len(devices))], program, folder, how)


def start_elastic_team(limits: str, *, quiet: bool) -> NoReturn:
    """Run the script in each of the workers of an elastic team, as many as that may have.

    Args:
        limits: Fewest and most workers, as ``MIN:MAX``.
        quiet: Do not say what is being done.

    Raises:
        ConfigError: The script cannot be started again.
    """
    try:
        program, folder = how_started()
    except ConfigError as error:
        raise ConfigError(f"elastic is {limits!r}, but {error}") from None
    how = None if quiet else f"in an elastic team of {limits} workers"
    _become(["evener.team.launch", limits], program, folder, how)


def _become(
    launcher: Sequence[str], program: Sequence[str], folder: str, how: str | None
) -> NoReturn:
    """Become the launcher of the program, and say how it is run; ``None`` says nothing."""
    # The launcher lets Ctrl-C through when it can take it.
    with start_in_silence():
        if how is not None:
            shown = Path(program[0]).name if program[0] != "-m" else program[1]
            say(f"evener: {shown} was started plainly: running it {how}")
        sys.stdout.flush()
        sys.stderr.flush()
        os.chdir(folder)
        rank = [*_python(), "evener.team.script", *program]
        os.execv(sys.executable, [*_python(), *launcher, *rank])


def how_started() -> tuple[list[str], str]:
    """Return the command that this process was started with.

    Returns:
        Script and arguments, or ``-m``, module and arguments; and the current folder of that
        moment, as far as it can be known.

    Raises:
        ConfigError: It cannot be given again; says why and what to do.
    """
    remedy = "put the training into a script and run `python SCRIPT` or `evener launch SCRIPT`"
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        raise ConfigError(f"a notebook is one process; to use all devices {remedy}")
    if multiprocessing.parent_process() is not None:
        raise ConfigError(
            "this is a child process, which is not started again; to use all devices call "
            "Ddp.setup in the script itself, or start it with `evener launch SCRIPT`"
        )
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "Ddp.setup was called outside the main thread; to use all devices call it there, or "
            "start the script with `evener launch SCRIPT`"
        )
    program = program_of(sys.orig_argv[1:])
    if not program:
        raise ConfigError(f"Python was not started with a script; to use all devices {remedy}")
    folder = starting_folder(
        program, str(Path.cwd()), getattr(sys.modules["__main__"], "__file__", "")
    )
    if program[0] != "-m" and not Path(folder, program[0]).is_file():
        raise ConfigError(f"{program[0]} is not a Python file; to use all devices {remedy}")
    if (runner := _runner([frame.filename for frame in traceback.extract_stack()])) is not None:
        raise ConfigError(
            f"the script is run by {runner}, which would do everything else again, too; to use all "
            f"devices {remedy}"
        )
    return program, folder


def _runner(files: Sequence[str]) -> str | None:
    """Return the installed program that runs the user's script, such as a debugger, if any.

    What was started is then not the script. An installed program that runs its own code, and a
    console command of a package under development, can be started again.

    Args:
        files: Of the frames of the stack, outermost first.

    Returns:
        Its file; ``None`` where there is none.
    """
    scripts, own = sysconfig.get_path("scripts"), Path(__file__).parents[1]
    libraries = [sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages()]

    def is_installed(file: str) -> bool:
        return any(Path(file).is_relative_to(folder) for folder in libraries)

    frames = [
        file
        for file in files
        if not (file.startswith("<frozen") or Path(file).is_relative_to(own))
        and Path(file).parent != Path(scripts)  # a console command is its package's first function
    ]
    if frames and is_installed(frames[0]) and not is_installed(frames[-1]):
        return frames[0]
    return None


def program_of(words: Sequence[str]) -> list[str]:
    """Script and arguments, or ``-m``, module and arguments, out of an interpreter's arguments.

    Args:
        words: What follows the interpreter's own name.

    Returns:
        Nothing for ``-c``, a script on standard input and an interactive session.
    """
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word.startswith("--"):
            rest = rest[int(word in _LONG_WITH_ARGUMENT) :]
            continue
        options = _OPTIONS.fullmatch(word)
        assert options is not None  # it matches all that begins like this
        letter, argument = options.groups("")
        if word == "-" or letter == "c":
            return []
        if letter and not argument:
            argument = rest.pop(0) if rest else ""
        if letter == "m":
            return ["-m", argument, *rest] if argument else []
    return rest


def starting_folder(program: Sequence[str], now: str, main_file: str | None) -> str:
    """Return the current folder at the start, which a script may have left since.

    Python makes the script's path absolute when it starts, so a relative one tells the folder.

    Args:
        program: As ``program_of`` gives it.
        now: The current folder.
        main_file: ``__main__.__file__``.
    """
    if program[0] == "-m":
        first = sys.path[0] if sys.path and not sys.flags.safe_path else ""
        return first if first and Path(first).is_dir() else now
    script = os.path.normpath(program[0])
    if main_file and not Path(script).is_absolute() and main_file.endswith(os.sep + script):
        return main_file[: -len(script)].rstrip(os.sep) or os.sep
    return now


def _python() -> list[str]:
    # As multiprocessing does for its children: -W, -X, -O and the like are handed on.
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, *([] if "-P" in flags else ["-P"]), "-m"]
