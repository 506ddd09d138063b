"""Runs `evener` as users do, in a process of its own, with scripts that talk to the test.

Scripts under test begin with ``PRELUDE``, which gives them ``RANK``, ``tell(text)`` (a line to the
test), ``pass_gate()`` (waits until the test calls ``open_gate``) and ``wait_forever()``. Nothing
here imports torch.
"""

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.limits import PATIENCE_S

SRC = Path(__file__).resolve().parents[2] / "src"
#: A folder whose ``sitecustomize`` lets a process load less of torch.
QUICK = Path(__file__).with_name("quick")

PRELUDE = """\
import os, signal, sys, threading, time
RANK = int(os.environ.get("RANK", "0"))
def tell(text):
    with open(os.environ["TEST_MAILBOX"], "w") as mailbox:
        mailbox.write(f"{RANK} {text}\\n")
def pass_gate():
    gate = os.open(os.environ["TEST_GATE"], os.O_RDONLY)
    assert os.read(gate, 1)
def wait_forever():
    while True:
        signal.pause()
"""


class Mailbox:
    """Lines from scripts, over a named pipe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        # Both ends, so that neither opening nor a writer's end ever blocks or closes it.
        self._fd = os.open(path, os.O_RDWR)
        self._rest = b""

    def read(self, num_lines: int, timeout_s: float = PATIENCE_S) -> list[str]:
        """Waits for that many further lines; sorted, as ranks write in no order."""
        deadline = time.monotonic() + timeout_s
        while self._rest.count(b"\n") < num_lines:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"wanted {num_lines} lines, got {self._rest!r}"
            self._rest += os.read(self._fd, 65_536)
        *lines, self._rest = self._rest.split(b"\n", num_lines)
        return sorted(line.decode() for line in lines)

    def rest(self) -> list[str]:
        """What else has arrived, once all writers have ended."""
        if select.select([self._fd], [], [], 0)[0]:
            self._rest += os.read(self._fd, 65_536)
        lines, self._rest = self._rest.decode().splitlines(), b""
        return sorted(lines)

    def close(self) -> None:
        os.close(self._fd)


@dataclass
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass
class Running:
    """A command that runs; its session is its own, as a terminal's would be."""

    process: subprocess.Popen[bytes]

    def end(self, timeout_s: float = PATIENCE_S) -> Ended:
        """Waits for the end."""
        try:
            out, err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"still ran after {timeout_s} s\n{out!r}\n{err.decode()}"
            ) from None
        return Ended(
            self.process.returncode,
            out.decode(errors="surrogateescape"),
            err.decode(errors="surrogateescape"),
        )

    def signal(self, signum: int) -> None:
        """Sends a signal to the launcher alone."""
        self.process.send_signal(signum)

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)


class Sandbox:
    """A folder with scripts, a mailbox, and commands that never outlive the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mailbox = Mailbox(folder / "mailbox")
        os.mkfifo(folder / "gate")
        self._gate = os.open(folder / "gate", os.O_RDWR)
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("EVENER_", "SLURM_", "TORCHELASTIC_"))
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        self.environ |= {
            "TEST_MAILBOX": str(self.mailbox.path),
            "TEST_GATE": str(folder / "gate"),
            "PYTHONPATH": f"{SRC}{os.pathsep}{QUICK}",
        }
        self._running: list[Running] = []

    def script(self, body: str, name: str = "script.py") -> Path:
        """Writes a script; its lines can use what ``PRELUDE`` defines."""
        path = self.folder / name
        path.write_text(PRELUDE + body)
        return path

    def token_file(self, token: str) -> Path:
        """Writes a file with a token, which this user alone can read."""
        path = self.folder / "token"
        path.write_text(token)
        path.chmod(0o600)
        return path

    def open_gate(self, num_passes: int) -> None:
        """Lets that many ``pass_gate()`` calls through."""
        os.write(self._gate, b"." * num_passes)

    def install(self, code: str) -> Path:
        """Has every further Python process run some code first; returns the folder that it is in.

        Python runs one ``sitecustomize``, so this one runs that of ``QUICK``, too.
        """
        folder = self.folder / "site"
        folder.mkdir(exist_ok=True)
        quick = QUICK / "sitecustomize.py"
        first = f"exec(compile(open({str(quick)!r}).read(), {str(quick)!r}, 'exec'))\n"
        (folder / "sitecustomize.py").write_text(first + code)
        self.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{self.environ['PYTHONPATH']}"
        return folder

    def forbid(self, module: str) -> None:
        """Makes every further command fail loudly when it imports the module."""
        folder = self.folder / "forbidden"
        folder.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_text(
            f"import os\nos.write(2, b'{module} was imported\\n')\nos._exit(97)\n"
        )
        self.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{SRC}"

    def start(self, *command: object, **options: Any) -> Running:
        """Starts a command."""
        usual = {
            "env": self.environ,
            "cwd": self.folder,
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen(
            [str(part) for part in command], start_new_session=True, **(usual | options)
        )
        self._running.append(Running(process))
        return self._running[-1]

    def evener(self, *arguments: object, **options: Any) -> Running:
        """Starts ``evener ARGUMENTS``."""
        return self.start(sys.executable, "-P", "-m", "evener", *arguments, **options)

    def launch(
        self, script: Path, *arguments: object, nproc: int, grace_s: float, settle_s: float = 2.0
    ) -> Running:
        """Starts a script on ranks, with other periods of grace than the command line's.

        A long one keeps a machine that is slow to end a rank from deciding a test.

        Args:
            script: The script.
            *arguments: Its arguments.
            nproc: Ranks.
            grace_s: How long ranks that were asked to stop may take.
            settle_s: How long the launcher waits for the reason why a rank lost another.
        """
        code = (
            "import signal, sys; from evener.team import agent, launch; "
            # Ignored, and so left alone, where these tests were started by nohup.
            "signal.signal(signal.SIGHUP, signal.SIG_DFL); "
            "agent._SETTLE_S = float(sys.argv[3]); "
            "rank = [sys.executable, '-P', '-m', 'evener.team.script', *sys.argv[4:]]; "
            "plan = launch.LaunchPlan(nproc=int(sys.argv[1]), grace_s=float(sys.argv[2])); "
            "sys.exit(launch.launch(rank, plan))"
        )
        periods = (nproc, grace_s, settle_s)
        return self.start(sys.executable, "-P", "-c", code, *periods, script, *arguments)

    def end_all(self) -> None:
        """Ends what still runs."""
        for running in self._running:
            if running.process.poll() is None:
                running.process.kill()
            with running.process:
                pass

    def close(self) -> None:
        """Ends what still runs, and the mailbox."""
        self.end_all()
        self.mailbox.close()
        os.close(self._gate)


def wait_until_gone(pid: int, timeout_s: float = PATIENCE_S) -> bool:
    """Waits for the end of a process that is not ours."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)
