"""Simulated ranks for the protocol's properties: no threads, no tensors, no clock.

A rank is a generator that does what an engine does with a verdict, in the same order, by the real
table (``judge``, ``land``, ``State.regroup``) and real rows. The model is a chain of hashes,
a gradient a collection of positions. Wherever a rank posts something to the others or takes what
they have posted it pauses, and a scheduler says which goes on: so ranks learn late, in any order.

What must hold at once is checked at once; what a run has come to is checked by ``tests``.
"""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from evener.data.cursor import Cursor, Slice
from evener.data.leases import LeaseBook
from evener.errors import CollectiveMismatchError
from evener.planning.cadence import CadencePolicy
from evener.planning.elche import ElChe
from evener.planning.guard import NoGuard
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.policies import ApplyPolicy
from evener.planning.report import Report
from evener.protocol import machine
from evener.protocol.machine import Action, Decision, Phase, State
from evener.protocol.row import ALL, Purpose, Row, decode, encode

#: The rules that ranks go by; a test of the tests puts others in their place.
RULES = SimpleNamespace(judge=machine.judge, land=machine.land)

#: Places between two effects at which a rank may be lost.
FAILPOINTS = (
    "row.before",
    "row.sent",
    "row.received",
    "tensor.before",
    "tensor.sent",
    "tensor.received",
    "commit.before",
    "commit.middle",
    "commit.after",
    "apply.before",
    "apply.middle",
    "apply.after",
    "drop.after",
    "snapshot",
    "land.before",
    "land.after",
    "change.before",
    "change.formed",
    "transfer.received",
)


class LostError(Exception):
    """Another rank is gone."""


class BreakError(Exception):
    """The user's loop is left by ``break``."""


class OwnError(Exception):
    """Something has gone wrong on this rank alone."""


class NonFiniteError(Exception):
    """Something is not finite on a rank; raised by all."""


# ── what is drawn ────────────────────────────────────────────────────────────────────────────────


class Shown:
    """Shows only what differs from the defaults."""

    def __repr__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        plain = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        said = (f"{name}={value!r}" for name, value in told.items() if value != plain[name])
        return f"{type(self).__name__}({', '.join(said)})"

    def changed(self, **changes: Any) -> Any:
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, kw_only=True, repr=False)
class Script(Shown):
    """What one rank does of its own; places are (window, micro-batch)."""

    stops: tuple[int, int] | None = None
    #: Rows that it says before it is told to stop.
    stops_after: int | None = None
    #: The window from which on it trains fewer parameters.
    freezes: int | None = None
    breaks: tuple[int, int] | None = None
    fails: tuple[int, int] | None = None
    asks: tuple[int, int] | None = None
    evaluates: int | None = None
    bad: frozenset[int] = frozenset()
    may_skip: bool = False
    parts: tuple[int, ...] | None = None
    micro_batch: int = 1
    batches: int = 3
    pace: tuple[int, ...] = (2,)
    dies: tuple[str, int] | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Program(Shown):
    """What all ranks do."""

    policy: ApplyPolicy = ApplyPolicy.SYNC
    scripts: tuple[Script, ...]
    samples: int = 8
    batch_size: int = 4
    epochs: int = 1
    stream: bool = False
    #: Weights of shares, by window.
    shares: tuple[tuple[int, ...], ...] = ((1,) * 9,)
    #: Ranks that the planner parks from the window after the next on, by window.
    wishes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    #: Whether ranks that are parked when an epoch ends are parked again in the next one.
    parks_again: bool = True
    #: Windows in which optimizers take turns.
    turns: frozenset[int] = frozenset()
    #: Windows after whose commit a value is averaged.
    asks_at: frozenset[int] = frozenset()
    #: Windows at whose beginning the ranks that work set the learning rate.
    rates_at: frozenset[int] = frozenset()
    #: The window in whose loop all ranks save.
    saves_at: int | None = None

    @property
    def world_size(self) -> int:
        """Ranks of the team."""
        return len(self.scripts)


# ── the network ──────────────────────────────────────────────────────────────────────────────────


class Post(NamedTuple):
    """Hands something over; goes on at once with the number of the exchange on its channel."""

    channel: Hashable
    key: Hashable
    payload: Any


class Take(NamedTuple):
    """Waits until all members have posted."""

    channel: Hashable
    number: int
    members: tuple[int, ...]


class Join(NamedTuple):
    """Waits for what runs beside."""

    task: "Task"


Steps = Generator[Any, Any, Any]


@dataclass(eq=False)
class Task:
    """Something that runs on a rank: its main thread, or an exchange beside it."""

    rank: "Rank"
    steps: Steps
    wants: Any = None
    turns: int = 0
    over: bool = False
    result: Any = None
    error: BaseException | None = None


class Network:
    """Ranks, and what has been posted."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.posted: dict[Hashable, list[dict[int, tuple[Hashable, Any]]]] = {}
        self.counts: Counter[tuple[Hashable, int]] = Counter()
        self.agreed: dict[Hashable, Hashable] = {}
        #: Ranks by which round of rows they were told of an error, and its words.
        self.raised: dict[int, tuple[Hashable, str]] = {}
        self.lost: set[int] = set()
        kind = SyncRank if program.policy is ApplyPolicy.SYNC else LocalRank
        self.ranks: list[Rank] = [kind(self, me) for me in range(program.world_size)]
        self.tasks: list[Task] = []
        for rank in self.ranks:
            rank.task = self.begin(rank, rank.run())

    def begin(self, rank: "Rank", steps: Steps) -> Task:
        """Starts something on a rank."""
        task = Task(rank, steps)
        self.tasks.append(task)
        self._resume(task, None)
        return task

    def actions(self) -> list[tuple[Task, bool]]:
        """What can happen next: a task goes on, or (True) learns that a rank is gone."""
        return [
            (task, gone) for task in self.tasks if not task.over for gone in self._outcomes(task)
        ]

    def act(self, action: tuple[Task, bool]) -> None:
        """Lets one thing happen."""
        task, gone = action
        wants, task.wants = task.wants, None
        if gone:
            self.lost.add(task.rank.me)
            self._throw(task, LostError())
        elif isinstance(wants, Post):
            self._resume(task, self._post(task.rank.me, wants))
        elif isinstance(wants, Join):
            if wants.task.error is not None:
                self._throw(task, wants.task.error)
            else:
                self._resume(task, wants.task.result)
        else:
            row = self.posted[wants.channel][wants.number]
            self._resume(task, {rank: row[rank][1] for rank in wants.members})

    def _outcomes(self, task: Task) -> Iterator[bool]:
        wants = task.wants
        if isinstance(wants, Post):
            yield False
        elif isinstance(wants, Join):
            if wants.task.over:
                yield False
        else:
            here = self.posted[wants.channel][wants.number]
            missing = [rank for rank in wants.members if rank not in here]
            if not missing:
                yield False
            if any(self.ranks[r].failed for r in missing) or any(
                self.ranks[r].died for r in wants.members if r != task.rank.me
            ):
                yield True

    def _post(self, rank: int, post: Post) -> int:
        number = self.counts[post.channel, rank]
        self.counts[post.channel, rank] += 1
        rounds = self.posted.setdefault(post.channel, [])
        if number == len(rounds):
            rounds.append({})
        for other, (key, _) in rounds[number].items():
            assert key == post.key, (
                f"S2: operation {number} of {post.channel} is {post.key} on rank {rank} and {key} "
                f"on rank {other}"
            )
        rounds[number][rank] = (post.key, post.payload)
        return number

    def agree(self, place: Hashable, told: Hashable, what: str) -> None:
        """All ranks must say the same of one place."""
        assert self.agreed.setdefault((what, place), told) == told, (
            f"{what} at {place}: {self.agreed[what, place]} and {told}"
        )

    def _resume(self, task: Task, value: Any) -> None:
        task.turns += 1
        try:
            task.wants = task.steps.send(value)
        except StopIteration as end:
            task.over, task.result = True, end.value
        except AssertionError:
            raise
        except Exception as error:
            task.over, task.error = True, error

    def _throw(self, task: Task, error: BaseException) -> None:
        task.turns += 1
        try:
            task.wants = task.steps.throw(error)
        except StopIteration as end:
            task.over, task.result = True, end.value
        except AssertionError:
            raise
        except Exception as raised:
            task.over, task.error = True, raised

    def fingerprint(self) -> Hashable:
        """Where all ranks are; equal ones go on alike."""
        return tuple((task.rank.fingerprint(), task.turns, task.over) for task in self.tasks)


def run(program: Program, choose: Callable[[int], int]) -> Network:
    """Runs a program to its end; ``choose(n)`` says which of n actions comes next.

    No action, and a rank that has not come to its end: that is a deadlock.
    """
    network = Network(program)
    for _ in range(3_000):
        actions = network.actions()
        if not actions:
            check_end(network)
            return network
        network.act(actions[choose(len(actions))])
    raise AssertionError("L4: the program does not end")


def check_end(network: Network) -> None:
    """Nothing can happen any more: is that the end?"""
    for task in network.tasks:
        assert task.over or task.rank.failed, (
            f"L1: rank {task.rank.me} waits for {task.wants} for ever; "
            f"{[(rank.me, rank.state.phase, rank.task.error) for rank in network.ranks]}"
        )


# ── a rank ───────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pending:
    """A window that is applied and not committed."""

    window: int
    leases: list[Slice]


class Rank(ABC):
    """What both kinds of engines have in common; see ``evener.engine.engine``."""

    def __init__(self, network: Network, me: int) -> None:
        program = network.program
        self.net, self.me, self.program = network, me, program
        self.script = program.scripts[me]
        self.state = State(
            me=me,
            world_size=program.world_size,
            policy=program.policy,
            members=tuple(range(program.world_size)),
        )
        self.task: Task
        self.cursor = Cursor(program.samples, 0)
        #: The model: a chain of what was applied, of its length and by what.
        self.model: int = 0
        self.done = -1
        self.applied: Pending | None = None
        self.commits: list[int] = []
        self.committed: list[tuple[int, int, int]] = []
        self.rate = 0.0
        self.abandoned = False
        #: Whether its loop was ever left before the end, and whether it was ever parked.
        self.left = False
        self.was_parked = False
        self.said_stop = False
        self.in_epoch = False
        self.committing = False
        self.polls: tuple[bool, ...] = ()
        self.places: Counter[str] = Counter()
        self.asked: set[Hashable] = set()

    def fingerprint(self) -> Hashable:
        """What tells this rank from one that would go on otherwise."""
        return (self.state, self.model, self.done, len(self.commits), self.polls)

    @property
    def died(self) -> bool:
        """Whether it has gone without being told to by rows."""
        return isinstance(self.task.error, OwnError)

    @property
    def failed(self) -> bool:
        """Whether its program has ended by an error."""
        return self.task.error is not None

    def point(self, name: str) -> None:
        """A place at which this rank may be lost."""
        if self.script.dies is None:
            return
        assert name in FAILPOINTS
        self.places[name] += 1
        if self.script.dies == (name, self.places[name]):
            raise OwnError(f"at {name}")

    def wants_stop(self) -> bool:
        """Whether this rank was told to stop."""
        script = self.script
        if script.stops_after is not None and self.places["row"] > script.stops_after:
            return True
        return script.stops is not None and self.here() >= script.stops

    @abstractmethod
    def here(self) -> tuple[int, int]:
        """The window, and how far this rank is in it."""

    # ── exchanges ────────────────────────────────────────────────────────────────────────────────

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that are not parked."""
        return tuple(rank for rank in self.state.members if rank not in self.state.parked)

    @property
    def channel(self) -> Hashable:
        """What all ranks exchange goes over, in the main thread."""
        return ("F", self.state.generation)

    @property
    def channel_of_present(self) -> Hashable:
        """What those exchange who are not parked."""
        return (*self.channel, self.present) if self.state.parked else self.channel  # type: ignore[misc]

    def exchange(
        self, key: Hashable, payload: Any, channel: Hashable = None
    ) -> Generator[Any, Any, dict[int, Any]]:
        """What tensors do: all members bring something, and have it all."""
        channel = channel or self.channel_of_present
        members = self.state.members if channel == self.channel else self.present
        self.point("tensor.before")
        number = yield Post(channel, (key, members), payload)
        self.point("tensor.sent")
        found = yield Take(channel, number, members)
        self.point("tensor.received")
        return found

    def say(self, row: Row, channel: Hashable) -> Generator[Any, Any, int]:
        """Posts a row."""
        self.places["row"] += 1
        self.said_stop = self.said_stop or row.stop
        self.point("row.before")
        number = yield Post(channel, "row", _sent(row, self.program.world_size))
        self.point("row.sent")
        return number

    def hear(
        self, row: Row, channel: Hashable, number: int, members: tuple[int, ...]
    ) -> Generator[Any, Any, dict[int, Row]]:
        """Takes the rows of all members."""
        found = yield Take(channel, number, members)
        self.point("row.received")
        return {rank: row if rank == self.me else _received(found[rank]) for rank in members}

    def judged(self, state: State, rows: dict[int, Row], place: Hashable) -> Decision:
        """The verdict, which must be that of all others who judge this round."""
        verdict = RULES.judge(state, rows)
        self.check(verdict, rows, place)
        return verdict

    def check(self, verdict: Decision, rows: dict[int, Row], place: Hashable) -> None:
        """S1 and S3: what a rank is told is told to all, and not before all have done it."""
        self.net.agree(
            place,
            (
                verdict.actions,
                verdict.part,
                repr((verdict.weight, verdict.loss)),
                verdict.skip,
                verdict.culprit,
                repr(verdict.error),
                verdict.state.window,
                verdict.state.stopping,
                verdict.state.applied,
            ),
            "S1",
        )
        if {Action.APPLY, Action.TURN, Action.EXCHANGE, Action.LAND, Action.COMMIT} & set(
            verdict.actions
        ):
            assert set(rows) == set(self.state.members), "S3"

    def meet(
        self, purpose: Purpose, **said: Any
    ) -> Generator[Any, Any, tuple[dict[int, Row], Decision]]:
        """A round of rows."""
        stop = self.wants_stop() or self.state.stopping
        if purpose in (Purpose.REST, Purpose.IDLE) and not self.state.is_parked:
            said["digest"] = float(hash(self.model) % 2**50)
        self.state = self.state.say(purpose, stop=stop, **said)
        assert self.state.own is not None
        channel, members = self.channel, self.state.members
        if self.committing:
            channel, members = self.channel_of_present, self.present
        number = yield from self.say(self.state.own, channel)
        rows = yield from self.hear(self.state.own, channel, number, members)
        verdict = self.judged(self.state, rows, (channel, number))
        rows = {rank: row for rank, row in rows.items() if rank not in self.state.parked}
        yield from self.follow(rows, verdict, (channel, number))
        return rows, verdict

    def follow(self, rows: dict[int, Row], verdict: Decision, place: Hashable) -> Steps:
        """Carries a verdict out; see ``Engine._follow``."""
        after = verdict.state
        stopping = self.state.stopping or after.stopping
        self.state = self.state._replace(own=None, stopping=stopping)
        for do in verdict.actions:
            if self.state.is_parked and do in (Action.VERIFY, Action.RATES):
                continue
            if do is Action.COMMIT:
                yield from self.commit()
            elif do is Action.VERIFY:
                raise AssertionError(f"S6: ranks hold different states: {rows}")
            elif do is Action.RATES:
                yield from self.agree_on_rates(rows)
            elif do is not Action.CHANGE:
                yield from self.carry_out(do, rows, verdict)
        self.state = after._replace(stopping=self.state.stopping)
        if verdict.culprit is not None:
            self.tell(place, f"rank {verdict.culprit}")
            raise NonFiniteError(verdict.culprit)
        if verdict.error is not None:
            self.tell(place, str(verdict.error))
            raise verdict.error
        assert Action.CHANGE not in verdict.actions, "the members of a fixed team do not change"

    def tell(self, place: Hashable, words: str) -> None:
        """S10: an error from rows, on all ranks in the same round."""
        self.net.raised[self.me] = (place, words)

    @abstractmethod
    def carry_out(self, do: Action, rows: dict[int, Row], verdict: Decision) -> Steps:
        """Does one thing that a round has led to."""

    @abstractmethod
    def settle(self) -> Steps:
        """Commits what was applied."""

    @abstractmethod
    def epoch(self, number: int) -> Steps:
        """The user's loop over a loader."""

    # ── commits ──────────────────────────────────────────────────────────────────────────────────

    def commit(self) -> Steps:
        """All have applied the window before."""
        applied, self.applied = self.applied, None
        self.state = self.state._replace(applied=False)
        assert applied is not None, "S4: a commit of nothing"
        if self.state.is_parked:
            for lease in applied.leases:
                self.cursor.commit(lease)
            return
        self.point("commit.before")
        for member in self.present:
            other = self.net.ranks[member]
            assert other.done >= applied.window, (
                f"S4: rank {self.me} commits window {applied.window}, rank {member} has applied "
                f"{other.done}"
            )
        assert self.commits[-1:] in ([], [applied.window - 1]) or self.was_parked, "S4: order"
        assert applied.window not in self.commits, "S4: twice"
        self.commits.append(applied.window)
        self.point("commit.middle")
        for lease in applied.leases:
            self.cursor.commit(lease)
            self.committed.append((lease.epoch, lease.start, lease.size))
        self.net.agree(applied.window, tuple(applied.leases), "S5: leases of a window")
        self.point("commit.after")
        if applied.window in self.program.asks_at:
            self.committing = True
            yield from self.ask("averaging")
            self.committing = False

    def apply(self, window: int, content: Hashable) -> None:
        """The model moves on."""
        self.point("apply.middle")
        self.model = hash((self.model, window, content))
        self.done = window
        self.net.agree(window, (content, self.model), "S6: the model after a window")
        self.point("apply.after")

    def agree_on_rates(self, rows: dict[int, Row]) -> Steps:
        """Ranks without work take the learning rate of those that have some."""
        found = yield from self.exchange(("rates", self.state.window), self.rate)
        working = {found[r] for r, row in rows.items() if row.purpose is not Purpose.IDLE}
        if len(working) == 1:
            self.rate = working.pop()

    # ── the user's program ───────────────────────────────────────────────────────────────────────

    def run(self) -> Steps:
        """All of it."""
        try:
            for number in range(self.program.epochs):
                yield from self.epoch(number)
            yield from self.settle()
        except (LostError, OwnError):
            self.state = self.state.end()
            raise
        assert self.state.phase is Phase.OUT, f"L3, L4: {self.state}"
        assert self.applied is None
        assert self.state.own is None

    def ask(self, what: str) -> Steps:
        """A collective of the user's: ranks meet, and then say what each of them came for."""
        if self.state.phase is Phase.REST:
            yield from self.settle()
        _, verdict = yield from self.meet(Purpose.ASK)
        found = yield from self.exchange(("ask", verdict.state.window), what)
        if len(set(found.values())) > 1:
            error = CollectiveMismatchError(f"ranks joined different collectives: {found}")
            self.state = self.state.end()
            self.tell(("ask", self.state.window), str(error))
            raise error

    def body(self, micro_batch: int) -> Steps:
        """The user's loop, up to the gradient of a micro-batch."""
        script, place = self.script, (self.state.window, micro_batch)
        if place == script.breaks:
            raise BreakError
        if place == script.fails:
            raise OwnError("in the loop")
        if self.state.window in self.program.rates_at:
            self.rate = float(self.state.window)
        if script.evaluates == self.state.window and self.once("evaluates"):
            yield from self.ask("evaluating")
        if place == script.asks and self.once(("asks", place)):
            yield from self.ask("averaging")
        if self.state.window == self.program.saves_at and self.once("saves"):
            yield from self.ask("saving")
            yield from self.settle()

    def once(self, what: Hashable) -> bool:
        """Whether this is the first time."""
        first = what not in self.asked
        self.asked.add(what)
        return first

    @property
    def trainable(self) -> int:
        """How many parameters this rank trains."""
        frozen = self.script.freezes is not None and self.state.window >= self.script.freezes
        return 2 if frozen else 3

    def data(self) -> dict[str, int]:
        """What must be the same everywhere."""
        return {"num_samples": self.cursor.num_samples, "batch_size": self.program.batch_size}


# ── SYNC ─────────────────────────────────────────────────────────────────────────────────────────


class SyncRank(Rank):
    """A rank's windows of SYNC; see ``evener.engine.sync``."""

    def __init__(self, network: Network, me: int) -> None:
        super().__init__(network, me)
        self.leases: dict[int, Slice] = {}
        self.draft: WindowPlan | None = None
        self.is_made = False
        self.to_park: frozenset[int] = frozenset()
        self.num_groups = 0
        self.content: list[int] = []
        self.micro = 0
        self.turns: list[int] = []
        self.in_micro_batch = False
        self.result = False

    def here(self) -> tuple[int, int]:
        """The window and the micro-batch."""
        return (self.state.window, self.micro)

    # ── an epoch ─────────────────────────────────────────────────────────────────────────────────

    def epoch(self, number: int) -> Steps:
        """The user's loop over a loader."""
        if self.program.stream:
            yield from self.stream()
            return
        if self.state.phase is Phase.REST:
            yield from self.settle()
        if self.cursor.is_committed(number) or self.state.stopping:
            return
        yield from self.settle()
        self.drop_plans()
        self.state = self.state.begin()
        self.cursor.begin(number, abandon=self.abandoned)
        self.in_epoch = True
        try:
            yield from self.work()
            self.abandoned = self.state.led_out
            self.left = self.left or self.abandoned
            if not self.abandoned:
                self.state = self.state.release()
                yield from self.settle()
                if self.state.parked:
                    yield from self.regroup()
        except BreakError:
            self.abandoned = self.left = True
            self.leave()
        finally:
            self.in_epoch = False

    def stream(self) -> Steps:
        """A loop over data without indices."""
        if self.state.stopping:
            return
        yield from self.settle()
        self.drop_plans()
        self.state = self.state.begin()
        self.in_epoch = True
        try:
            yield from self.stream_windows()
            yield from self.settle()
        except BreakError:
            self.left = True
            self.leave()
        finally:
            self.in_epoch = False

    def stream_windows(self) -> Steps:
        """The batches of this rank, and then those of the others."""
        for number in range(self.script.batches):
            self.micro, self.content, self.in_micro_batch = 0, [], True
            yield from self.body(0)
            self.content = [1000 * self.me + number]
            yield from self.closechanged(Purpose.STEP)
            if self.state.stopping:
                return
        going_on = True
        while going_on and not self.state.stopping:
            self.content = []
            yield from self.closechanged(Purpose.IDLE)
            going_on = self.result

    def work(self) -> Steps:
        """Windows, as long as there are any."""
        yield from self.exchange_plans(2)
        while self.state.is_working and (self.state.parked or not self.state.stopping):
            plan = self.state.plan
            assert isinstance(plan, WindowPlan)
            self.make_draft()
            if plan.shares[self.me]:
                yield from self.hand_out(plan)
            else:
                self.content, self.micro = [], 0
                yield from self.close_idle()

    def exchange_plans(self, count: int) -> Steps:
        """The first plans of an epoch, or of a generation."""
        for _ in range(count):
            if not self.program.parks_again:
                self.to_park = frozenset()
            number, planner = self.make_draft(), self.state.planner
            rows, _ = yield from self.meet(Purpose.PLAN, plan=self.take_draft(), **self.data())
            self.check_plan(rows[planner].plan, number)

    def hand_out(self, plan: WindowPlan) -> Steps:
        """A share: its micro-batches, and the close."""
        window = plan.window
        positions = list(plan.positions(self.me))
        size = self.script.micro_batch
        self.content, self.micro = [], 0
        while True:
            first = self.micro * size
            last = first + size >= len(positions)
            self.in_micro_batch = True
            yield from self.body(self.micro)
            self.content += positions[first : first + size]
            if window in self.program.turns and last:
                for part in self.script.parts or (0, 1):
                    yield from self.closechanged(Purpose.WINDOW, part)
                    if not self.state.is_working:
                        return
                    assert self.turns[-1:] == [part], "S8: an optimizer is not stepped"
            self.in_micro_batch = False
            if self.wants_stop() and not last:
                yield from self.close(drop=not self.turns)
            elif last:
                yield from self.close()
            if self.state.window != window or not self.state.is_working or last:
                return
            self.micro += 1

    def close(self, *, drop: bool = False) -> Steps:
        """A window with a share is over."""
        yield from self.closechanged(Purpose.WINDOW, drop=drop)

    def close_idle(self) -> Steps:
        """Goes along with the others."""
        window = self.state.window
        while self.state.is_working and self.state.window == window:
            yield from self.closechanged(Purpose.IDLE)

    def closechanged(self, purpose: Purpose, part: int = ALL, *, drop: bool = False) -> Steps:
        """Says what this rank did."""
        self.result = False
        yield from self.meet(purpose, **self.said(part, drop=drop))
        if purpose is Purpose.STEP:
            self.in_micro_batch = False

    def said(self, part: int, *, drop: bool) -> dict[str, Any]:
        """The row of a window."""
        window = self.state.window
        return {
            "part": part,
            "drop": drop,
            "trainable": self.trainable,
            "rates": self.rate,
            "may_skip": self.script.may_skip,
            "report": Report(
                weight=float(len(self.content)),
                samples=len(self.content),
                non_finite=int(window in self.script.bad and bool(self.content)),
            ),
            "plan": self.draft,
        }

    def leave(self) -> None:
        """The loop is left."""
        if self.state.is_working or self.state.applied or self.program.stream:
            self.state = self.state.leave()
        if not self.turns:
            self.content = []

    def settle(self) -> Steps:
        """Commits what was applied."""
        if self.turns and self.in_micro_batch:
            self.in_micro_batch = False
            yield from self.close()
        if self.state.phase is Phase.REST or self.state.applied:
            yield from self.meet(Purpose.REST)

    # ── what a round leads to ────────────────────────────────────────────────────────────────────

    def carry_out(self, do: Action, rows: dict[int, Row], verdict: Decision) -> Steps:
        """Does one thing that a round has led to."""
        if do is Action.TURN and self.state.is_parked:
            return
        if do is Action.APPLY:
            yield from self.finish(rows, verdict)
        elif do is Action.TURN:
            yield from self.turn(verdict)
        elif do is Action.DROP:
            self.content = []
            self.drop_plans()
            self.point("drop.after")
        elif do is Action.RESTORE:
            self.content, self.turns = [], []

    def finish(self, rows: dict[int, Row], verdict: Decision) -> Steps:
        """A window is over."""
        self.point("apply.before")
        window, plan, leases = self.state.window, self.state.plan, []
        if isinstance(plan, WindowPlan):
            assert plan.window == window, "S8: the plan of another window"
            self.check_plan(rows[self.state.planner].plan, window + len(self.state.plans))
            self.take_draft()
            leases.append(self.leases.pop(window))
        if self.state.is_parked:
            assert not self.content, "S8: a parked rank has work"
            self.applied = Pending(window, leases)
            return
        content: Hashable = ()
        finite = not any(row.report.non_finite for row in rows.values())
        assert finite or verdict.skip, "S8: what is not finite is applied"
        if self.turns:
            content = tuple(self.turns)
            self.turns = []
        elif not verdict.skip:
            content = yield from self.gather(("gradient", window), plan)
        self.apply(window, content)
        self.applied = Pending(window, leases)
        self.result = True

    def turn(self, verdict: Decision) -> Steps:
        """One optimizer is stepped."""
        plan, part = self.state.plan, verdict.part
        yield from self.gather(("turn", self.state.window, len(self.turns), part), plan)
        self.turns.append(part)

    def gather(self, key: Hashable, plan: Any) -> Generator[Any, Any, tuple[int, ...]]:
        """S8: the gradients of a window are those of its samples, each once."""
        found = yield from self.exchange(key, tuple(self.content))
        content = tuple(sorted(sample for rank in found for sample in found[rank]))
        if isinstance(plan, WindowPlan):
            assert content == tuple(range(plan.start, plan.stop)), f"S8: {content} by {plan}"
        assert len(set(content)) == len(content), "S8: a sample twice"
        return content

    # ── plans ────────────────────────────────────────────────────────────────────────────────────

    def make_draft(self) -> int:
        """Leases the slice after the last planned one; the planner plans it."""
        number = self.state.window + len(self.state.plans)
        if self.is_made:
            return number
        piece = self.cursor.take(self.program.batch_size)
        self.is_made = True
        if piece is not None:
            self.leases[number] = piece
        if self.me == self.state.planner and piece is not None:
            self.decide_parking()
            shares = self.shares(number, piece.size)
            flags = tuple(int(rank in self.to_park) for rank in range(self.program.world_size))
            plan = WindowPlan(number, piece.epoch, piece.start, piece.size, shares, flags)
            self.draft = plan
        return number

    def decide_parking(self) -> None:
        """Who is parked by the plan that is made next, as far as that can be."""
        if self.state.plans and isinstance(last := self.state.plans[-1], WindowPlan):
            self.to_park = last.parked_ranks
        wish = self.program.wishes.get(self.state.window, self.to_park)
        if wish < set(self.state.members):
            self.to_park = wish

    def shares(self, window: int, size: int) -> tuple[int, ...]:
        """By the program's weights; those who are parked have none."""
        weights = self.program.shares[window % len(self.program.shares)]
        members = [rank for rank in self.state.members if rank not in self.to_park]
        dealt = [rank for rank in members for _ in range(weights[rank])] or members
        found = Counter(dealt[k % len(dealt)] for k in range(size))
        return tuple(found[rank] for rank in range(self.program.world_size))

    def take_draft(self) -> WindowPlan | None:
        """What this rank says of the window after the next."""
        draft, self.draft, self.is_made = self.draft, None, False
        return draft

    def check_plan(self, plan: Any, number: int) -> None:
        """The plan must be of the slice that this rank has leased."""
        piece = self.leases.get(number)
        own = None if piece is None else (number, piece.epoch, piece.start, piece.size)
        said = plan and (plan.window, plan.epoch, plan.start, plan.size)
        assert said == own, f"rank {self.me}: {plan} is planned, {own} is leased"

    def drop_plans(self) -> None:
        """Slices are given back."""
        self.state = self.state.release()
        self.leases.clear()
        self.draft, self.is_made = None, False
        self.cursor.release()

    # ── parking ──────────────────────────────────────────────────────────────────────────────────

    def follow(self, rows: dict[int, Row], verdict: Decision, place: Hashable) -> Steps:
        """Carries a verdict out; then those are parked whom the plan of the next window names."""
        yield from super().follow(rows, verdict, place)
        if self.committing or self.state.due_to_park == self.state.parked:
            return
        if self.state.applied:
            yield from self.meet(Purpose.CHANGE)
        else:
            yield from self.regroup()

    def regroup(self) -> Steps:
        """Takes parked ranks back, or parks others."""
        before, present = self.state.parked, self.present
        self.point("change.before")
        self.state = self.state.regroup()
        parked = self.state.parked
        told = (parked, self.state.planner)
        self.num_groups += 1
        self.net.agree(("group", self.num_groups), told, "who is parked, and who plans")
        assert self.state.planner in self.present, "S3: a rank plans that is not there"
        if before - parked:
            own = (self.model, self.done, self.rate, self.state.window)
            found = yield from self.exchange("transfer", own, self.channel)
            if self.me in before:
                self.point("transfer.received")
                self.model, self.done, self.rate, window = found[present[0]]
                assert self.state.window == window
                self.content = []
            present = self.state.members
        if parked and self.me in present:
            channel = (*self.channel, present) if len(present) < len(self.state.members) else None
            number = yield Post(channel or self.channel, ("split", present), ())
            yield Take(channel or self.channel, number, present)
        self.was_parked = self.was_parked or self.state.is_parked
        self.point("change.formed")


# ── CADENCE and ASYNC ────────────────────────────────────────────────────────────────────────────


class Outcome(NamedTuple):
    """What an exchange came to; see ``evener.engine.local``."""

    over: Any
    rows: dict[int, Row]
    verdict: Decision
    place: Hashable
    next_plan: Any = None
    retired: tuple[Slice, ...] = ()
    content: tuple[Slice, ...] = ()


class LocalRank(Rank):
    """A rank's windows of local steps; see ``evener.engine.local``."""

    def __init__(self, network: Network, me: int) -> None:
        super().__init__(network, me)
        world_size = self.program.world_size
        self.beside = self.program.policy is ApplyPolicy.ASYNC
        self.planner = CadencePolicy(
            [f"m{r}" for r in range(world_size)],
            ElChe(world_size, 2),
            NoGuard(),
            way=self.program.policy,
        )
        self.book: Any = None
        self.queue: deque[Slice] = deque()
        #: Batches that were stepped on since the last snapshot, with those that were left out.
        self.local: list[Slice] = []
        self.skipped = 0
        self.bad = 0
        self.most = 0
        self.target = 0
        self.step = 0
        self.in_batch = False
        self.job: Any = None
        self.landing: Outcome | None = None

    def here(self) -> tuple[int, int]:
        """The window, and steps in it."""
        return (self.state.window, self.step)

    def epoch(self, number: int) -> Steps:
        """The user's loop over a loader."""
        if self.state.phase is Phase.REST:
            yield from self.settle()
        if self.cursor.is_committed(number) or self.state.stopping:
            return
        yield from self.settle()
        self.local, self.skipped, self.bad = [], 0, 0
        self.book = LeaseBook(self.cursor, self.program.batch_size, range(self.program.world_size))
        self.state = self.state.begin()
        self.cursor.begin(number, abandon=self.abandoned)
        self.in_epoch = True
        try:
            yield from self.work()
            self.abandoned = self.state.led_out
            self.left = self.left or self.abandoned
            if not self.abandoned:
                yield from self.settle()
        except BreakError:
            self.abandoned = self.left = True
            self.leave()
        finally:
            self.in_epoch = False

    def work(self) -> Steps:
        """Steps and windows."""
        draft: LocalPlan | None = None
        if self.me == self.state.planner:
            draft = self.draft(self.state.window, stop=False)
        yield from self.meet(Purpose.PLAN, plan=draft, **self.data())
        if self.state.plan is not None:
            self.book.fill(self.state.plan.queues)
            self.go_by()
        while self.state.is_working:
            if self.may_go_on():
                yield from self.take_step(self.queue.popleft())
            else:
                yield from self.advance()

    def take_step(self, piece: Slice) -> Steps:
        """One pass of the user's loop: a batch, and a local step."""
        self.in_batch = True
        self.step = len(self.local)
        yield from self.body(self.step)
        self.in_batch = False
        self.local.append(piece)
        if self.state.window in self.script.bad:
            self.skipped += 1
            self.bad = 0 if self.script.may_skip else 1
        yield from self.advance()

    def may_go_on(self) -> bool:
        """Whether this rank may start a step now."""
        state = self.state
        if not self.queue or state.winding or state.stopping or self.wants_stop():
            return False
        if state.flight is not None and state.flight.blocking:
            return False
        return not self.bad and len(self.local) < min(self.most, self.target)

    def advance(self) -> Steps:
        """Lands what has landed, and closes the window when it is over."""
        while True:
            if self.state.flight is not None:
                if self.may_go_on() and not self.ready():
                    return
                yield from self.land()
            elif not self.state.is_working or self.may_go_on():
                return
            else:
                self.begin_exchange()

    def ready(self) -> bool:
        """Whether a landing need not wait."""
        found = not self.beside or self.job.over
        if self.beside:
            self.polls = (*self.polls, found)
        return found

    def leave(self) -> None:
        """The loop is left; an open batch is dropped."""
        self.state = self.state.leave()
        self.in_batch = False

    def settle(self) -> Steps:
        """All come to one consensus."""
        while (yield from self.is_unsettled()):
            if self.state.flight is None:
                self.begin_exchange()
            yield from self.land()
        if self.state.phase is Phase.REST or self.state.applied:
            yield from self.meet(Purpose.REST, busy=False)

    def is_unsettled(self) -> Generator[Any, Any, bool]:
        """Whether a window must be exchanged before."""
        flies = self.state.flight is not None
        if self.state.phase is Phase.REST:
            return flies or bool(self.state.plans)
        if not self.beside or self.committing or not self.in_epoch:
            return flies
        rows, _ = yield from self.meet(Purpose.REST, busy=flies)
        return any(row.busy for row in rows.values())

    # ── closing a window ─────────────────────────────────────────────────────────────────────────

    def begin_exchange(self) -> None:
        """Takes a snapshot, and begins its exchange."""
        assert self.state.flight is None, "S11: two flights"
        self.state = self.state.start()
        taken = tuple(self.local)
        plan = self.state.flight
        assert plan is not None
        report = Report(
            weight=float(sum(piece.size for piece in taken) if len(taken) > self.skipped else 0),
            steps=len(taken),
            samples=sum(piece.size for piece in taken),
            skipped=self.skipped,
            non_finite=self.bad,
            busy_s=0.01 * (self.me + 1) * len(taken),
        )
        self.local, self.skipped, self.bad = [], 0, 0
        self.most = self.target = plan.most[self.me]
        self.point("snapshot")
        said = self.state.say(
            Purpose.WINDOW, stop=self.wants_stop() or self.state.stopping, report=report
        )
        steps = self.exchange_window(said, taken)
        self.job = self.net.begin(self, steps) if self.beside else steps

    def exchange_window(self, state: State, taken: tuple[Slice, ...]) -> Steps:
        """Rows, differences, and the next plan."""
        channel = ("B", 0) if self.beside else self.channel
        assert state.own is not None
        number = yield from self.say(state.own, channel)
        rows = yield from self.hear(state.own, channel, number, state.members)
        place = (channel, number)
        verdict = self.judged(state, rows, place)
        if verdict.error is not None:
            self.tell(place, str(verdict.error))
            raise verdict.error
        found = yield from self.exchange(("verify", state.window), self.model, channel)
        assert len(set(found.values())) == 1, f"S6: {found}"
        if verdict.culprit is not None:
            return Outcome(state.flight, rows, verdict, place)
        content: tuple[Slice, ...] = ()
        if verdict.weight:
            found = yield from self.exchange(("difference", state.window), taken, channel)
            content = tuple(piece for rank in found for piece in found[rank])
        retired = tuple(
            piece
            for rank, row in rows.items()
            for piece in self.book.retire(rank, row.report.steps, row.report.samples)
        )
        assert not content or content == retired, "S8"
        reports = [row.report for row in rows.values()]
        self.planner.observe(reports, 0.001)
        draft: LocalPlan | None = None
        if self.me == state.planner:
            stop = any(row.stop or row.left for row in rows.values())
            made = sum(report.steps for report in reports)
            draft = self.draft(state.window + (made > 0), stop=stop)
        said = state.say(Purpose.PLAN, plan=draft, **self.data())
        assert said.own is not None
        number = yield from self.say(said.own, channel)
        plans = yield from self.hear(said.own, channel, number, state.members)
        error = self.judged(said, plans, (channel, number)).error
        if error is not None:
            self.tell((channel, number), str(error))
            raise error
        numbers = plans[state.planner].plan
        return Outcome(state.flight, rows, verdict, place, numbers, retired, content)

    def draft(self, window: int, *, stop: bool) -> LocalPlan:
        """The planner's next plan."""
        left = self.book.num_left
        plan = self.planner.plan(window, self.cursor.epoch, left=left, limit=None, stop=stop)
        return plan

    def land(self) -> Steps:
        """Takes over what the exchange came to."""
        try:
            if self.beside:
                outcome = yield Join(self.job)
            else:
                outcome = yield from self.job
        except BaseException:
            self.state = self.state.end()
            raise
        self.landing, verdict = outcome, outcome.verdict
        self.point("land.before")
        if verdict.culprit is None:
            verdict = RULES.land(self.state, outcome.rows, outcome.next_plan, verdict)
            self.check(verdict, outcome.rows, (outcome.place, "land"))
        self.state = self.state._replace(flight=None)
        yield from self.follow(outcome.rows, verdict, outcome.place)
        self.point("land.after")
        if self.state.plan is not None:
            hands_on = outcome.over.blocking and self.book.num_free == 0
            self.book.fill(self.state.plan.queues, hand_on=hands_on)
            self.go_by()

    def carry_out(self, do: Action, rows: dict[int, Row], verdict: Decision) -> Steps:
        """Does one thing that a round has led to."""
        yield from ()
        made = any(row.report.steps for row in rows.values())
        if do is Action.LAND and made:
            assert self.landing is not None
            self.apply(self.state.window, (verdict.skip, self.landing.content))
            self.applied = Pending(self.state.window, list(self.landing.retired))
        elif do is Action.RESTORE:
            self.local, self.skipped, self.bad = [], 0, 0

    def go_by(self) -> None:
        """Goes on by a plan; what was done of it counts."""
        plan = self.state.plan
        assert plan is not None
        done = len(self.local) + self.in_batch
        self.queue = deque(self.book.queue(self.me)[done:])
        self.most = plan.most[self.me]
        pace = self.script.pace
        self.target = max(1, plan.least, pace[self.state.window % len(pace)])
        if plan.blocking and plan.most == plan.steps:
            self.target = self.most


@lru_cache(maxsize=4096)
def _sent(row: Row, world_size: int) -> tuple[float, ...]:
    return tuple(encode(row, world_size))


@lru_cache(maxsize=4096)
def _received(numbers: tuple[float, ...]) -> Row:
    return decode(numbers)
