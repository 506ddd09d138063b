"""A process that has imported a worker's libraries, and waits to replace a worker.

Used as ``python -P -m evener.team.standby LIBRARIES MODULE ARGS``: it imports the libraries (names
separated by commas) and waits on its channel. When its supervisor sends a worker's variables, it
runs the module with these arguments, like ``python -P -m MODULE ARGS``.
"""

import importlib
import json
import os
import runpy
import sys
from typing import Any, Final

from evener.team.child import PARENT_PID, die_with, loading_libraries
from evener.team.signals import end_in_silence
from evener.team.wire import CHANNEL_FD

#: Key of the message that makes a standby a worker: variables to add to its environment.
TAKE: Final = "take"


def await_order(descriptor: int) -> dict[str, str] | None:
    """Wait for the order to become a worker.

    The channel itself is opened later, by the worker that this process becomes.

    Args:
        descriptor: This end of the channel.

    Returns:
        Variables of the environment; ``None`` if the supervisor has ended.
    """
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)  # the bytes after the line are for the worker
        if not byte:
            return None
        line += byte
    order: dict[str, Any] = json.loads(line)
    return {str(name): str(value) for name, value in order[TAKE].items()}


def main() -> None:
    """Load the libraries, wait, and run the module."""
    die_with(int(os.environ[PARENT_PID]))
    _, libraries, module, *arguments = sys.argv
    with loading_libraries():
        for name in filter(None, libraries.split(",")):
            importlib.import_module(name)
    order = await_order(int(os.environ[CHANNEL_FD]))
    if order is None:
        return
    os.environ.update(order)
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    try:
        main()
    finally:
        end_in_silence()
