"""The coordinator of a team: it never trains, and decides who is in.

It is a process of its own, or a thread: of a launcher, or of rank 0 of a fixed team that another
launcher has started.

What it decides is in ``protocol/roster.py``. This is its edge: TCP connections, on each of which
messages travel as lines of JSON. A message that is too long, damaged or of an unknown kind ends its
connection and nothing else. Nothing is unpickled.
"""

import asyncio
import base64
import binascii
import json
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, final

from evener.closing import Closing
from evener.comm.addresses import LOOPBACK, open_port
from evener.errors import ConfigError
from evener.parsing import Fields, parse_json, short
from evener.protocol.formation import (
    NO_NUMBER,
    WHOLE_RUN,
    Deadlines,
    FixedPlace,
    Formation,
    ProcessState,
    Standing,
    read_message,
)
from evener.protocol.roster import Roster
from evener.team.sealed import FROM_COORDINATOR, MOST_MESSAGE_BYTES, Seal, new_nonce
from evener.team.terminal import say
from evener.version import __version__

_TICK_S: Final = 0.05
_END_S: Final = 5.0
#: Connections that have not said who they are; the oldest is closed for a new one.
_MOST_STRANGERS: Final = 32
#: A peer that does not read what it is sent is closed when so many bytes wait for it.
_MOST_WAITING_BYTES: Final = 4 * 1024 * 1024
_MOST_KEYS: Final = 100_000
_MOST_STORE_BYTES: Final = 64 * 1024 * 1024
_MOST_REFUSALS: Final = 50
#: A script has a fixed team for each connection between its ranks that is open.
_MOST_TEAMS: Final = 1000
_MOST_RANKS: Final = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """How a coordinator is started.

    Attributes:
        host: Where it listens.
        port: Its port; 0 takes a free one.
        least: Fewest members of the team.
        most: Most members.
        token: What workers must know; ``None`` admits every process of this host.
        deadlines: Those of the team.
    """

    host: str = LOOPBACK
    port: int = 0
    least: int = 1
    most: int
    token: bytes | None = None
    deadlines: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        if not 0 < self.deadlines.timeout_s < math.inf:
            raise ConfigError(
                f"--timeout-s is {self.deadlines.timeout_s:g}; give the seconds that workers wait "
                "for one another, more than 0"
            )
        if not self.deadlines.lease_s <= self.deadlines.host_lease_s < math.inf:
            raise ConfigError(
                f"--host-lease-s is {self.deadlines.host_lease_s:g}; give the seconds after which "
                f"a silent machine is lost, at least {self.deadlines.lease_s:g} (lease_s)"
            )


@final
class CoordinatorThread(Closing):
    """A coordinator on a thread of this process, until it is closed.

    Args:
        options: How it is started.
        listening: See ``Coordinator``.
        tick_s: See ``Coordinator``.

    Attributes:
        port: Where it listens.

    Raises:
        ConfigError: See ``Coordinator``.
        LaunchError: See ``Coordinator``.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        listening: socket.socket | None = None,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        self._coordinator = Coordinator(options, listening, tick_s=tick_s)
        self.port = self._coordinator.port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="evener-coordinator", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it; idempotent."""
        if self._thread.is_alive():
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._coordinator.stop)
            self._thread.join(_END_S)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._coordinator.serve())


def coordinate(options: CoordinatorOptions) -> int:
    """Run a coordinator until this process is told to stop (SIGINT, SIGTERM); return 0.

    It prints its address as soon as workers can connect.

    Raises:
        ConfigError: The coordinator would listen on other than loopback without a token.
        LaunchError: The port is in use or not allowed.
    """

    async def run() -> None:
        coordinator = Coordinator(options)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, coordinator.stop)
        least, most = options.least, options.most
        where = f"{options.host}:{coordinator.port}"
        say(f"evener coordinator: listens on {where} for a team of {least} to {most} workers")
        await coordinator.serve()

    asyncio.run(run())
    return 0


@final
class ServedTeam:
    """A team: its roster, the connections of its workers, and what its members tell one another.

    Args:
        roster: Decides who is in.
    """

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.store = GenerationStore()
        self.workers: dict[str, Visitor] = {}

    def send_orders(self) -> None:
        """Send what follows from the last event."""
        for order in self.roster.take():
            if not order.to:
                say(f"evener coordinator: {order.content['text']}")
            elif order.to in self.workers:
                self.workers[order.to].tell(order.type, order.content)
        self.store.keep(self.roster.generation)
        if why := self.roster.why_over:
            self.store.give_up(why)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self.roster.tick(now_s)
        self.send_orders()
        self.store.expire(now_s)


@final
class Coordinator:
    """Decides who is in an elastic team, and in fixed ones, for as long as ``serve`` runs.

    Args:
        options: How it is started.
        listening: A socket to listen on; its caller answers for who can reach it.
        tick_s: How often it looks what is due. Fixed teams form by events alone.

    Raises:
        ConfigError: The coordinator would listen on other than loopback without a token.
        LaunchError: The port is in use or not allowed.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        listening: socket.socket | None = None,
        *,
        tick_s: float = _TICK_S,
    ) -> None:
        is_guarded = options.token is not None
        self._socket = listening or open_port(
            options.host, options.port, program="the coordinator", is_guarded=is_guarded
        )
        self._tick_s = tick_s
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.options = options
        roster = Roster(options.least, options.most, options.deadlines, time.monotonic())
        self.elastic_team = ServedTeam(roster)
        self._fixed_teams: dict[str, ServedTeam] = {}
        self._strangers: list[Visitor] = []
        self._supervisors: list[Visitor] = []
        self._told: Formation | None = None
        self._is_end_told = False  # to all supervisors
        self._num_refusals = 0
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        """Serve until ``stop`` is called."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Visitor(self), sock=self._socket)
        try:
            while not self._stopping.is_set():
                try:
                    await asyncio.wait_for(self._stopping.wait(), self._tick_s)
                except TimeoutError:
                    self._tick()
        finally:
            # asyncio makes a transport of an accepted connection in the next round of its loop, and
            # calls the visitor in the one after. If the server is closed before, it stays open.
            loop.remove_reader(self._socket)
            for _ in range(2):
                await asyncio.sleep(0)
            server.close()
            workers = [one for team in self._teams for one in team.workers.values()]
            for visitor in [*self._strangers, *self._supervisors, *workers]:
                visitor.drop()

    def stop(self) -> None:
        """Let ``serve`` return; call it in the thread of its loop."""
        self._stopping.set()

    @property
    def _teams(self) -> list[ServedTeam]:
        return [self.elastic_team, *self._fixed_teams.values()]

    # ── what visitors call ───────────────────────────────────────────────────────────────────────

    def team_of(self, place: FixedPlace | None) -> ServedTeam:
        """Return the team that a visitor means: a fixed one, or the elastic one.

        Raises:
            ValueError: There are too many.
        """
        if place is None:
            return self.elastic_team
        if place.team not in self._fixed_teams:
            if len(self._fixed_teams) >= _MOST_TEAMS:
                raise ValueError(f"there are {_MOST_TEAMS} teams, which is as many as it keeps")
            size, now_s = place.world_size, time.monotonic()
            roster = Roster(size, size, self.options.deadlines, now_s, is_fixed=True)
            self._fixed_teams[place.team] = ServedTeam(roster)
        return self._fixed_teams[place.team]

    def welcome(self, visitor: "Visitor") -> None:
        """Take in a connection that has not said who it is."""
        self._strangers.append(visitor)
        if len(self._strangers) > _MOST_STRANGERS:
            self._strangers[0].drop()

    def know(self, visitor: "Visitor") -> None:
        """Note that a connection has said who it is."""
        if visitor in self._strangers:
            self._strangers.remove(visitor)
        if not visitor.member:
            self._supervisors.append(visitor)
            self._is_end_told = False
        else:
            before = visitor.team.workers.get(visitor.member)
            visitor.team.workers[visitor.member] = visitor
            if before is not None and before is not visitor:
                before.drop()

    def forget(self, visitor: "Visitor") -> None:
        """Note that a connection has ended."""
        if visitor in self._strangers:
            self._strangers.remove(visitor)
        if visitor in self._supervisors:
            self._supervisors.remove(visitor)
        team = visitor.team
        if team.workers.get(visitor.member) is visitor:
            del team.workers[visitor.member]
            team.roster.depart(time.monotonic(), visitor.member)
            self.send_orders()
        for name in [name for name, each in self._fixed_teams.items() if not each.workers]:
            del self._fixed_teams[name]

    def refuse(self, why: str) -> None:
        """Print why a connection was refused, up to a number of times."""
        self._num_refusals += 1
        if self._num_refusals <= _MOST_REFUSALS:
            say(f"evener coordinator: {why}")

    def send_orders(self) -> None:
        """Send what follows from the last event."""
        for team in self._teams:
            team.send_orders()
        roster = self.elastic_team.roster
        formation = roster.formation
        if formation is not None and formation != self._told:
            self._told = formation
            for supervisor in self._supervisors:
                supervisor.tell("formed", asdict(formation))
        if roster.run_has_ended and not self._is_end_told:
            for supervisor in self._supervisors:
                supervisor.tell("ended", {})
        self._is_end_told = roster.run_has_ended

    def _tick(self) -> None:
        now_s = time.monotonic()
        for team in self._teams:
            team.tick(now_s)
        self.send_orders()
        for visitor in [*self._strangers]:
            if now_s - visitor.since_s > self.options.deadlines.hello_s:
                visitor.drop()


@final
class Visitor(asyncio.Protocol):
    """One connection, of a worker, of a supervisor or of a stranger."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.member = ""
        self.team = coordinator.elastic_team
        self.since_s = time.monotonic()
        self._coordinator = coordinator
        self._unread = bytearray()
        self._nonce = new_nonce()
        self._seal: Seal | None = None
        self._role = ""
        self._has_left = False
        self._transport: asyncio.Transport | None = None

    # ── asyncio calls these ──────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what the other end has to prove."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._write(
            {
                "type": "challenge",
                "nonce": self._nonce,
                "needs_token": self._coordinator.options.token is not None,
                "evener": __version__,
            }
        )
        self._coordinator.welcome(self)

    def data_received(self, data: bytes) -> None:
        """Read whole lines."""
        self._unread += data
        while self._transport is not None:
            line, newline, rest = self._unread.partition(b"\n")
            if len(line) > MOST_MESSAGE_BYTES:
                self._reject(f"a message has more than {MOST_MESSAGE_BYTES} bytes")
                return
            if not newline:
                return
            self._unread = rest
            try:
                self._hear(bytes(line))
            except ValueError as error:
                self._reject(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the other end has gone."""
        del exc
        self._transport = None
        self._coordinator.forget(self)

    # ── what others call ─────────────────────────────────────────────────────────────────────────

    def tell(self, type: str, content: Mapping[str, Any]) -> None:  # noqa: A002
        """Send a message."""
        if self._seal is not None:
            self._write(self._seal.close({"type": type, **content}))

    def drop(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._coordinator.forget(self)

    # ── what is heard ────────────────────────────────────────────────────────────────────────────

    def _write(self, message: Mapping[str, Any]) -> None:
        # asyncio prints a line for each write to a connection that ended and was not yet reported.
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(json.dumps(message).encode() + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            self.drop()

    def _reject(self, why: str) -> None:
        who = f"{self._role} {self.member}".strip() or "an unknown process"
        self._coordinator.refuse(f"closed the connection of {who}: {why}")
        self.drop()

    def _hear(self, line: bytes) -> None:
        message = parse_json(line)
        now_s = time.monotonic()
        if self._seal is None:
            self._meet(now_s, message)
        else:
            fields = self._seal.open(message)
            hear = {"worker": self._hear_worker, "supervisor": self._hear_supervisor}[self._role]
            hear(now_s, fields.text("type"), fields)
        self._coordinator.send_orders()

    def _meet(self, now_s: float, message: Any) -> None:
        nonce = Fields(message).text("nonce")[:64]
        seal = Seal(self._coordinator.options.token, (self._nonce, nonce), FROM_COORDINATOR)
        try:
            hello = seal.open(message)
        except ValueError as error:
            why = "the token differs from the coordinator's; give both the same --token-file"
            self._write({"type": "refused", "why": why})
            raise ValueError(f"it does not know the token ({error})") from None
        role, member = hello.text("role"), hello.text("member")
        if role not in ("worker", "supervisor") or not 0 < len(member) <= 128:
            raise ValueError(f"role {short(role)} or member {short(member)} is none")
        self._seal = seal
        self._role = role
        place = _read_place(hello.fields("fixed")) if "fixed" in hello else None
        if role == "worker":
            self.team = self._coordinator.team_of(place)
        roster = self.team.roster
        held = read_message(Formation, hello.fields("held")) if hello["held"] is not None else None
        if role == "supervisor":
            roster.remember(now_s, held)
        else:
            session = hello.text("session")
            facts = hello.fields("facts").values
            wish = hello.whole("wish", least=NO_NUMBER) if place is None else place.rank
            if place is not None:
                facts = {**facts, "world_size": place.world_size}
            why = roster.arrive(now_s, member, session, facts, held, wish)
            if why:
                self.tell("refused", {"why": why})
                self._coordinator.send_orders()  # others may be refused for the same reason
                raise ValueError(f"refused worker {member}: {why}")
            self.member = member
        self._coordinator.know(self)
        number = roster.number_of(member) if role == "worker" else 0
        options = self._coordinator.options
        self.tell(
            "welcome",
            {
                "generation": roster.generation,
                "open": roster.is_open(now_s),
                "number": number,
                "deadlines": asdict(options.deadlines),
                "limits": [roster.least, roster.most],
            },
        )

    def _hear_worker(self, now_s: float, kind: str, fields: Fields) -> None:
        roster = self.team.roster
        if self._has_left:  # its connection may outlast it, and must not make it a worker again
            self.tell("left", {})
        elif not roster.knows(self.member):
            self.drop()  # it was taken for dead, and may come again
        elif kind == "beat":
            counter, phase = fields.whole("micro_batches"), fields.text("phase")
            sent = fields["at"]
            renewed = roster.beat(now_s, self.member, counter, phase)
            known = {
                "generation": roster.generation,
                "open": roster.is_open(now_s),
                "number": roster.number_of(self.member),
                "leads": roster.leads(now_s, self.member),
            }
            self.tell("beaten", {"at": sent, "renewed": renewed, **known})
        elif kind == "report":
            has_state = fields["standing"] is not None
            held = read_message(Standing, fields.fields("standing")) if has_state else None
            roster.report(now_s, self.member, fields.whole("generation"), held)
        elif kind == "leave":
            self._has_left = True
            roster.leave(now_s, self.member, finished=fields.flag("finished"))
            self.tell("left", {})
        elif kind == "facts":
            roster.describe(now_s, self.member, fields.fields("facts").values)
            self._coordinator.send_orders()  # a refusal comes first
            self.tell("compared", {})
        elif kind == "missing":
            self.tell("missing", {"ranks": roster.missing})
        elif kind == "store" and not (
            _reads(fields) or roster.is_member(self.member) or roster.leads(now_s, self.member)
        ):
            answer = {"number": fields.whole("number"), "error": "its generation is over"}
            self.tell("stored", answer)
        elif kind == "store":
            self.team.store.ask(now_s, fields, lambda answer: self.tell("stored", answer))
        else:
            raise ValueError(f"type is {short(kind)}, which no worker sends")

    def _hear_supervisor(self, now_s: float, kind: str, fields: Fields) -> None:
        if kind == "process":
            state = ProcessState(fields.text("state"))
            roster = self.team.roster
            roster.process(now_s, fields.text("member"), state, fields.text("reason"))
        elif kind == "beat":
            self.team.roster.attend(now_s, fields.texts("members"))
            self.tell("beaten", {"workers": self.team.roster.living(now_s)})
        else:
            raise ValueError(f"type is {short(kind)}, which no supervisor sends")


def _read_place(fields: Fields) -> FixedPlace:
    team, rank, size = (
        fields.text("team"),
        fields.whole("rank"),
        fields.whole("world_size", least=1),
    )
    if not (len(team) <= 128 and rank < size <= _MOST_RANKS):
        raise ValueError(f"rank {rank} of {size} in team {short(team)} is none")
    return FixedPlace(team, rank, size)


# ── keys and values of a generation ──────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _AwaitedKey:
    number: int
    generation: int
    key: str
    until_s: float
    answer: Callable[[Mapping[str, Any]], None]


class GenerationStore:
    """What members of a generation tell one another in order to connect."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], bytes] = {}
        self._since: dict[str, int] = {}  # by key of the whole run, the generation that has set it
        self._num_bytes = 0
        self._newest = 0
        self._waits: list[_AwaitedKey] = []

    def keep(self, generation: int) -> None:
        """Drop what belongs to generations before this one."""
        if generation == self._newest:
            return
        self._newest = generation
        for place in [place for place in self._values if WHOLE_RUN < place[0] < generation]:
            self._remove(place)
        for waiting in [one for one in self._waits if WHOLE_RUN < one.generation < generation]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "error": "its generation is over"})

    def give_up(self, why: str) -> None:
        """Answer those that wait for a key of the newest generation, as it is over."""
        for waiting in [one for one in self._waits if one.generation != WHOLE_RUN]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "error": f"its generation is over: {why}"})

    def expire(self, now_s: float) -> None:
        """Answer those that have waited for too long."""
        for waiting in [one for one in self._waits if now_s >= one.until_s]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "error": "no member has set it in time"})

    def ask(
        self, now_s: float, fields: Fields, answer: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Carry out a request, and answer it now or later.

        Raises:
            ValueError: It is not a request.
        """
        number, generation = fields.whole("number"), fields.whole("generation")
        what, keys = fields.text("what"), fields.texts("keys")
        if not keys or (what not in ("holds",) and len(keys) != 1):
            raise ValueError(f"keys is {short(keys)}, not one key")
        if generation not in (WHOLE_RUN, self._newest):
            answer({"number": number, "error": f"generation {generation} is over"})
            return
        place = generation, keys[0]
        if what == "put":
            if generation != WHOLE_RUN or self._is_news(keys[0], fields.whole("since")):
                self._put(place, _decode(fields.text("value")))
            answer({"number": number, "value": True})
        elif what == "fetch" and place not in self._values:
            until_s = now_s + fields.number("timeout_s", least=0.0)
            self._waits.append(_AwaitedKey(number, generation, keys[0], until_s, answer))
        elif what == "fetch":
            answer({"number": number, "value": _encode(self._values[place])})
        elif what == "increase":
            before = self._values.get(place, b"0")
            total = int(before) + fields.whole("amount", least=-(2**53))
            self._put(place, str(total).encode())
            answer({"number": number, "value": total})
        elif what == "holds":
            present = all((generation, key) in self._values for key in keys)
            answer({"number": number, "value": present})
        elif what == "remove":
            answer({"number": number, "value": self._remove(place)})
        else:
            raise ValueError(f"what is {short(what)}, which is no request")

    def _is_news(self, key: str, since: int) -> bool:
        """Return whether no member has told otherwise later: those that come back tell it again."""
        is_news = since >= self._since.get(key, 0)
        if is_news:
            self._since[key] = since
        return is_news

    def _put(self, place: tuple[int, str], value: bytes) -> None:
        self._remove(place)
        self._num_bytes += len(value) + len(place[1])
        if self._num_bytes > _MOST_STORE_BYTES or len(self._values) >= _MOST_KEYS:
            self._num_bytes -= len(value) + len(place[1])
            raise ValueError(
                f"the store holds {len(self._values)} keys and {self._num_bytes} bytes, which is "
                "as many as it keeps"
            )
        self._values[place] = value
        for waiting in [one for one in self._waits if (one.generation, one.key) == place]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "value": _encode(value)})

    def _remove(self, place: tuple[int, str]) -> bool:
        value = self._values.pop(place, None)
        if value is None:
            return False
        self._num_bytes -= len(value) + len(place[1])
        return True


def _encode(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _reads(fields: Fields) -> bool:
    """Whether a request changes nothing: who is about to join asks where the team is."""
    return fields.text("what") in ("fetch", "holds")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"value is {short(text)}, not base64") from None
