"""What it costs to keep a team of 1,000 members: the roster in virtual time, and real connections.

    python benchmarks/control_scale.py --json control_scale.json
    python benchmarks/control_scale.py --members 100,1000 --seconds 10

``virtual``: a roster alone, without sockets; each member sends its messages at once. A *change* is
the first generation (``start``), one more member (``join``), one that is killed (``death``), and a
network that splits, so that half of the team is lost together (``partition``). ``messages`` are
those that members and roster send for it; ``seconds`` is the processor time of the roster for all
of them, and ``virtual_s`` the time until the next generation has formed, of which deadlines are
most. ``tick`` is what the roster does 20 times a second when nothing happens.

``real``: a coordinator in a process of its own, with a token, and as many connections of members,
which one other process holds. ``formed_s`` is the time until all have connected and have heard of
the first generation. Then each member sends a heartbeat every 0.25 s: ``cpu_share`` is the part of
one core that the coordinator takes, ``answer_ms`` the time until a heartbeat is answered: median,
95th percentile, longest. Both processes share the cores of this machine.
"""

import argparse
import asyncio
import json
import os
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from machine import load_before, write_report
from options import make_parser, numbers

from evener.protocol.formation import TRAINING, Deadlines, ProcessState, Standing
from evener.protocol.roster import Roster
from evener.team.wire import TO_COORDINATOR, Seal, new_nonce

MEMBERS = (10, 100, 1000)
BEAT_S: Final = Deadlines().beat_s
TICK_S: Final = 0.05
SERVE: Final = """
import sys
from evener.team.coordinator import coordinate
from evener.team.coordinator_thread import CoordinatorOptions
count, token = int(sys.argv[1]), sys.stdin.readline().strip().encode()
coordinate(CoordinatorOptions(least=count, most=count, token=token))
"""
#: Longest wait for anything of the real team.
PATIENCE_S: Final = 120.0


def main() -> None:
    """Measures, prints and writes."""
    arguments = parse_arguments()
    before = load_before()
    rows: list[dict[str, Any]] = []
    for num_members in arguments.members:
        rows += measure_virtual(num_members)
        rows.append(asyncio.run(measure_real(num_members, arguments.seconds)))
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    write_report(arguments, before, rows)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--members", type=numbers, default=list(MEMBERS), help="such as 100,1000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats")
    return parser.parse_args()


# ── virtual ──────────────────────────────────────────────────────────────────────────────────────


class Team:
    """A roster, and members that answer at once."""

    def __init__(self, most: int) -> None:
        self.now_s = 100.0
        self.roster = Roster(1, most, Deadlines(), 0.0)
        self.taken_s = 0.0  # processor time of the roster
        self.num_messages = 0
        self.applied = 0
        self.alive: dict[str, None] = {}

    def start(self, name: str) -> None:
        """A worker comes, and waits for a generation."""
        self.alive[name] = None
        facts = {"model": "one", "evener": "1", "torch": "2", "data": "d"}
        self.call("arrive", name, name, facts, None)
        self.call("report", name, self.roster.generation, None)

    def call(self, event: str, *args: Any) -> None:
        """A message to the roster."""
        self.num_messages += 1
        self.measure(event, *args)

    def measure(self, event: str, *args: Any) -> None:
        """An event of the roster."""
        started_s = time.process_time()
        getattr(self.roster, event)(self.now_s, *args)
        self.taken_s += time.process_time() - started_s

    def answer(self) -> None:
        """Members do what the roster answers to the messages that have come together."""
        started_s = time.process_time()
        outgoing = self.roster.take()
        self.taken_s += time.process_time() - started_s
        self.num_messages += len(outgoing)
        generation = self.roster.generation
        over = [m.to for m in outgoing if m.type == "over" and m.to in self.alive]
        for name in over:
            self.leave_generation(name, generation)
        if over:
            self.answer()

    def leave_generation(self, name: str, generation: int) -> None:
        """A member leaves its generation with its state."""
        held = Standing(applied=self.applied, committed=self.applied, digest="same")
        self.call("report", name, generation, held)

    def wait_for(self, generation: int) -> float:
        """Time passes, with heartbeats that are not counted; returns how much of it."""
        since_s = self.now_s
        self.answer()
        while self.roster.generation < generation:
            self.now_s += TICK_S
            self.roster.attend(self.now_s, self.alive)
            self.measure("tick")
            self.answer()
        return self.now_s - since_s


def measure_virtual(num_members: int) -> list[dict[str, Any]]:
    """The rows of one size of team."""
    team = Team(2 * num_members)
    rows = []

    def note(change: str, virtual_s: float) -> None:
        rows.append(
            {
                "name": "virtual",
                "members": num_members,
                "change": change,
                "messages": team.num_messages,
                "seconds": round(team.taken_s, 4),
                "virtual_s": round(virtual_s, 2),
            }
        )
        team.num_messages, team.taken_s = 0, 0.0

    for number in range(num_members):
        team.start(f"host-{number}/0")
    note("start", team.wait_for(1))
    started_s = time.process_time()
    for _ in range(20):
        team.now_s += TICK_S
        team.roster.attend(team.now_s, team.alive)
        team.roster.tick(team.now_s)
    ticked_s = (time.process_time() - started_s) / 20
    team.roster.take()
    team.applied = 10
    team.start("late/0")
    for name in list(team.alive)[:-1]:  # they heed `wanted` at their next window
        team.leave_generation(name, 1)
    note("join", team.wait_for(2))
    team.alive.pop("host-1/0")
    team.call("process", "host-1/0", ProcessState.GONE, "killed by SIGKILL")
    note("death", team.wait_for(3))
    for name in list(team.alive)[1::2]:
        team.alive.pop(name)
        team.call("depart", name)
    note("partition", team.wait_for(4))
    rows.append(
        {
            "name": "virtual",
            "members": num_members,
            "change": "tick",
            "messages": 0,
            "seconds": round(ticked_s, 6),
            "virtual_s": 0.0,
        }
    )
    return rows


# ── real ─────────────────────────────────────────────────────────────────────────────────────────


class Member(asyncio.Protocol):
    """A worker's connection, without a worker."""

    def __init__(self, number: int, token: bytes) -> None:
        self.name = f"host-{number}/0"
        self.met, self.generation = asyncio.Event(), asyncio.get_running_loop().create_future()
        self.answers_s: list[float] = []
        self.ended = False
        self._token, self._unread = token, b""
        self._seal: Seal | None = None

    def connection_made(self, transport: Any) -> None:
        """The challenge follows."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The coordinator has closed it."""
        self.ended = True
        self.met.set()
        if not self.generation.done():
            self.generation.set_exception(exc or ConnectionError(f"{self.name} was closed"))

    def data_received(self, data: bytes) -> None:
        """Reads messages."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if self._seal is None:
                self._introduce(message["nonce"])
                continue
            fields = self._seal.open(message)
            kind = fields.text("type")
            if kind == "beaten":
                self.answers_s.append(time.monotonic() - fields.number("at"))
            elif kind == "formed":
                self.generation.set_result(fields.whole("generation"))

    def beat(self) -> None:
        """Sends a heartbeat."""
        at = time.monotonic()
        self._send({"type": "beat", "micro_batches": 1, "phase": TRAINING, "at": at})

    def close(self) -> None:
        """Ends the connection."""
        self._transport.abort()

    def _introduce(self, theirs: str) -> None:
        self.met.set()
        nonce = new_nonce()
        self._seal = Seal(self._token, (theirs, nonce), TO_COORDINATOR)
        self._send({"role": "worker", "member": self.name}, nonce=nonce)
        self._send(
            {
                "session": self.name,
                "facts": {"model": "one", "evener": "1", "torch": "2", "data": "d"},
                "held": None,
                "wish": -1,
                "address": "127.0.0.1",
            }
        )
        self._send({"type": "report", "generation": 0, "standing": None, "unreached": []})

    def _send(self, message: dict[str, Any], **beside: str) -> None:
        assert self._seal is not None
        self._transport.write(json.dumps({**self._seal.close(message), **beside}).encode() + b"\n")


async def measure_real(num_members: int, seconds: float) -> dict[str, Any]:
    """The row of one size of team."""
    allow_files(2 * num_members + 200)
    token = secrets.token_hex(32)
    # Not by the command line, whose options are another matter.
    command = [sys.executable, "-c", SERVE, str(num_members)]
    coordinator = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert coordinator.stdin is not None
    assert coordinator.stderr is not None
    try:
        coordinator.stdin.write(f"{token}\n")
        coordinator.stdin.flush()
        line = coordinator.stderr.readline()
        port = int(line.partition("listens on ")[2].split()[0].rpartition(":")[2])
        return await drive(num_members, seconds, port, token.encode(), coordinator.pid)
    finally:
        coordinator.send_signal(signal.SIGTERM)
        coordinator.communicate(timeout=PATIENCE_S)


async def drive(
    num_members: int, seconds: float, port: int, token: bytes, pid: int
) -> dict[str, Any]:
    """Connects members to a coordinator, and lets them beat."""
    loop = asyncio.get_running_loop()
    began_s, began_cpu_s = time.monotonic(), processor_s(pid)
    members = []

    async def connect(number: int) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while True:  # one of too many that come at once is closed, and comes again
            _, member = await loop.create_connection(
                lambda: Member(number, token), "127.0.0.1", port
            )
            await member.met.wait()
            if not member.ended:
                members.append(member)
                return
            member.generation.exception()
            await asyncio.sleep(0.1)
            if time.monotonic() > until_s:
                raise TimeoutError(f"member {number} was not taken in")

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*map(connect, range(num_members)))
        beating = loop.create_task(beat(members))
        await asyncio.gather(*(member.generation for member in members))
    formed_s, formed_cpu_s = time.monotonic() - began_s, processor_s(pid) - began_cpu_s
    await asyncio.sleep(1.0)
    for member in members:
        member.answers_s.clear()
    since_s, since_cpu_s = time.monotonic(), processor_s(pid)
    await asyncio.sleep(seconds)
    took_s, took_cpu_s = time.monotonic() - since_s, processor_s(pid) - since_cpu_s
    assert not beating.done(), beating
    beating.cancel()
    answers_ms = sorted(1000 * one for member in members for one in member.answers_s)
    assert not any(member.ended for member in members)
    for member in members:
        member.close()
    return {
        "name": "real",
        "members": num_members,
        "formed_s": round(formed_s, 2),
        "formed_cpu_s": round(formed_cpu_s, 2),
        "cpu_share": round(took_cpu_s / took_s, 3),
        "beats": len(answers_ms),
        "answer_ms": [
            round(value, 2)
            for value in (
                statistics.median(answers_ms),
                answers_ms[int(0.95 * len(answers_ms))],
                answers_ms[-1],
            )
        ],
    }


async def beat(members: list[Member]) -> None:
    """Every member beats once in ``BEAT_S``, spread over it."""
    while True:
        began_s = time.monotonic()
        for number, member in enumerate(members):
            member.beat()
            if number % 20 == 19:
                due_s = began_s + BEAT_S * (number + 1) / len(members)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        await asyncio.sleep(max(0.0, began_s + BEAT_S - time.monotonic()))


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def allow_files(count: int) -> None:
    """Lets this process and its children open so many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


if __name__ == "__main__":
    main()
