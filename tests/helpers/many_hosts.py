"""Teams over several hosts, which are addresses of loopback; workers note what they see.

``SCRIPT`` trains until there is a file ``stop``. Each of its workers writes a journal, from which
``check`` judges the whole run.
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from helpers.launched import Running, Sandbox
from helpers.limits import PATIENCE_S, wait_until
from helpers.ports import free_port

NUM_SAMPLES = 96

SCRIPT = f"""
import hashlib, json, os, sys, time, torch
from pathlib import Path
from evener import Ddp
here = Path(__file__).parent
who = os.environ["EVENER_MEMBER"]
journal = (here / f"journal-{{who.replace('/', '_')}}-{{os.getpid()}}").open("w", buffering=1)
def note(**row):
    print(json.dumps(row), file=journal)
note(pid=os.getpid())
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
def digest():
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(bits).hexdigest()[:16]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = [(torch.full((4,), i / {NUM_SAMPLES}), i) for i in range({NUM_SAMPLES})]
with Ddp.setup(model, optimizer, devices="cpu") as ddp:
    @ddp.on_commit
    def commit(result):
        note(window=result.window, epoch=result.epoch, ranges=result.ranges or [result.committed],
             digest=digest(), size=len(ddp.assembly.team.members), main=ddp.is_main_process)
        if (here / "stop").exists():
            ddp.stop()
    loader = ddp.loader(data, batch_size=8, seed=5)
    for epoch in ddp.epochs(1_000_000):
        for x, ids in loader.epoch(epoch):
            # So that it pays to divide the work, and nobody is parked.
            time.sleep(0.004 * len(x))
            ddp.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
            ddp.step()
    note(end=digest())
"""


#: Each agent would have a standby import torch, for which these tests would wait.
NO_STANDBYS = """
import sys
if {"join", "launch"} & {*sys.orig_argv}:
    from evener.team import agent
    agent.LIBRARIES = dict.fromkeys(agent.LIBRARIES, ("json",))
"""


@dataclass(frozen=True)
class Journal:
    """What one worker has noted.

    Attributes:
        path: Its file.
    """

    path: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All that is complete."""
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]

    @property
    def pid(self) -> int:
        """The worker's process."""
        return int(self.rows[0]["pid"])

    @property
    def windows(self) -> list[dict[str, Any]]:
        """The windows that it has seen committed."""
        return [row for row in self.rows if "window" in row]

    @property
    def end(self) -> str:
        """The digest of its weights at its end; empty where it came to none."""
        return str(self.rows[-1].get("end", ""))


@dataclass
class Hosts:
    """Addresses of loopback, which every Linux has, and what runs there.

    Attributes:
        sandbox: Starts commands.
    """

    sandbox: Sandbox
    _started: dict[int, list[Running]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
        self.address = f"{self.addresses[0]}:{free_port()}"
        self.script = self.sandbox.script(SCRIPT)
        self.sandbox.install(NO_STANDBYS)
        self.token = self.sandbox.token_file("one token that all of these hosts know")

    def cut(self, host: int) -> None:
        """Cuts a host off: it says nothing, and its connections stay open."""
        self._send(host, signal.SIGSTOP)

    def mend(self, host: int) -> None:
        """Ends that."""
        self._send(host, signal.SIGCONT)

    def _send(self, host: int, signum: signal.Signals) -> None:
        for process in self.processes_of(host):
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, signum)

    def evener(self, host: int, *arguments: object) -> Running:
        """Starts ``evener ARGUMENTS`` on a host."""
        running = self.sandbox.evener(*arguments)
        self._started.setdefault(host, []).append(running)
        return running

    def join(self, host: int, *options: object) -> Running:
        """Starts an agent that joins the team."""
        own = ("--address", self.addresses[host], "--token-file", self.token)
        return self.evener(host, "join", self.address, *own, *options, self.script)

    def launch(self, host: int, *options: object) -> Running:
        """Starts an agent of a team that begins on these hosts."""
        own = ("--master-addr", self.address, "--address", self.addresses[host])
        own += ("--token-file", self.token)
        return self.evener(host, "launch", *own, *options, self.script)

    def coordinate(self, *options: object) -> Running:
        """Starts the coordinator on the first host, by the command line."""
        own = ("--bind", self.address, "--token-file", self.token)
        return self.evener(0, "coordinator", *own, *options)

    def processes_of(self, host: int) -> list[psutil.Process]:
        """What runs on a host for a team: agents, and all that they have started."""
        found = []
        for running in self._started.get(host, []):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(running.process.pid)
                found += [process, *process.children(recursive=True)]
        return found

    # ── what workers have noted ──────────────────────────────────────────────────────────────────

    @property
    def journals(self) -> list[Journal]:
        """Of all workers that have begun to write one, the oldest first."""
        files = sorted(self.sandbox.folder.glob("journal-*"), key=lambda f: f.stat().st_ctime_ns)
        return [Journal(file) for file in files if "\n" in file.read_text()]

    def journal_of(self, running: Running, wait_s: float = PATIENCE_S) -> Journal:
        """Waits for the newest worker of an agent that has seen a window committed."""
        found: list[Journal] = []

        def look() -> bool:
            assert running.process.poll() is None, running.end().err
            with suppress(psutil.NoSuchProcess):
                agent = psutil.Process(running.process.pid)
                pids = {child.pid for child in agent.children(recursive=True)}
                found[:] = [j for j in self.journals if j.pid in pids and j.windows]
            return bool(found)

        wait_until(look, wait_s)
        return found[-1]

    def stop(self) -> None:
        """Has the script end everywhere."""
        (self.sandbox.folder / "stop").touch()


def wait_for_more(journal: Journal, count: int = 5, size: int = 0) -> None:
    """Wait until a worker has seen that many further windows, all in a team of this size."""
    last = journal.windows[-1]["window"] if journal.windows else -1

    def have_come() -> bool:
        rows = [row for row in journal.windows if row["window"] > last]
        return len([row for row in rows if not size or row["size"] == size]) >= count

    wait_until(have_come)


def check(journals: Sequence[Journal]) -> None:
    """Workers, the lost ones too, have seen the same windows and bits, and each sample once."""
    by_window: dict[int, Mapping[str, Any]] = {}
    for journal in journals:
        seen = [row["window"] for row in journal.windows]
        assert seen == sorted(set(seen)), f"{journal.path.name} saw a window twice: {seen}"
        for row in journal.windows:
            other = by_window.setdefault(row["window"], row)
            for key in ("epoch", "ranges", "digest"):
                assert other[key] == row[key], f"{journal.path.name}: {row} and {other}"
    assert sorted(by_window) == [*range(len(by_window))]
    epochs: dict[int, list[int]] = {}
    for row in by_window.values():
        ids = epochs.setdefault(row["epoch"], [])
        ids += [i for start, stop in row["ranges"] for i in range(start, stop)]
    for epoch, ids in epochs.items():
        assert len(set(ids)) == len(ids), f"epoch {epoch} has samples twice"
        assert epoch == max(epochs) or len(ids) == NUM_SAMPLES, f"epoch {epoch} is not whole"
    ends = {journal.end for journal in journals if journal.end}
    assert len(ends) == 1, f"workers end with unlike bits: {ends}"
