"""The coordinator of a team: it never trains, and decides who is a member.

It is a separate process, or a thread: of a launcher, or of rank 0 of a fixed team that another
launcher has started.

Its decisions are in ``protocol/roster.py``. This module has the TCP connections, on which messages
are lines of JSON. A message that is too long, damaged or of an unknown type ends only its
connection. Nothing is unpickled.
"""

import asyncio
import json
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, final

from evener import lease_clock
from evener.comm.addresses import end_when_unreachable, is_loopback
from evener.parsing import Fields, parse_json, short
from evener.protocol.formation import (
    NO_NUMBER,
    FixedPlace,
    Formation,
    ProcessState,
    Standing,
    read_message,
)
from evener.protocol.hosts import Host, Hosts
from evener.protocol.roster import Roster
from evener.team.coordinator_options import TICK_S, CoordinatorOptions, listen
from evener.team.host import remedy_of_shortage
from evener.team.ledger import Ledger, LedgerEntry
from evener.team.terminal import say
from evener.team.wire import FROM_COORDINATOR, MOST_MESSAGE_BYTES, Seal, new_nonce
from evener.version import __version__

#: Most connections that have not identified themselves. Beyond it, new ones are closed at once:
#: open ones came first, and are closed after ``hello_s``.
_MOST_UNIDENTIFIED: Final = 256
#: Most connections that are accepted between two ticks; the kernel keeps the others waiting. So
#: known workers are served in between, however many other connections come.
_MOST_PER_TICK: Final = 50
#: Most bytes that a connection may send before it has proven that it knows the token.
_MOST_HELLO_BYTES: Final = 4096
#: Most bytes that wait for a peer that does not read; beyond it, its connection is closed.
_MOST_WAITING_BYTES: Final = 4 * 1024 * 1024
_MOST_KEYS: Final = 100_000
_MOST_STORE_BYTES: Final = 64 * 1024 * 1024
_MOST_REFUSALS: Final = 50
#: Most fixed teams; a script has one for each open connection between its ranks.
_MOST_TEAMS: Final = 1000
_MOST_RANKS: Final = 9999


def coordinate(options: CoordinatorOptions) -> int:
    """Run a coordinator until this process is asked to stop (SIGINT, SIGTERM); return 0.

    It prints its address as soon as workers can connect.

    Raises:
        ConfigError: The coordinator would listen on another address than loopback without a token,
            or its ledger is in use, damaged or another team's.
        LaunchError: The port is in use or not allowed.
    """

    async def run() -> None:
        coordinator = Coordinator(options, listen(options))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            # Ignored signals stay ignored: workers still need a coordinator that a script has
            # started in the background when they leave on Ctrl-C.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, coordinator.stop)
        least, most = options.least, options.most
        where = f"{options.host}:{coordinator.port}"
        say(f"evener coordinator: listens on {where} for a team of {least} to {most} workers")
        await coordinator.serve()

    asyncio.run(run())
    return 0


@final
class ServedTeam:
    """A team: its roster, the connections of its workers, and its members' key-value store.

    Args:
        roster: Decides who is a member.
        ledger: File from which an elastic team continues; ``None`` for none.
    """

    def __init__(self, roster: Roster, ledger: Ledger | None = None) -> None:
        self.roster = roster
        self.store = KeyValues()
        self.workers: dict[str, ClientConnection] = {}
        #: Refused workers with the reason, until they were sent to the main process.
        self._refused: deque[tuple[str, str]] = deque(maxlen=_MOST_REFUSALS)
        self._ledger = ledger
        if ledger is not None:
            known = ledger.entry
            roster.remember(roster.started_s, known.formation, known.facts)
            roster.run_has_ended |= known.run_has_ended

    def send_orders(self) -> None:
        """Send what follows from the last events."""
        orders = self.roster.take()
        self._keep_ledger()  # before a generation is announced
        for order in orders:
            if not order.to:
                say(f"evener coordinator: {order.content['text']}")
            elif order.to in self.workers:
                self.workers[order.to].send(order.type, order.content)
                if order.type == "failed":
                    self.note_refused(order.to, order.content["why"])
        self.store.keep(self.roster.generation)
        if why := self.roster.why_over:
            self.store.give_up(why)

    def note_refused(self, member: str, why: str) -> None:
        """Record that a worker was refused, for the events of the run."""
        self._refused.append((member, why))

    def take_refused(self) -> list[tuple[str, str]]:
        """Return the workers that were refused since the last call, and why."""
        refused = [*self._refused]
        self._refused.clear()
        return refused

    def _keep_ledger(self) -> None:
        if self._ledger is not None:
            roster = self.roster
            entry = LedgerEntry(
                formation=roster.formation,
                run_has_ended=roster.run_has_ended,
                facts=dict(roster.facts()),
            )
            if entry != self._ledger.entry:
                self._ledger.write(entry)

    def tick(self, now_s: float) -> None:
        """Handle deadlines."""
        self.roster.tick(now_s)
        self.store.expire(now_s)


@final
class Coordinator:
    """Decides who is in an elastic team, and in fixed ones, while ``serve`` runs.

    Args:
        options: How it is started.
        listening: A listening socket; the caller is responsible for who can reach it.
        tick_s: Seconds between checks of deadlines. Fixed teams form by events alone.

    Raises:
        ConfigError: The ledger is in use, damaged or another team's.
    """

    def __init__(
        self, options: CoordinatorOptions, listening: socket.socket, *, tick_s: float = TICK_S
    ) -> None:
        self._socket, self._tick_s = listening, tick_s
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.options = options
        now_s = lease_clock.now_s()
        self.nodes = Hosts(options.nnodes)
        self._ledger: Ledger | None = None
        if options.ledger is not None:
            try:
                self._ledger = Ledger(options.ledger, (options.least, options.most))
            except BaseException:
                self._socket.close()
                raise
        roster = Roster(options.least, options.most, options.deadlines, now_s)
        self.elastic_team = ServedTeam(roster, self._ledger)
        self._fixed_teams: dict[str, ServedTeam] = {}
        #: Tasks that set up a client's connection.
        self._connecting: set[asyncio.Task[Any]] = set()
        self._num_taken = 0  # connections, since the last tick
        self._unidentified: dict[ClientConnection, None] = {}
        self._agents: dict[ClientConnection, None] = {}
        self._sent_formation: Formation | None = None
        self._is_end_sent = False  # to all agents
        self._are_orders_due = False
        self._num_refusals = 0
        self._stopping = asyncio.Event()

    async def serve(self) -> None:
        """Serve until ``stop`` is called."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket, self._take_in)
        try:
            while not self._stopping.is_set():
                try:
                    await asyncio.wait_for(self._stopping.wait(), self._tick_s)
                except TimeoutError:
                    self._tick()
        finally:
            loop.remove_reader(self._socket)
            self._socket.close()
            await asyncio.gather(*self._connecting, return_exceptions=True)
            for agent in [*self._agents]:
                agent.send("farewell", {})
            workers = [one for team in self._teams for one in team.workers.values()]
            for client in [*self._unidentified, *self._agents, *workers]:
                client.close()
            await asyncio.sleep(0)
            if self._ledger is not None:
                self._ledger.close()

    def stop(self) -> None:
        """Let ``serve`` return; call it in the thread of its loop."""
        self._stopping.set()

    @property
    def _teams(self) -> list[ServedTeam]:
        return [self.elastic_team, *self._fixed_teams.values()]

    # ── what clients call ────────────────────────────────────────────────────────────────────────

    def team_of(self, place: FixedPlace | None) -> ServedTeam:
        """Return the team that a client asks for: a fixed one, or the elastic one.

        Raises:
            ValueError: There are too many.
        """
        if place is None:
            return self.elastic_team
        if place.team not in self._fixed_teams:
            if len(self._fixed_teams) >= _MOST_TEAMS:
                raise ValueError(f"the coordinator serves {_MOST_TEAMS} teams already, its limit")
            size, now_s = place.world_size, lease_clock.now_s()
            roster = Roster(size, size, self.options.deadlines, now_s, is_fixed=True)
            self._fixed_teams[place.team] = ServedTeam(roster)
        return self._fixed_teams[place.team]

    def identify(self, client: "ClientConnection") -> None:
        """Note that a connection has identified itself."""
        self._unidentified.pop(client, None)
        if not client.member:
            self._agents[client] = None
            self._is_end_sent = False
        else:
            before = client.team.workers.get(client.member)
            client.team.workers[client.member] = client
            if before is not None and before is not client:
                before.drop()

    def forget(self, client: "ClientConnection") -> None:
        """Note that a connection has ended."""
        self._unidentified.pop(client, None)
        if client in self._agents:
            del self._agents[client]
            lost = self.nodes.depart(client.name)
            if lost is not None and not client.has_left:
                self.relay(client, {"lost": lost.name})
            self._send_missing()
        team = client.team
        if team.workers.get(client.member) is client:
            del team.workers[client.member]
            team.roster.depart(lease_clock.now_s(), client.member)
            self.send_orders_soon()
        for name in [name for name, each in self._fixed_teams.items() if not each.workers]:
            del self._fixed_teams[name]

    # ── hosts of a fixed team ────────────────────────────────────────────────────────────────────

    def enter(self, client: "ClientConnection", node: Host) -> None:
        """Add a host of a fixed team; once all have connected, send each its ranks."""
        if why := self.nodes.arrive(client.name, node):
            client.send("refused_node", {"why": f"{why} (from {node.where})"})
            absent = self.nodes.missing
            then = f"still waiting for {absent}" if absent else "the run continues without it"
            self.refuse(f"refused a launcher: {why} (from {node.where}); {then}")
            return
        self._send_missing()
        if self.nodes.missing:
            return
        first_ranks = self.nodes.first_ranks()
        world = {"world_size": self.nodes.world_size, "port": self.nodes.master_port}
        for agent in self._agents:
            if agent.name in first_ranks:
                first = first_ranks[agent.name]
                agent.send("place", {"first": first, "host": agent.reached_at, **world})

    def _send_missing(self) -> None:
        if self.options.nnodes and self.nodes.missing:
            for agent in self._agents:
                agent.send("missing", {"nodes": self.nodes.missing})

    def relay(self, source: "ClientConnection", content: Mapping[str, Any]) -> None:
        """Send a message to all other agents."""
        for agent in [*self._agents]:
            if agent is not source:
                agent.send("relayed", {"content": content})

    def refuse(self, why: str) -> None:
        """Print why a connection was refused, up to a number of times."""
        self._num_refusals += 1
        if self._num_refusals <= _MOST_REFUSALS:
            say(f"evener coordinator: {why}")

    def send_orders_soon(self) -> None:
        """Send what follows from the last events, once for all that have come together."""
        if not self._are_orders_due:
            self._are_orders_due = True
            asyncio.get_running_loop().call_soon(self.send_orders)

    def send_orders(self) -> None:
        """Send what follows from the last events."""
        self._are_orders_due = False
        for team in self._teams:
            team.send_orders()
        roster = self.elastic_team.roster
        if roster.formation is not None and roster.formation is not self._sent_formation:
            self._sent_formation = roster.formation
            for agent in self._agents:
                agent.send("formed", asdict(roster.formation))
        if roster.run_has_ended and not self._is_end_sent:
            for agent in self._agents:
                agent.send("ended", {})
        self._is_end_sent = roster.run_has_ended

    def _take_in(self) -> None:
        """Accept connections that wait at the port."""
        loop = asyncio.get_running_loop()
        while self._num_taken < _MOST_PER_TICK:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if isinstance(error, BlockingIOError | ConnectionAbortedError):
                    return
                if remedy := remedy_of_shortage(error):  # looked at again after the next tick
                    self.refuse(f"cannot accept a connection ({error.strerror}); {remedy}")
                break
            self._num_taken += 1
            if len(self._unidentified) >= _MOST_UNIDENTIFIED:
                connection.close()
                self.refuse(
                    f"{_MOST_UNIDENTIFIED} connections have not identified themselves; further "
                    "ones are closed, and workers among them connect again"
                )
                continue
            client = ClientConnection(self)
            self._unidentified[client] = None
            connection.setblocking(False)
            task = loop.create_task(self._connect(client, connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        loop.remove_reader(self._socket)

    async def _connect(self, client: "ClientConnection", connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: client, connection)
        except OSError:  # it has ended already
            self.forget(client)

    def _tick(self) -> None:
        now_s = lease_clock.now_s()
        for team in self._teams:
            team.tick(now_s)
        self.send_orders()
        for client in [*self._unidentified]:
            if now_s - client.since_s > self.options.deadlines.hello_s:
                client.drop()
        self._num_taken = 0
        asyncio.get_running_loop().add_reader(self._socket, self._take_in)


@final
class ClientConnection(asyncio.Protocol):
    """One connection: of a worker, of an agent, or not identified yet."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.member = self.name = ""  # of a worker, of any end
        self.team = coordinator.elastic_team
        self.since_s = lease_clock.now_s()
        self._coordinator = coordinator
        self._unread = bytearray()
        self._nonce = new_nonce()
        self._seal: Seal | None = None
        self._role = ""
        self.has_left = self._is_known = False
        self._sent_living: tuple[str, ...] | None = None
        self._transport: asyncio.Transport | None = None

    # ── asyncio calls these ──────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the challenge, by which the other end proves that it knows the token."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection = transport.get_extra_info("socket")
        with suppress(OSError):  # it has ended already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            patience_s = self._coordinator.options.deadlines.host_lease_s
            # The roster decides before the kernel, since it knows the cause.
            end_when_unreachable(connection, patience_s + 4.0)
        self._write(
            {
                "type": "challenge",
                "nonce": self._nonce,
                "evener": __version__,
            }
        )

    def data_received(self, data: bytes) -> None:
        """Read whole lines."""
        self._unread += data
        while self._transport is not None:
            line, newline, rest = self._unread.partition(b"\n")
            most_bytes = _MOST_HELLO_BYTES if self._seal is None else MOST_MESSAGE_BYTES
            if len(line) > most_bytes:
                self._reject(f"a message has more than {most_bytes} bytes")
                return
            if not newline:
                return
            self._unread = rest
            try:
                self._handle(bytes(line))
            except ValueError as error:
                self._reject(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection has ended."""
        del exc
        self._transport = None
        self._coordinator.forget(self)

    # ── what others call ─────────────────────────────────────────────────────────────────────────

    @property
    def reached_at(self) -> str:
        """The IP address at which the other end has reached this host."""
        return self._number("sockname")

    def _number(self, end: str) -> str:
        # A socket that listens on all addresses has IPv4 addresses in the form of IPv6.
        assert self._transport is not None
        return str(self._transport.get_extra_info(end)[0]).removeprefix("::ffff:")

    def send(self, type: str, content: Mapping[str, Any]) -> None:  # noqa: A002
        """Send a message."""
        if self._seal is not None:
            self._write(self._seal.close({"type": type, **content}))

    def drop(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._coordinator.forget(self)

    def close(self) -> None:
        """Close the connection after its messages were sent."""
        if self._transport is not None:
            self._transport.close()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def _write(self, message: Mapping[str, Any]) -> None:
        # asyncio prints a line for each write to a connection that ended and was not yet reported.
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(json.dumps(message).encode() + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_WAITING_BYTES:
            self.drop()

    def _reject(self, why: str) -> None:
        who = f"{self._role} {self.name}".strip() or "an unknown process"
        self._coordinator.refuse(f"closed the connection of {who}: {why}")
        self.drop()

    def _handle(self, line: bytes) -> None:
        message = parse_json(line)
        if self._seal is None:
            self._prove(message)
            return
        now_s = lease_clock.now_s()
        fields = self._seal.open(message)
        if not self._is_known:
            self._introduce(now_s, fields)
        elif self._role == "worker":
            self._hear_worker(now_s, fields.text("type"), fields)
        else:
            self._hear_agent(now_s, fields.text("type"), fields)
        self._coordinator.send_orders_soon()

    def _prove(self, message: Any) -> None:
        """Handle the hello, which is short, so that unknown clients cannot use much memory."""
        nonce = Fields(message).text("nonce")[:64]
        seal = Seal(self._coordinator.options.token, (self._nonce, nonce), FROM_COORDINATOR)
        try:
            hello = seal.open(message)
            role, name = hello.text("role"), hello.text("member")
        except ValueError as error:
            why = (
                "the token differs from the coordinator's, or only one of them has one; give both "
                "the same --token-file, or none"
            )
            self._write({"type": "refused", "why": why})
            raise ValueError(f"it does not know the token ({error})") from None
        if role not in ("worker", "agent") or not 0 < len(name) <= 128:
            raise ValueError(f"role {short(role)} or member {short(name)} is invalid")
        self._seal, self._role, self.name = seal, role, name

    def _introduce(self, now_s: float, fields: Fields) -> None:
        """Handle the facts that a worker or an agent sends after the hello."""
        role, name, options = self._role, self.name, self._coordinator.options
        place = _read_place(fields.fields("fixed")) if "fixed" in fields else None
        if role == "worker":
            self.team = self._coordinator.team_of(place)
        roster = self.team.roster
        is_new = fields["held"] is None
        held = None if is_new else read_message(Formation, fields.fields("held"))
        if role == "agent":
            roster.remember(now_s, held)
        else:
            address = fields.text("address")
            facts = fields.fields("facts").values
            wish = fields.whole("wish", least=NO_NUMBER)
            if place is not None:
                facts, wish = {**facts, "world_size": place.world_size}, place.rank
            why = roster.arrive(
                now_s,
                name,
                fields.text("session"),
                facts,
                held,
                wish,
                address=address,
                is_local=is_loopback(address),
            )
            if why:
                self.send("refused", {"why": why})
                self.team.note_refused(name, why)
                self._coordinator.send_orders_soon()  # others may be refused for the same reason
                raise ValueError(f"refused worker {name}: {why}")
            self.member = name
        self._is_known = True
        self._coordinator.identify(self)
        self.send(
            "welcome",
            {
                "deadlines": asdict(options.deadlines),
                "limits": [roster.least, roster.most],
            },
        )

    def _hear_worker(self, now_s: float, kind: str, fields: Fields) -> None:
        roster = self.team.roster
        if self.has_left:  # messages that come later must not make it a worker again
            self.send("left", {})
        elif not roster.knows(self.member):
            self.drop()  # it was considered lost, and may connect again
        elif kind == "beat":
            counter, phase = fields.whole("micro_batches"), fields.text("phase")
            sent = fields["at"]
            renewed = roster.beat(now_s, self.member, counter, phase)
            known: dict[str, Any] = {
                "generation": roster.generation,
                "open": roster.is_open(now_s),
                "number": roster.number_of(self.member),
                "leads": roster.leads(self.member),
            }
            formation = roster.formation
            is_main = formation is not None and formation.members[0] == self.member
            refused = self.team.take_refused() if is_main else []
            known["refused"] = [name for name, _ in refused]
            known["why_refused"] = [why for _, why in refused]
            self.send("beaten", {"at": sent, "renewed": renewed, **known})
        elif kind == "report":
            has_state = fields["standing"] is not None
            held = read_message(Standing, fields.fields("standing")) if has_state else None
            unreached = fields.texts("unreached")
            roster.report(now_s, self.member, fields.whole("generation"), held, unreached)
        elif kind == "leave":
            self.has_left = True
            roster.leave(now_s, self.member, finished=fields.flag("finished"))
            self.send("left", {})
        elif kind == "facts":
            roster.describe(now_s, self.member, fields.fields("facts").values)
            self._coordinator.send_orders()  # a refusal comes first
            self.send("compared", {"facts": roster.facts()})
        elif kind == "missing":
            self.send("missing", {"ranks": roster.missing})
        elif kind == "store" and not roster.is_member(self.member):
            answer = {"number": fields.whole("number"), "error": "its generation is over"}
            self.send("stored", answer)
        elif kind == "store":
            self.team.store.ask(now_s, fields, lambda answer: self.send("stored", answer))
        else:
            raise ValueError(f"type is {short(kind)}, which no worker sends")

    def _hear_agent(self, now_s: float, kind: str, fields: Fields) -> None:
        if kind == "process":
            state = ProcessState(fields.text("state"))
            roster = self.team.roster
            roster.process(now_s, fields.text("member"), state, fields.text("reason"))
        elif kind == "node":
            node = Host(
                number=fields.whole("number", least=-1),
                nnodes=fields.whole("nnodes", least=1),
                nproc=fields.whole("nproc", least=1),
                port=fields.whole("port", least=0, most=65_535),
                where=self._number("peername"),
            )
            self._coordinator.enter(self, node)
        elif kind == "relay":
            self._coordinator.relay(self, fields.fields("content").values)
        elif kind == "farewell":
            self.has_left = True
        elif kind == "beat":
            self.team.roster.attend(now_s, fields.texts("members"))
            living = self.team.roster.living
            # Otherwise a thousand hosts would get a thousand names each, four times a second.
            news = {} if living == self._sent_living else {"workers": living}
            self._sent_living = living
            self.send("beaten", news)
        else:
            raise ValueError(f"type is {short(kind)}, which no agent sends")


def _read_place(fields: Fields) -> FixedPlace:
    team, rank, size = (
        fields.text("team"),
        fields.whole("rank"),
        fields.whole("world_size", least=1),
    )
    if not (len(team) <= 128 and rank < size <= _MOST_RANKS):
        raise ValueError(f"rank {rank} of {size} in team {short(team)} is invalid")
    return FixedPlace(team, rank, size)


# ── keys and values of a generation ──────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _AwaitedKey:
    number: int
    key: str
    until_s: float
    answer: Callable[[Mapping[str, Any]], None]


class KeyValues:
    """Keys and values by which members of the newest generation connect."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._num_bytes = 0
        self._generation = 0
        self._waits: list[_AwaitedKey] = []

    def keep(self, generation: int) -> None:
        """Drop the keys of earlier generations."""
        if generation != self._generation:
            self._generation, self._num_bytes = generation, 0
            self._values.clear()
            self.give_up()

    def give_up(self, why: str = "") -> None:
        """Answer all that wait for a key: the generation is over."""
        over = "its generation is over"
        self._fail(lambda _: True, f"{over}: {why}" if why else over)

    def expire(self, now_s: float) -> None:
        """Answer all that have waited for too long."""
        self._fail(lambda one: now_s >= one.until_s, "no member has set it in time")

    def _fail(self, is_in_vain: Callable[[_AwaitedKey], bool], why: str) -> None:
        for waiting in [one for one in self._waits if is_in_vain(one)]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "error": why})

    def ask(
        self, now_s: float, fields: Fields, answer: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Carry out a request, and answer it now or later.

        Raises:
            ValueError: It is not a request.
        """
        number, generation = fields.whole("number"), fields.whole("generation")
        what, keys = fields.text("what"), fields.texts("keys")
        if not keys or (what != "holds" and len(keys) != 1):
            raise ValueError(f"keys is {short(keys)}, not one key")
        if generation != self._generation:
            answer({"number": number, "error": f"generation {generation} is over"})
            return
        key, value = keys[0], self._values.get(keys[0])
        if what == "put":
            self._put(key, fields.text("value"))
            answer({"number": number, "value": True})
        elif what == "fetch" and value is None:
            until_s = now_s + fields.number("timeout_s", least=0.0)
            self._waits.append(_AwaitedKey(number, key, until_s, answer))
        elif what == "fetch":
            answer({"number": number, "value": value})
        elif what == "increase":
            total = int(value or "0") + fields.whole("amount", least=-(2**53))
            self._put(key, str(total))
            answer({"number": number, "value": total})
        elif what == "holds":
            answer({"number": number, "value": all(each in self._values for each in keys)})
        elif what == "remove":
            answer({"number": number, "value": self._remove(key)})
        else:
            raise ValueError(f"what is {short(what)}, which is no request")

    def _put(self, key: str, value: str) -> None:
        self._remove(key)
        size = len(value) + len(key)
        if self._num_bytes + size > _MOST_STORE_BYTES or len(self._values) >= _MOST_KEYS:
            raise ValueError(
                f"the store holds {len(self._values)} keys and {self._num_bytes} bytes, its limit"
            )
        self._values[key], self._num_bytes = value, self._num_bytes + size
        for waiting in [one for one in self._waits if one.key == key]:
            self._waits.remove(waiting)
            waiting.answer({"number": waiting.number, "value": value})

    def _remove(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._num_bytes -= 0 if value is None else len(value) + len(key)
        return value is not None
