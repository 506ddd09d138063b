"""Generations: ranks are parked, called back, join, leave or are lost, and the others continue."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from enum import Enum, auto
from typing import Any, Final, NoReturn, Protocol, TypeVar

import torch

from evener.data.cursor import Cursor
from evener.engine.commits import Commits
from evener.engine.consensus import Consensus
from evener.engine.engine_options import EngineOptions
from evener.engine.membership_change import MembershipChange, describe_loss_of_state
from evener.engine.results import WindowResult
from evener.engine.rounds import CollectiveResult, Round, Rounds
from evener.engine.run_state import RunState
from evener.engine.training_state import TrainingState
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    LeftOutError,
    ReplicasDifferError,
)
from evener.planning.policies import Planner
from evener.protocol.formation import TRAINING, Formation, Standing
from evener.protocol.row import Purpose
from evener.team.members import Member

T = TypeVar("T")

#: Longest that the main process may take to hand over, in seconds.
HAND_OVER_S: Final = 3600.0


class GenerationChangedError(CollectiveError):
    """The generation of a round has ended while functions of ``on_commit`` ran."""


class Presence(Enum):
    """Whether this rank takes part in what the team does."""

    JOINING = auto()
    """The team began before it came, or has continued without it; it does not hold the state."""
    ASIDE = auto()
    """It holds the state, but its script is where the others have been before it joined."""
    PRESENT = auto()


class WindowRunner(Protocol):
    """What a change of the generation needs of the windows under way."""

    commits: Commits
    consensus: Consensus
    options: EngineOptions
    training: TrainingState
    batch_size: int
    max_steps: int | None
    is_planning: bool
    result: WindowResult | None

    @property
    def policy(self) -> Planner:
        """Return the policy that divides the work."""

    def meet(self, purpose: Purpose, **fields: Any) -> Round:
        """Exchange rows and do what follows."""

    def settle(self) -> None:
        """Commit what has been applied."""

    def let_go(self) -> None:
        """End what uses the connections of this generation."""

    def drop(self) -> None:
        """Drop all that is under way: the share, plans, and whatever waits for other ranks."""

    def use_team(self) -> None:
        """Use the ranks that are present from now on."""

    def recovered(self) -> None:
        """Continue with the state that has arrived."""

    def exchange_plans(self, *, renew: bool = False, work_for_all: bool = False) -> bool:
        """Agree on the plans of the next windows; return whether ranks plan windows at all."""


class Generations:
    """Begins the next generation of a team, and brings ranks that were away up to date.

    If a rank is lost, the exchange under way on the others fails, or the next one does. Each of
    them drops the window under way and waits for the next generation. There, ranks that are behind
    or new receive the state of the source, and all compare digests of it. Then the newest applied
    window is committed, and new plans are made.

    A rank may find that the team has continued without it, for example because it was stopped. It
    then drops its state, and joins again like a new rank.

    A rank may be lost while functions of ``on_commit`` exchange something. Ranks that have not
    seen the commit then commit in the new generation, and their functions meet those of the
    others there. The rest of that round's actions is void (``GenerationChangedError``).

    A parked rank does not hold the current state, because the others train on. So if its generation
    ends meanwhile in an elastic team, it joins the next one like a new rank.

    Args:
        rounds: Exchange rows.
        run: Travels to ranks that were away.
        windows: Those of this rank.

    Attributes:
        rounds: As given.
        windows: As given.
        is_cold: Whether the team has started over without a member that held its state, and this
            rank has begun no epoch since.
        was_parked: Whether this rank has ever been parked.
        recall_s: Seconds that calling parked ranks back took last; 0 before the first time.
        redo_s: Seconds from a change to the commit of its first window, until that is reported.
    """

    def __init__(self, rounds: Rounds, run: RunState, windows: WindowRunner) -> None:
        self.rounds, self.windows = rounds, windows
        self._run, self._team = run, rounds.team
        is_joining = self._team.membership.is_joining
        self._presence = Presence.JOINING if is_joining else Presence.PRESENT
        #: Whether all ranks continue with new plans when the newest change is complete.
        self._are_planning = False
        #: Names of the ranks of the last generation that has begun.
        self._known = {} if is_joining else {r: self._team.names[r] for r in self._team.members}
        #: Names of ranks that were asked to leave in it.
        self._leaving: set[str] = set()
        #: See ``MembershipChange``; of the generations since the newest change.
        self._detect_s = 0.0
        #: States of registered objects with which this rank has joined.
        self._joined_with: dict[str, Any] = {}
        #: What belongs to the model that this rank holds while it is parked.
        self._parked_at: dict[str, Any] = {}
        #: The last change and when it was over, until its first window is committed.
        self._begun: tuple[MembershipChange, float] | None = None
        self.is_cold = self.was_parked = False
        self.recall_s = 0.0
        self.redo_s: float | None = None
        self._on_change: list[Callable[[MembershipChange], None]] = []
        self._on_cold_restart: list[Callable[[], None]] = []

    # ── what others ask ──────────────────────────────────────────────────────────────────────────

    @property
    def is_joining(self) -> bool:
        """Return whether the team began before this rank came, and the rank is not in it yet."""
        return self._presence is Presence.JOINING

    @property
    def has_just_joined(self) -> bool:
        """Return whether this rank has joined and not begun an epoch since."""
        return self._presence is Presence.ASIDE

    @property
    def is_alone(self) -> bool:
        """Return whether the others passed this point of the script before this rank joined."""
        return self.is_joining or (self.has_just_joined and not self.rounds.committing)

    @property
    def wants_renewal(self) -> bool:
        """Return whether the members of an elastic team are to change after this window."""
        return bool(self._team.membership.wants_change or self.rounds.state.leaving)

    def call_on_change(self, function: Callable[[MembershipChange], None]) -> None:
        """Call ``function`` with every change of an elastic team, on every rank."""
        self._on_change.append(function)

    def call_on_cold_restart(self, function: Callable[[], None]) -> None:
        """Call ``function`` when no member of a new generation holds the team's state.

        All members call it together, for loading a checkpoint. Then the state of the first one
        goes to all.
        """
        self._on_cold_restart.append(function)

    def time_redo(self, result: WindowResult) -> None:
        """Note, at a commit, how long the last change has kept the team from it."""
        self.redo_s = None
        if self._begun is not None and result.window >= self._begun[0].window:
            (change, begun_s), self._begun = self._begun, None
            self.redo_s = time.perf_counter() - begun_s
            if change.lost:
                self.windows.options.guards.notice(
                    f"window {result.window}, the first one of generation {change.generation}, is "
                    f"committed {self.redo_s:.2f} s after that began"
                )

    # ── joining ──────────────────────────────────────────────────────────────────────────────────

    def join(self, cursor: Cursor, batch_size: int, max_steps: int | None) -> None:
        """Join the team, if that began before this rank came.

        Args:
            cursor: The data position.
            batch_size: Samples of a window of SYNC over all ranks, or of a local step.
            max_steps: Optimizer steps of the run; ``None`` for any.
        """
        while self.is_joining:
            self._run.cursor = cursor
            self.windows.batch_size, self.windows.max_steps = batch_size, max_steps
            self.change()

    def step_in(self) -> None:
        """Take part in what the others do from now on, if this rank has just joined."""
        if self.has_just_joined:
            self._presence = Presence.PRESENT
            self._team.step_in()
            # The script may have changed them since, at points that the others have passed before.
            self.windows.training.load_registered(self._joined_with)
            self._joined_with = {}

    def go_alone(self) -> None:
        """Commit what is applied without the others, so that this rank can save what it holds.

        For when the coordinator is lost: the others give up, too.
        """
        self.windows.drop()
        self._presence = Presence.ASIDE
        self._team.be_alone()
        self.windows.use_team()
        if self._run.applied is not None:
            self.windows.commits.commit({}, with_lease=False)

    # ── a change ─────────────────────────────────────────────────────────────────────────────────

    def keep(self, exchange: Callable[[], T]) -> T | bool:
        """Exchange something; if a rank is lost in it, begin the next generation.

        Between changes, this is the one place at which the loss of a rank is caught.

        Returns:
            The result of ``exchange``; after a loss, that of ``change``.
        """
        try:
            return exchange()
        except CollectiveError as error:
            return self.change(error)

    def change(self, error: CollectiveError | None = None) -> bool:
        """Begin the next generation of an elastic team; all ranks that remain call it together.

        If the others have continued without this rank, it joins again: at once if it is in an epoch
        of plans, otherwise when it begins the next one.

        Args:
            error: How this rank has learnt of a loss; raised if the team cannot continue.
                ``None`` where members join or leave by agreement.

        Returns:
            Whether new plans were made.
        """
        is_final = not self._team.is_elastic or isinstance(error, CollectiveMismatchError)
        if error is not None and is_final:
            raise error
        while True:
            try:
                if isinstance(error, GenerationChangedError):
                    self.windows.drop()  # what the void round was for; the team has changed already
                else:
                    self._renew("" if error is None else str(error))
                return self._resume()
            except CollectiveMismatchError:
                raise
            except CollectiveError as again:
                error = again
            except LeftOutError as left_out:
                self._drop_out(left_out)
                if not self.windows.is_planning or self.rounds.is_asking:
                    return False
                error = None

    def _renew(self, why: str) -> None:
        """Leave the generation, and begin the next one; ``_resume`` completes the change.

        Raises:
            CollectiveError: A rank was lost meanwhile.
            LeftOutError: The team has continued without this rank.
            KeyboardInterrupt: This rank has left, as it was asked to.
        """
        started_s = time.perf_counter()
        rounds, team, windows, run = self.rounds, self._team, self.windows, self._run
        epoch = None if run.cursor is None else run.cursor.epoch
        was_joining = self.is_joining
        self._leaving |= {team.names[rank] for rank in rounds.state.leaving}
        windows.let_go()
        self._go_back_to_parking()
        windows.drop()
        if team.rank in rounds.state.leaving and not rounds.stopping:
            self._leave_team()
        formed = team.membership.next_generation(None if was_joining else self._standing())
        formation = formed.formation
        # Another rank may be lost before the change is complete, which is reported then.
        self._detect_s = max(self._detect_s, formation.detect_s)
        team.form(formed)
        rounds.state = rounds.state.renew(formation, team.rank)
        windows.use_team()
        are_alike = self._introduce(is_new=was_joining or self.has_just_joined)
        formed_s = time.perf_counter()
        if not formation.has_state:
            self._restart_cold()
        num_bytes = self._recover(formation) if formation.receivers else 0
        self._follow_progress()  # it may have loaded a checkpoint
        self._compare(formation.base)
        self._report(
            formation,
            why,
            num_bytes=num_bytes,
            reform_s=formed_s - started_s,
            recover_s=time.perf_counter() - formed_s,
        )
        # A checkpoint may be of an earlier epoch: this loop has another order of samples.
        is_in_epoch = windows.is_planning and run.cursor is not None and run.cursor.epoch == epoch
        self.is_cold = not formation.has_state and are_alike
        if self.is_cold:  # all are at the same place of their scripts
            self._are_planning = is_in_epoch
            continues = True
        else:
            continues = is_in_epoch and self._are_planning
        if was_joining:
            self._presence = Presence.PRESENT if continues else Presence.ASIDE

    def _leave_team(self) -> NoReturn:
        """Leave for good, as this rank was asked to; the others continue without it.

        Raises:
            KeyboardInterrupt: Always: the request to stop takes effect now.
        """
        rounds, team = self.rounds, self._team
        if rounds.is_main:
            team.hand_over()
        team.membership.leave(finished=False)
        rounds.state = rounds.state.end()._replace(planner=-1)
        window = self._run.progress.window
        raise KeyboardInterrupt(f"rank {team.rank} has left the team in window {window}")

    def _drop_out(self, left_out: LeftOutError) -> None:
        """Become a rank that joins, because the team has continued without this one.

        Args:
            left_out: How this rank has learnt of it; raised if it cannot join again.
        """
        rounds, run = self.rounds, self._run
        if run.cursor is None or rounds.committing:
            raise left_out
        run.applied, self._presence = None, Presence.JOINING
        run.cursor.release()
        self._team.be_alone()
        state = rounds.state.release()
        rounds.state = state._replace(planner=-1, own=None, flight=None, applied=False)
        self.windows.result = None  # the others may have done it otherwise
        self.windows.use_team()

    def _restart_cold(self) -> None:
        """Let the run load its newest checkpoint: no worker is left that holds its state."""
        for load in self._on_cold_restart:
            load()
        window, is_script = self._run.progress.window, not self._on_cold_restart
        text = describe_loss_of_state(window, is_script=is_script)
        self.windows.options.guards.notice(text)

    def _resume(self) -> bool:
        """Commit what is applied, and agree on new plans where all ranks plan windows.

        Inside a commit it does nothing: functions of ``on_commit`` continue, and the caller of
        these functions resumes after them.

        Returns:
            Whether new plans were made.

        Raises:
            CollectiveError: A rank was lost meanwhile.
        """
        if self.rounds.committing:
            return False
        if self._run.applied is not None:
            self.windows.commits.commit({})
        if self.has_just_joined:
            self._joined_with = self.windows.training.copy_registered()
            self._team.stand_aside()
            return False
        if self._are_planning:
            self.windows.exchange_plans(work_for_all=True)
        return self._are_planning

    def _standing(self) -> Standing:
        # Whether plans are all that this rank exchanges next, like a rank that joins.
        is_planning = self.windows.is_planning or self.has_just_joined
        takes_joiners = is_planning and not (self.rounds.committing or self.rounds.is_asking)
        window = self._run.progress.window
        return Standing(
            applied=window,
            committed=window - (self._run.applied is not None),
            digest=f"{self.windows.consensus.digest():x}",
            phase=TRAINING if takes_joiners else "between two windows or epochs",
        )

    def _introduce(self, *, is_new: bool) -> bool:
        """Exchange names and purposes with the other ranks.

        Returns:
            Whether all are about to do the same.
        """
        team, windows, latest = self._team, self.windows, self.rounds.latest
        own = next(one for one in team.member_by_rank if one.member == team.membership.member)
        rows = latest.rows
        gathered = team.introduce(
            {
                "who": asdict(replace(own, rank=team.rank)),
                "is_new": is_new,
                "plans": windows.is_planning,
                "number": latest.number,
                "answers": [*latest.answers.items()],
                "rows": None if rows is None else [[*rows.shape], str(rows.dtype)],
            }
        )
        before = {member.rank: member for member in team.member_by_rank if member.host}
        team.meet([Member(**one["who"]) for one in gathered])
        # A launcher starts the next worker on the same device, which is as fast as before.
        others = [r for r, old in before.items() if team.member_by_rank[r].place != old.place]
        windows.policy.forget(others)
        self._run.limits.learn(dict.fromkeys(others, 0))
        windows.policy.set_micro_batch_sizes(self._run.limits.sizes)
        self._run.loss_scale.learn_ranks(team.fp16_ranks, team.rank)
        windows.options = replace(windows.options, unlike_devices=team.has_unlike_devices)
        self._are_planning = all(one["plans"] for one in gathered if not one["is_new"])
        self._take_latest(gathered)
        return len({one["plans"] for one in gathered}) == 1

    def _take_latest(self, gathered: Sequence[Mapping[str, Any]]) -> None:
        """Take the result of the newest exchange outside of windows."""
        rounds, comm = self.rounds, self.rounds.comm
        numbers = [-1 if one["is_new"] else int(one["number"]) for one in gathered]
        if (newest := max(numbers)) < 0:  # no rank holds state: all start over
            rounds.latest = CollectiveResult()
            return
        source = numbers.index(newest)
        rows, packed = None, gathered[source]["rows"]
        if packed is not None and min(n for n in numbers if n >= 0) < newest:
            shape, dtype = packed
            number = getattr(torch, dtype.removeprefix("torch."))
            known = rounds.latest.rows if comm.rank == source else None
            rows = torch.empty(shape, dtype=number) if known is None else known.cpu().contiguous()
            comm.broadcast(rows, source, what="rows that some ranks have missed")
        if numbers[comm.rank] < newest:
            rounds.latest = CollectiveResult(newest, dict(gathered[source]["answers"]), rows)

    # ── state for ranks that were away ───────────────────────────────────────────────────────────

    def _recover(self, formation: Formation) -> int:
        """Send the state of the source to the ranks that need it; return its size in bytes."""
        windows, run, rounds = self.windows, self._run, self.rounds
        source = formation.members.index(formation.source)
        receives = self._team.membership.member in formation.receivers
        pending = run.applied
        if receives and pending is not None and pending.result.window + 1 < formation.base:
            windows.commits.commit(
                {}
            )  # the source has applied the next one, so all had applied this one
        own = {
            **run.for_joiner(),
            "policy": windows.policy.state_dict(),
            "stopping": rounds.stopping,
        }
        state = windows.training.send(
            rounds.comm, own, receives, source, held=windows.consensus.held()
        )
        if receives:
            run.load_for_joiner(state)
            windows.policy.load_state_dict(state["policy"])
            windows.policy.set_micro_batch_sizes(run.limits.sizes)
            stopping = rounds.stopping or state["stopping"]
            rounds.state = rounds.state._replace(stopping=stopping)
            self._follow_progress()
            windows.recovered()
        return windows.training.num_bytes

    def _follow_progress(self) -> None:
        self.rounds.state = self.rounds.state._replace(window=self._run.progress.window)

    def _compare(self, base: int) -> None:
        """Check that all ranks hold the same state before a new one contributes.

        Raises:
            ReplicasDifferError: On every rank.
        """
        state = self.rounds.state
        digests = self._team.introduce(self.windows.consensus.digest())
        for rank, digest in zip(self._team.members, digests, strict=True):
            if digest != digests[self._team.members.index(state.planner)]:
                raise ReplicasDifferError(
                    f"rank {rank} does not hold the parameters and buffers of rank "
                    f"{state.planner} at the beginning of generation {state.generation}, "
                    "though it has received them: its memory is faulty, or this is a bug of evener."
                    " Resume from the last checkpoint",
                    rank=rank,
                    parameter="",
                    window=base - 1,
                )

    def _report(self, formation: Formation, why: str, **known: Any) -> None:
        """Report a change to functions of ``call_on_change``, and to the terminal."""
        names = dict(zip(formation.numbers, formation.members, strict=True))
        before, self._known = self._known, names
        leaving, self._leaving = self._leaving, set()
        stayed = {rank for rank, name in before.items() if names.get(rank) == name}
        gone = {rank: name for rank, name in before.items() if rank not in stayed}
        change = MembershipChange(
            generation=formation.generation,
            window=self._run.progress.window,
            why=why,
            members=formation.members,
            lost={rank: name for rank, name in gone.items() if name not in leaving},
            left={rank: name for rank, name in gone.items() if name in leaving},
            joined={rank: name for rank, name in names.items() if rank not in stayed},
            recovered={rank: name for rank, name in names.items() if name in formation.receivers},
            source=formation.source,
            new_main=formation.numbers[0] if next(iter(before), None) in gone else None,
            detect_s=self._detect_s,
            **known,
        )
        self._detect_s = 0.0
        self._begun = (change, time.perf_counter())
        self.windows.commits.forget_speeds()
        self.windows.options.guards.notice(str(change))
        for function in self._on_change:
            function(change)

    # ── parking ──────────────────────────────────────────────────────────────────────────────────

    def regroup(self) -> None:
        """Call parked ranks back with the state of now, or park others, as the plan says.

        All ranks call it together.
        """
        rounds, team, training = self.rounds, self._team, self.windows.training
        before, parked = rounds.state.parked, rounds.state.due_to_park
        was_parked, calls_back = team.rank in before, bool(before - parked)
        if rounds.state.planner in parked and not was_parked:
            if rounds.is_main:
                team.hand_over()
            # It may be writing a checkpoint.
            team.comm.barrier(what="the hand-over of the main process", timeout_s=HAND_OVER_S)
        # Before the exchange, because others may see its end while this rank does not.
        rounds.state = rounds.state.regroup()
        if not was_parked:
            training.sharded.join()
        if calls_back:
            self._call_back(receives=was_parked)
        if team.rank in parked and (calls_back or not was_parked):
            self.was_parked = True
            run = self._run
            self._parked_at = {**run.counters(), **run.positions.state_dict(run.cursor)}
            if team.is_elastic:
                self._presence = Presence.JOINING
        if parked:
            team.park(parked - team.parked)
        self.windows.use_team()

    def _call_back(self, *, receives: bool) -> None:
        """Make all ranks present again, with one state."""
        started_s = time.perf_counter()
        team, run, rounds = self._team, self._run, self.rounds
        source = team.members[0]
        team.rejoin()
        if receives:
            self._presence = Presence.JOINING
        own = {**run.counters(), "number": rounds.latest.number}
        at = team.members.index(source)
        state = self.windows.training.send(team.comm, own, receives, at)
        if receives:
            run.load_counters(state)
            self._follow_progress()
            if rounds.latest.number != state["number"]:
                rounds.latest = CollectiveResult(state["number"])
            self.windows.recovered()
            self._presence = Presence.PRESENT
        self.recall_s = time.perf_counter() - started_s

    def _go_back_to_parking(self) -> None:
        """Forget the windows that this rank has followed since it was parked: its model lacks them.

        That matters only if the team is lost that has applied them.
        """
        if self.rounds.state.is_parked:
            self._run.applied = None
            self._run.load_counters(self._parked_at)
            self._run.cursor = (
                self._run.positions.load_state_dict(self._parked_at) or self._run.cursor
            )
            self._follow_progress()
            self.windows.recovered()
