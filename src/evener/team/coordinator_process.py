"""The coordinator of an elastic team as a process that its launcher starts, and starts again."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, final

from evener.closing import Closing
from evener.comm.addresses import LOOPBACK
from evener.errors import LaunchError
from evener.team.child import PARENT_PID
from evener.team.environment import LAUNCHED
from evener.team.signals import start_in_silence
from evener.team.supervisor import bind_store
from evener.team.terminal import say

_END_S: Final = 5.0
#: More ends than this within ``_SPAN_S`` are too many.
_MOST_ENDS: Final = 5
_SPAN_S: Final = 60.0


@final
class CoordinatorProcess(Closing):
    """A coordinator on loopback, and the process that it runs in.

    Args:
        limits: Fewest and most workers, as ``MIN:MAX``.
        port: Its port; ``None`` takes a free one.
        token_file: Holds what workers must know.

    Attributes:
        address: ``HOST:PORT``, the same after each start.

    Raises:
        LaunchError: The port is in use.
    """

    def __init__(self, limits: str, port: int | None, token_file: Path) -> None:
        # Kept open without listening, as the store's is: no other program is given the port, also
        # while the coordinator is started again.
        self._reserved = bind_store(port, listen=False)
        number = self._reserved.getsockname()[1]
        self.address = f"{LOOPBACK}:{number}"
        self._arguments = [limits, "--token-file", str(token_file), "--port", str(number)]
        self._ends_s: list[float] = []
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process, also the leader of its process group."""
        return self._process.pid

    def look(self) -> int | None:
        """Start it again if it has ended; return the process that has ended, if one has.

        Raises:
            LaunchError: It has ended too often.
        """
        code = self._process.poll()
        if code is None:
            return None
        ended = self._process.pid
        now_s = time.monotonic()
        self._ends_s = [end_s for end_s in self._ends_s if now_s - end_s < _SPAN_S] + [now_s]
        if len(self._ends_s) > _MOST_ENDS:
            raise LaunchError(
                f"the coordinator at {self.address} has ended {len(self._ends_s)} times within "
                f"{_SPAN_S:g} s, the last time with exit code {code}; its output above may say why"
            )
        say(
            f"evener: the coordinator (pid {ended}) ended with exit code {code}: started again; "
            "workers continue"
        )
        self._process = self._start()
        return ended

    def close(self) -> None:
        """End it; idempotent."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._reserved.close()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "evener", "coordinator", *self._arguments]
        # It asks the kernel to end it with this process: the lifeline has yet to hear of it.
        environ = {**os.environ, LAUNCHED: "1", PARENT_PID: str(os.getpid())}
        with start_in_silence():
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environ, start_new_session=True
            )
