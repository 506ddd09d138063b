"""A world in virtual time: a roster, workers, lossy connections, and the windows they commit."""

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from evener.parsing import Fields
from evener.protocol.formation import (
    Deadlines,
    Formation,
    ProcessState,
    Standing,
    read_message,
)
from evener.protocol.roster import Roster

DEADLINES = Deadlines(
    lease_s=3.0,
    reconnect_s=1.0,
    stopped_s=1.0,
    host_lease_s=4.0,
    gather_s=0.5,
    timeout_s=60.0,
    beat_s=0.25,
)

#: What a window's parameters are: all that has gone into them.
Content = tuple[Any, ...]


@dataclass(slots=True)
class Plane:
    """The process group of a generation: who has posted which row, and the source's state."""

    posts: dict[int, set[str]] = field(default_factory=dict)
    sent_state: list[Content] | None = None


@dataclass(slots=True)
class Worker:
    """A worker with its link, in the terms of ``CoordinatorLink``."""

    member: str
    alive: bool = True
    stopped: bool = False
    parted: bool = False
    connected: bool = False
    to: deque[tuple[str, Any]] = field(default_factory=deque)
    back: deque[tuple[str, Any]] = field(default_factory=deque)
    held: Formation | None = None
    key: Any = None  # of the process group that it is in; None when it has left
    asking: tuple[int, Standing | None] | None = None
    lease_end_s: float = 0.0
    state: list[Content] | None = None  # by applied window
    committed: int = 0
    recovered: bool = False

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped

    @property
    def applied(self) -> int:
        return len(self.state or [()]) - 1


class World:
    """All of them; each method that a test may call is an action, possible or not."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.now_s = 0.0
        self.incarnation = 0
        self.roster: Roster | None = Roster(least, most, DEADLINES, self.now_s)
        self.workers: list[Worker] = []
        self.planes: dict[Any, Plane] = {}
        #: What was committed, and the time: by root of a lineage and window.
        self.commits: dict[tuple[Any, int], Content] = {}
        self.newest: Formation | None = None  # as a supervisor has heard
        self.roots: list[Any] = []

    # ── workers and time ─────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        if sum(w.alive and not w.parted for w in self.workers) < self.most + 1:
            worker = Worker(f"w{len(self.workers)}")
            self.workers.append(worker)
            worker.asking = (0, None)
            self.connect(worker)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        if self.roster is not None:
            # The supervisor of each worker is on its machine.
            self.roster.attend(
                self.now_s, [w.member for w in self.workers if w.alive and not w.parted]
            )
            self.roster.tick(self.now_s)
            self.send()

    def kill(self, worker: Worker, told: bool) -> None:
        if worker.alive:
            worker.alive = False
            self.cut(worker)
            if told:
                self.tell_state(worker, ProcessState.GONE)

    def stop(self, worker: Worker) -> None:
        if worker.runs:
            worker.stopped = True
            self.tell_state(worker, ProcessState.STOPPED)

    def resume(self, worker: Worker) -> None:
        if worker.alive and worker.stopped:
            worker.stopped = False
            self.tell_state(worker, ProcessState.CONTINUED)

    def tell_state(self, worker: Worker, state: ProcessState) -> None:
        if self.roster is not None:
            self.roster.process(self.now_s, worker.member, state, "")
            self.send()

    # ── the coordinator and its connections ──────────────────────────────────────────────────────

    def crash(self) -> None:
        if self.roster is not None:
            for worker in self.workers:
                self.cut(worker)
            self.roster = None

    def restart(self) -> None:
        if self.roster is None:
            self.incarnation += 1
            self.roster = Roster(self.least, self.most, DEADLINES, self.now_s)
            self.roster.remember(self.now_s, self.newest)
            for worker in self.workers:  # the supervisor says again what it knows
                if not worker.alive:
                    self.tell_state(worker, ProcessState.GONE)
                elif worker.stopped:
                    self.tell_state(worker, ProcessState.STOPPED)

    def connect(self, worker: Worker) -> None:
        can = worker.runs and not worker.parted
        if can and not worker.connected and self.roster is not None:
            worker.connected = True
            session = worker.member
            why = self.roster.arrive(self.now_s, worker.member, session, {}, worker.held)
            assert not why
            if worker.asking is not None:
                worker.to.append(("report", worker.asking))
            self.send()

    def cut(self, worker: Worker) -> None:
        """The connection ends, and what is on its way is lost."""
        if worker.connected:
            worker.connected = False
            worker.to.clear()
            worker.back.clear()
            if self.roster is not None:
                self.roster.depart(self.now_s, worker.member)
                self.send()

    def part(self, workers: list[Worker]) -> None:
        """The network between these workers and the coordinator breaks."""
        for worker in workers:
            worker.parted = True
            self.cut(worker)

    def vanish(self, worker: Worker) -> None:
        """Its machine loses power, or its link: nothing comes any more, and nothing ends."""
        worker.parted, worker.connected = True, False
        worker.to.clear()
        worker.back.clear()

    def mend(self) -> None:
        for worker in self.workers:
            worker.parted = False

    def send(self) -> None:
        assert self.roster is not None
        by_name = {worker.member: worker for worker in self.workers}
        self.newest = self.roster.formation or self.newest
        for message in self.roster.take():
            if message.to and by_name[message.to].connected:
                content = (self.incarnation, json.loads(json.dumps(message.content)))
                by_name[message.to].back.append((message.type, content))

    def deliver(self, worker: Worker) -> None:
        """The coordinator hears a message."""
        if worker.connected and worker.to and self.roster is not None:
            if not self.roster.knows(worker.member):
                self.cut(worker)
                return
            kind, content = worker.to.popleft()
            if kind == "report":
                self.roster.report(self.now_s, worker.member, *content)
            elif kind == "beat":
                renewed = self.roster.beat(self.now_s, worker.member, worker.applied, "training")
                worker.back.append(("beaten", (content, renewed, self.roster.generation)))
            self.send()

    def beat(self, worker: Worker) -> None:
        if worker.runs and worker.connected:
            worker.to.append(("beat", self.now_s))

    def hear(self, worker: Worker) -> None:
        """A worker hears a message."""
        if not (worker.runs and worker.back):
            return
        kind, content = worker.back.popleft()
        if kind == "beaten":
            sent_s, renewed, generation = content
            is_own = worker.held is not None and worker.held.generation == generation
            if renewed and is_own and worker.asking is None:
                worker.lease_end_s = sent_s + DEADLINES.lease_s
        elif kind == "formed":
            incarnation, fields = content
            formation = read_message(Formation, Fields(fields))
            if worker.asking is not None and worker.member in formation.members:
                self.enter(worker, formation, (incarnation, formation))
        elif kind == "over":
            _, fields = content
            if worker.held is not None and fields["generation"] == worker.held.generation:
                self.give_up(worker)
        elif kind == "left_out" and worker.asking is not None:
            worker.state, worker.committed = None, 0
            self.ask(worker)

    # ── generations and windows ──────────────────────────────────────────────────────────────────

    def enter(self, worker: Worker, formation: Formation, key: Any) -> None:
        worker.held, worker.asking, worker.key = formation, None, key
        plane = self.planes.setdefault(key, Plane())
        worker.recovered = worker.member not in formation.receivers
        if formation.has_state:
            if worker.recovered:
                assert worker.applied == formation.base, "sources and their equals are at the base"
        elif worker.member == formation.source:
            worker.state = [("root", key)]
        if worker.member == formation.source:
            assert worker.state is not None
            plane.sent_state = list(worker.state)

    def give_up(self, worker: Worker) -> None:
        """A worker leaves its generation: its group is broken, or it was told so."""
        if worker.runs and worker.key is not None:
            worker.key = None
            self.ask(worker)

    def ask(self, worker: Worker) -> None:
        generation = worker.held.generation if worker.held else 0
        standing = None
        if worker.state is not None:
            standing = Standing(
                applied=worker.applied,
                committed=worker.committed,
                digest=str(hash(worker.state[-1])),
            )
        worker.asking, worker.lease_end_s = (generation, standing), 0.0
        if worker.connected:
            worker.to.append(("report", worker.asking))

    def step(self, worker: Worker) -> bool:
        """A member does the next thing that it can; return whether it did one."""
        if not worker.runs or worker.key is None or worker.held is None:
            return False
        plane = self.planes[worker.key]
        if not worker.recovered:
            if plane.sent_state is None:
                return False
            worker.state, worker.recovered = list(plane.sent_state), True
            return True
        window = worker.applied + 1
        posted = plane.posts.setdefault(window, set())
        if worker.member not in posted:
            posted.add(worker.member)
            return True
        if posted != set(worker.held.members) or not self.commit(worker):
            return False
        assert worker.state is not None
        worker.state.append((worker.state[-1], worker.key, window))
        return True

    def commit(self, worker: Worker) -> bool:
        """All have applied what this member has; return whether its lease lets it commit that."""
        assert worker.state is not None
        if self.now_s >= worker.lease_end_s:
            return False
        root = worker.state[0]
        if root not in self.roots:
            self.roots.append(root)
        assert root == self.roots[-1], "a team that has been replaced commits no more"
        for window in range(worker.committed, worker.applied + 1):
            known = self.commits.setdefault((root, window), worker.state[window])
            assert known == worker.state[window], "two generations committed unlike windows"
        worker.committed = worker.applied
        return True

    # ── a fair scheduler ─────────────────────────────────────────────────────────────────────────

    def settle(self, seconds: float) -> None:
        """Let everything that lives run, without further faults."""
        self.restart()
        self.mend()
        for worker in self.workers:
            self.resume(worker)
        while sum(worker.alive for worker in self.workers) < self.least:
            self.start()
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for worker in self.workers:
                self.connect(worker)
                self.beat(worker)
                while worker.to:
                    self.deliver(worker)
                while worker.back and worker.runs:
                    self.hear(worker)
                self.notice_the_dead(worker)
                while self.step(worker) and worker.applied % 3:
                    pass
            self.wait(0.25)

    def notice_the_dead(self, worker: Worker) -> None:
        """A group breaks when one of its processes ends or leaves it."""
        if worker.key is not None and worker.held is not None:
            inside = {w.member for w in self.workers if w.alive and w.key == worker.key}
            entering = {
                w.member
                for w in self.workers
                if w.alive and w.asking and any(kind == "formed" for kind, _ in w.back)
            }
            if not set(worker.held.members) <= inside | entering:
                self.give_up(worker)
