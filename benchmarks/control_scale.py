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
one core that the coordinator takes, ``answer_ms`` the time until a heartbeat is answered, over all
heartbeats. Both processes share the cores of this machine.
"""

import asyncio
import json
import resource
import secrets
import signal
import subprocess
import sys
import time
from typing import Any, Final

import psutil
from report import load_before, make_parser, numbers, spread, text_of, write_report

from evener.protocol.formation import TRAINING, Deadlines, ProcessState, Standing
from evener.protocol.roster import Roster
from evener.team.wire import TO_COORDINATOR, Seal, new_nonce

BEAT_S: Final = Deadlines().beat_s
TICK_S: Final = 0.05
SERVE: Final = """
import sys
from evener.team.coordinator import coordinate
from evener.team.coordinator_options import CoordinatorOptions
count, token = int(sys.argv[1]), sys.stdin.readline().strip().encode()
coordinate(CoordinatorOptions(least=count, most=count, token=token))
"""
FACTS: Final = {"model": "one", "evener": "1", "torch": "2", "data": "d"}
#: Longest wait for anything of the real team.
PATIENCE_S: Final = 120.0


def main() -> None:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--members", type=numbers, default=[10, 100, 1000], help="such as 100,1000")
    parser.add_argument("--seconds", type=float, default=10.0, help="of heartbeats")
    parser.add_argument("--quick", action="store_true", help="20 members, 2 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.members, arguments.seconds = [20], 2.0
    before = load_before()
    rows: list[dict[str, Any]] = []
    for num_members in arguments.members:
        rows += measure_virtual(num_members)
        rows.append(asyncio.run(measure_real(num_members, arguments.seconds)))
    print(text_of(rows))
    write_report(arguments, before, rows)


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
        """Let a worker come, and wait for a generation."""
        self.alive[name] = None
        self.call("arrive", name, name, FACTS, None)
        self.call("report", name, self.roster.generation, None)

    def call(self, event: str, *args: Any) -> None:
        """Send a message to the roster."""
        self.num_messages += 1
        self.measure(event, *args)

    def measure(self, event: str, *args: Any) -> None:
        """Tell the roster of an event."""
        started_s = time.process_time()
        getattr(self.roster, event)(self.now_s, *args)
        self.taken_s += time.process_time() - started_s

    def answer(self) -> None:
        """Let members do what the roster answers to the messages that have come together."""
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
        """Let a member leave its generation with its state."""
        held = Standing(applied=self.applied, committed=self.applied, digest="same")
        self.call("report", name, generation, held)

    def wait_for(self, generation: int) -> float:
        """Let time pass, with heartbeats that are not counted; return how much of it."""
        since_s = self.now_s
        self.answer()
        while self.roster.generation < generation:
            self.tick()
            self.answer()
        return self.now_s - since_s

    def tick(self) -> None:
        """Let a little time pass."""
        self.now_s += TICK_S
        self.roster.attend(self.now_s, self.alive)
        self.measure("tick")


def measure_virtual(num_members: int) -> list[dict[str, Any]]:
    """Return the rows of one size of team."""
    team = Team(2 * num_members)
    rows = []

    def note(change: str, virtual_s: float, times: int = 1) -> None:
        place = {"name": "virtual", "members": num_members, "change": change}
        taken = {"messages": team.num_messages, "seconds": round(team.taken_s / times, 6)}
        rows.append({**place, **taken, "virtual_s": round(virtual_s, 2)})
        team.num_messages, team.taken_s = 0, 0.0

    for number in range(num_members):
        team.start(f"host-{number}/0")
    note("start", team.wait_for(1))
    for _ in range(20):
        team.tick()
    note("tick", 0.0, times=20)
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
    return rows


# ── real ─────────────────────────────────────────────────────────────────────────────────────────


class Member:
    """A worker's connection, without a worker."""

    def __init__(self, number: int, token: bytes) -> None:
        self.name, self._token = f"host-{number}/0", token
        self.formed = asyncio.Event()
        self.answers_s: list[float] = []

    async def connect(self, port: int) -> None:
        """Connect, and introduce itself; one of too many that come at once comes again."""
        challenge = b""
        while not challenge:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
            challenge = await self._reader.readline()
        nonce = new_nonce()
        self._seal = Seal(self._token, (json.loads(challenge)["nonce"], nonce), TO_COORDINATOR)
        self._send({"role": "worker", "member": self.name}, nonce=nonce)
        facts = {"session": self.name, "facts": FACTS, "held": None, "wish": -1}
        self._send({**facts, "address": "127.0.0.1"})
        self._send({"type": "report", "generation": 0, "standing": None, "unreached": []})

    async def listen(self) -> None:
        """Note when heartbeats are answered, and whether a generation has formed."""
        while line := await self._reader.readline():
            fields = self._seal.open(json.loads(line))
            if fields.text("type") == "beaten":
                self.answers_s.append(time.monotonic() - fields.number("at"))
            elif fields.text("type") == "formed":
                self.formed.set()

    async def beat(self, begin_s: float) -> None:
        """Send heartbeats, the first one after some seconds: members spread them."""
        await asyncio.sleep(begin_s)
        while True:
            at = time.monotonic()
            self._send({"type": "beat", "micro_batches": 1, "phase": TRAINING, "at": at})
            await asyncio.sleep(BEAT_S)

    def _send(self, message: dict[str, Any], **beside: str) -> None:
        text = json.dumps({**self._seal.close(message), **beside})
        self._writer.write(f"{text}\n".encode())


async def measure_real(num_members: int, seconds: float) -> dict[str, Any]:
    """Return the row of one size of team."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = min(max(soft, 2 * num_members + 200), hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    token = secrets.token_hex(32)
    coordinator = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(num_members)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert coordinator.stdin is not None
    assert coordinator.stderr is not None
    try:
        coordinator.stdin.write(f"{token}\n")
        coordinator.stdin.flush()
        line = coordinator.stderr.readline()
        port = int(line.partition("listens on ")[2].split()[0].rpartition(":")[2])
        members = [Member(number, token.encode()) for number in range(num_members)]
        figures = await drive(members, seconds, port, psutil.Process(coordinator.pid))
    finally:
        coordinator.send_signal(signal.SIGTERM)
        coordinator.communicate(timeout=PATIENCE_S)
    return {"name": "real", "members": num_members, **figures}


async def drive(
    members: list[Member], seconds: float, port: int, coordinator: psutil.Process
) -> dict[str, Any]:
    """Connect members to a coordinator, and let them beat."""
    began_s = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(member.connect(port) for member in members))
        works = [member.listen() for member in members]
        works += [one.beat(BEAT_S * n / len(members)) for n, one in enumerate(members)]
        tasks = [*map(asyncio.create_task, works)]
        await asyncio.gather(*(member.formed.wait() for member in members))
    formed_s = time.monotonic() - began_s
    await asyncio.sleep(1.0)
    for member in members:
        member.answers_s.clear()
    since_s, since_cpu_s = time.monotonic(), sum(coordinator.cpu_times()[:2])
    await asyncio.sleep(seconds)
    took_s, took_cpu_s = time.monotonic() - since_s, sum(coordinator.cpu_times()[:2]) - since_cpu_s
    for task in tasks:
        assert not task.done(), task
        task.cancel()
    answers_ms = [1000 * one for member in members for one in member.answers_s]
    return {
        "formed_s": round(formed_s, 2),
        "cpu_share": round(took_cpu_s / took_s, 3),
        "beats": len(answers_ms),
        **spread("answer_ms", answers_ms),
        "answer_ms_max": round(max(answers_ms), 2),
    }


if __name__ == "__main__":
    main()
