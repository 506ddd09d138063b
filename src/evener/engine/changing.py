"""Elastic teams: end a generation when a rank is lost, joins or leaves, and begin the next one."""

import hashlib
import math
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NoReturn

from torch import Tensor

from evener.data.cursor import Cursor
from evener.engine.answers import AskingEngine
from evener.engine.engine import EngineOptions, Superseded
from evener.engine.positions import Positions
from evener.engine.results import Progress, Round, WindowResult, pack_applied, unpack_applied
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.engine.team_change import Change, describe_loss_of_state
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    LeftOutError,
    ReplicasDifferError,
)
from evener.planning.policies import ApplyPolicy
from evener.protocol.formation import TRAINING, Formation, Standing
from evener.protocol.row import Purpose
from evener.team.members import Member
from evener.team.terminal import write_unmarked


class ElasticEngine(AskingEngine):
    """An engine whose team may change, where its membership is elastic.

    If a rank is lost, the exchange under way on the others fails, or the next one does. Each of
    them drops the window under way and waits for the next generation. There, ranks that are behind
    or new receive the state of the donor, and all compare hashes of it. Then the newest applied
    window is committed, and new plans are made. A subclass defines what it drops, and how it makes
    plans.

    A rank may find that the team has continued without it, for example because it was stopped. It
    then drops its state, and joins again like a new rank.

    A rank may be lost while functions of ``on_commit`` exchange something. Ranks that have not
    heard of the commit then commit in the new generation, and their functions meet those of the
    others there. The rest of that round's actions is void (``Superseded``).
    """

    def __init__(
        self, team: Team, training: TrainingState, options: EngineOptions, way: ApplyPolicy
    ) -> None:
        super().__init__(team, training, options, way)
        membership = team.membership
        self.state = self.state._replace(
            is_elastic=team.is_elastic,
            absent=team.absent,
            generation=membership.generation,
            # A rank that has not joined yet neither plans nor prints.
            planner=-1 if membership.is_joining else team.members[0],
        )
        #: Whether this rank holds the team's state: not before it has joined.
        self._is_in = not membership.is_joining
        #: Whether this rank has joined and not begun an epoch since.
        self._is_new = False
        #: Whether the team has started over without a member that held its state, and no epoch
        #: since.
        self._is_anew = False
        #: Whether this rank is at the point at which the windows of an epoch are planned.
        self._wants_plans = False
        #: Names of the ranks of the last generation that has begun.
        self._known = {} if self.is_joining else {r: team.names[r] for r in team.members}
        #: Names of ranks that were told to leave in it.
        self._leaving: set[str] = set()
        #: See ``Change``; of the generations since the newest change.
        self._detect_s = 0.0
        #: Whether all ranks continue with new plans when the newest change is complete.
        self._are_planning = False
        #: Of all loaders; they travel to ranks that join.
        self.positions = Positions()
        #: States of registered objects with which this rank has joined.
        self._joined_with: dict[str, Any] = {}
        self._on_change: list[Callable[[Change], None]] = []
        #: The last change and when it was over, until its first window is committed.
        self._begun: tuple[Change, float] | None = None
        #: Seconds from a change to the commit of its first window, while that is told.
        self.redo_s: float | None = None
        if team.is_elastic:
            self.call_on_commit(self._time_redo)
        self._on_anew: list[Callable[[], None]] = []

    # ── for a leaf ───────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _break_off(self) -> None:
        """Drop all that is under way: the share, plans, and whatever waits for other ranks."""

    def _let_go(self) -> None:
        """Close the connections of this generation, and end what runs by them."""
        # With Gloo, ranks that were not connected to the lost one wait until every other rank has
        # closed its group.
        self.team.let_go()

    @abstractmethod
    def _exchange_plans(self, *work_for_all: float, renew: bool = False) -> None:
        """Agree on the plans of the next windows; all ranks that are present call it together.

        Args:
            *work_for_all: See ``Policy.plan``; for each of these windows.
            renew: See ``_agree_on_plan``.
        """

    def _use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""
        self.policy.set_absent(self.team.absent)
        self.habits.speak(for_all=self.is_main)
        write_unmarked(self.is_main)

    def _shared(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model that a rank receives, with what they are."""
        yield from self.training.held()
        yield from self.training.frozen()

    # ── what others ask ──────────────────────────────────────────────────────────────────────────

    @property
    def is_joining(self) -> bool:
        """Return whether the team began before this rank came, and the rank is not in it yet."""
        return not self._is_in

    def call_on_change(self, function: Callable[[Change], None]) -> None:
        """Call ``function`` with every change of an elastic team, on every rank."""
        self._on_change.append(function)

    def call_on_anew(self, function: Callable[[], None]) -> None:
        """Call ``function`` where no member of a new generation holds the team's state.

        All members call it together, for loading a checkpoint. Then the state of the first one
        goes to all.
        """
        self._on_anew.append(function)

    # ── joining ──────────────────────────────────────────────────────────────────────────────────

    @property
    def is_alone(self) -> bool:
        """Return whether the others passed this point of the script before this rank joined."""
        return self.is_joining or (self._is_new and not self.committing)

    def _step_in(self) -> None:
        """Take part in what the others do from now on, where this rank has just joined."""
        if self._is_new:
            self._is_new = False
            self.team.step_in()
            # The script may have changed them since, at points that the others have passed before.
            joined_with, self._joined_with = self._joined_with, {}
            self.training.load_registered(joined_with)

    @property
    def has_just_joined(self) -> bool:
        """Return whether this rank has joined and not begun an epoch since."""
        return self._is_new

    def join(self, cursor: Cursor, batch_size: int, max_steps: int | None) -> None:
        """Join the team, if that began before this rank came; see ``begin`` for the arguments."""
        while self.is_joining:
            self._cursor, self.batch_size, self._max_steps = cursor, batch_size, max_steps
            self._survive(CollectiveError(""))

    def _drop_out(self, left_out: LeftOutError, *, may_join: bool) -> None:
        """Become a rank that joins, because the team has continued without this one.

        Args:
            left_out: How this rank has learnt of it; raised where it cannot join again.
            may_join: Whether it can: it goes through epochs of a map-style loader.
        """
        if self._cursor is None or self.committing or not may_join:
            raise left_out
        self._applied, self._is_in, self._is_new = None, False, False
        self._cursor.release()
        self.team.be_alone()
        state = self.state.release()
        self.state = state._replace(planner=-1, own=None, flight=None, applied=False)
        self._use_team()

    def _time_redo(self, result: WindowResult) -> None:
        """Note, at a commit, how long the last change has kept the team from it."""
        self.redo_s = None
        if self._begun is not None and result.window >= self._begun[0].window:
            (change, begun_s), self._begun = self._begun, None
            self.redo_s = time.perf_counter() - begun_s
            if change.lost:
                self.habits.notice(
                    f"window {result.window}, the first one of generation {change.generation}, is "
                    f"committed {self.redo_s:.2f} s after that began"
                )

    # ── a change ─────────────────────────────────────────────────────────────────────────────────

    def _survive(self, error: CollectiveError, *, may_join: bool = True) -> bool:
        """Continue with the remaining ranks after a loss; all of them call it together.

        If the others have continued without this rank, it joins again: at once if it is in an epoch
        of plans, otherwise when it begins the next one.

        Args:
            error: How this rank has learnt of it; raised where the team cannot continue.
            may_join: See ``_drop_out``.

        Returns:
            Whether new plans were made.
        """
        if not self.team.is_elastic or isinstance(error, CollectiveMismatchError):
            raise error
        while True:
            try:
                if isinstance(error, Superseded):
                    self._break_off()  # the purpose of the void round; the team has changed already
                else:
                    self._renew(str(error))
                return self._resume()
            except CollectiveMismatchError:
                raise
            except CollectiveError as again:
                error = again
            except LeftOutError as left_out:
                self._drop_out(left_out, may_join=may_join)
                if not self._wants_plans or self._is_asking:
                    return False
                error = CollectiveError("")

    def _renew(self, why: str) -> None:
        """Leave the generation, and begin the next one; ``_resume`` completes the change.

        Raises:
            CollectiveError: A rank was lost meanwhile.
            LeftOutError: The team has continued without this rank.
            KeyboardInterrupt: This rank has left, as it was told to.
        """
        started_s = time.perf_counter()
        epoch = None if self._cursor is None else self._cursor.epoch
        self._leaving |= {self.team.names[rank] for rank in self.state.leaving}
        team, membership, is_new = self.team, self.team.membership, self.is_joining
        self._let_go()
        self._break_off()
        if self.rank in self.state.leaving and not self.stopping:
            self._leave_team()
        formed = membership.next_generation(None if is_new else self._standing())
        formation = formed.formation
        # Another rank may be lost before the change is complete, which is reported then.
        self._detect_s = max(self._detect_s, formation.detect_s)
        team.form(formed)
        self.rank = team.rank
        self.state = self.state.renew(formation, team.rank)
        self._use_team()
        is_alike = self._introduce(is_new=is_new or self._is_new)
        formed_s = time.perf_counter()
        if not formation.has_state:
            self._begin_anew()
        num_bytes = self._heal(formation) if formation.receivers else 0
        self._set_progress(self.progress)  # it may have loaded a checkpoint
        self._compare(formation.base)
        self._is_in = True
        self._tell_change(
            formation,
            why,
            num_bytes=num_bytes,
            reform_s=formed_s - started_s,
            heal_s=time.perf_counter() - formed_s,
        )
        self._is_anew = not formation.has_state and is_alike
        if self._is_anew:  # all are at the same place of their scripts
            # A checkpoint may be of an earlier epoch: this loop has another order of samples.
            self._are_planning = self._wants_plans and self.cursor.epoch == epoch
        elif is_new:  # unless it comes back into the epoch that it was in
            is_back = self._wants_plans and self.cursor.epoch == epoch
            self._is_new = not (is_back and self._are_planning)

    def go_alone(self) -> None:
        """Commit what is applied without the others, so that this rank can save what it holds.

        For when the coordinator is lost: the others give up, too.
        """
        self._break_off()
        self._is_new = True
        self.team.be_alone()
        self._use_team()
        if self._applied is not None:
            super()._commit({})  # without a lease

    def _leave_team(self) -> NoReturn:
        """Leave for good, as this rank was told to; the others continue without it.

        Raises:
            KeyboardInterrupt: Always: what has told it takes effect now.
        """
        if self.is_main:
            self.team.hand_over()
        self.team.leave()
        self.state = self.state.end()._replace(planner=-1)
        raise KeyboardInterrupt(f"rank {self.rank} has left the team in window {self.window}")

    def _begin_anew(self) -> None:
        """Let the run load its newest checkpoint: no worker is left that holds its state."""
        for load in self._on_anew:
            load()
        self.habits.notice(describe_loss_of_state(self.window, is_script=not self._on_anew))

    def _resume(self) -> bool:
        """Commit what is applied, and agree on new plans where all ranks plan windows.

        Inside a commit it does nothing: functions of ``on_commit`` continue, and whoever has called
        them resumes after them.

        Returns:
            Whether new plans were made.

        Raises:
            CollectiveError: A rank was lost meanwhile.
        """
        if self.committing:
            return False
        if self._applied is not None:
            self._commit({})
        if self._is_new:
            self._joined_with = self.training.copy_registered()
            self.team.stand_aside()
        elif self._are_planning:
            self._exchange_plans(math.inf, math.inf)
        return self._are_planning and not self._is_new

    def _standing(self) -> Standing:
        return Standing(
            applied=self.window,
            committed=self.window - (self._applied is not None),
            digest=self._digest(),
            phase=TRAINING if self._takes_joiners else "between two windows or epochs",
        )

    @property
    def _takes_joiners(self) -> bool:
        """Return whether plans are all that this rank exchanges next, like a rank that joins."""
        is_planning = self._wants_plans or self._is_new
        return is_planning and not (self.committing or self._is_asking)

    def _digest(self) -> str:
        """Return a hash of the state that all ranks share, in hexadecimal."""
        hashes = self._hashes()
        return hashlib.blake2b(struct.pack(f"={len(hashes)}q", *hashes), digest_size=8).hexdigest()

    def _hashes(self) -> list[int]:
        self.flat.adopt()  # otherwise ranks that have not computed since a thaw would hold less
        with self.consensus():
            return self._check.hashes()

    def _introduce(self, *, is_new: bool) -> bool:
        """Exchange names and purposes with the other ranks.

        Returns:
            Whether all are about to do the same.
        """
        rows = self._heard.rows
        team = self.team
        own = next(one for one in team.people if one.member == team.name)
        told = team.introduce(
            {
                "who": asdict(replace(own, rank=team.rank)),
                "is_new": is_new,
                "plans": self._wants_plans,
                "heard": [self._heard.number, self._heard.answer],
                "rows": None if rows is None else [[*rows.shape], str(rows.dtype)],
            }
        )
        before = {member.rank: member for member in team.people if member.host}
        team.meet([Member(**one["who"]) for one in told])
        # A launcher starts the next worker on the same device, which is as fast as before.
        others = [r for r, old in before.items() if team.people[r].place != old.place]
        self.policy.forget(others)
        self.limits.learn(dict.fromkeys(others, 0))
        self.policy.set_micro_batch_sizes(self.limits.sizes)
        self._scale.learn_ranks(team.fp16_ranks, self.rank)
        self.options = replace(self.options, unlike_devices=team.has_unlike_devices)
        self._are_planning = all(one["plans"] for one in told if not one["is_new"])
        self._take_heard(told)
        return len({one["plans"] for one in told}) == 1

    def _heal(self, formation: Formation) -> int:
        """Send the donor's state to the ranks that need it; return its size in bytes."""
        source = formation.members.index(formation.donor)
        receives = self.team.name in formation.receivers
        pending = self._applied
        if receives and pending is not None and pending.result.window + 1 < formation.base:
            self._commit({})  # the donor has applied the next one, so all had applied this one
        counters = {**self._counters(), **self._learnt()}
        counters = self.training.send(self.comm, counters, receives, source, held=self._shared())
        if receives:
            self._take_counters(counters)
            self._take_learnt(counters)
        return self.training.num_bytes

    def _counters(self) -> dict[str, Any]:
        """Return the state beside the model that a rank which was away needs, in JSON."""
        return {
            "progress": asdict(self.progress),
            **self.positions.state_dict(self._cursor),
            "loss_scale": self._scale.state_dict(),
        }

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        """Undo ``_counters``."""
        self._set_progress(Progress(**counters["progress"]))
        self._cursor = self.positions.load_state_dict(counters) or self._cursor
        self._scale.load_state_dict(counters["loss_scale"])
        self._take_model()

    def _take_model(self) -> None:
        """Continue with a model that has arrived."""
        self.flat.zero_()
        self.restored()

    def _learnt(self) -> dict[str, Any]:
        """Return the further state that a rank from outside of the team needs, in JSON."""
        return {
            "policy": self.policy.state_dict(),
            "limits": self.limits.known,
            "stopping": self.stopping,
            "applied": None if self._applied is None else pack_applied(self._applied),
        }

    def _take_learnt(self, learnt: Mapping[str, Any]) -> None:
        """Undo ``_learnt``."""
        self.policy.load_state_dict(learnt["policy"])
        self.limits.learn(dict(enumerate(learnt["limits"])))
        self.policy.set_micro_batch_sizes(self.limits.sizes)
        self.state = self.state._replace(stopping=self.stopping or learnt["stopping"])
        packed = learnt["applied"]
        self._applied = None if packed is None else unpack_applied(packed)
        self._take_again()

    def _take_again(self) -> None:
        """Lease the samples of the applied, uncommitted window again."""
        for lease in () if self._applied is None else self._applied.leases:
            self.cursor.lease(lease)

    def _compare(self, base: int) -> None:
        """Check that all ranks hold the same state before a new one contributes.

        Raises:
            ReplicasDifferError: On every rank.
        """
        digest = self._digest()
        halves = (float(int(digest[:8], 16)), float(int(digest[8:], 16)))
        rows = self._meet(Purpose.FORM, body=halves).rows
        first = rows[self.state.planner].body
        for rank, row in rows.items():
            if row.body != first:
                raise ReplicasDifferError(
                    f"rank {rank} does not hold the parameters and buffers of rank "
                    f"{self.state.planner} at the beginning of generation {self.state.generation}, "
                    "though it has received them: its memory is faulty, or this is a bug of evener."
                    " Resume from the last checkpoint",
                    rank=rank,
                    parameter="",
                    window=base - 1,
                )

    # ── plans and commits ────────────────────────────────────────────────────────────────────────

    @property
    def _wants_renewal(self) -> bool:
        """Return whether the members of an elastic team are to change after this window."""
        return bool(self.team.wants_change or self.state.leaving)

    def _agree_on_plan(self, numbers: Sequence[float], *, renew: bool) -> Round:
        """Adopt the planner's plan; all ranks that are present call it together.

        Args:
            numbers: This rank's words about its data, and its plan, where it is the planner.
            renew: Whether it wishes that the members of the team change before.

        Raises:
            CollectiveError: The planner wishes that, and the team does not stop.
        """
        planner = self.state.planner
        found = self._meet(Purpose.PLAN, body=numbers, renew=renew)
        if found.rows[planner].renew and not self.stopping:
            raise CollectiveError("")  # as after a loss
        return found

    def _plan_first(self, *work_for_all: float) -> None:
        """Agree on the plans with which an epoch begins; see ``_exchange_plans``.

        The team may change here, too: epochs of one window have no other place for it.
        """
        is_planned = False
        while not (is_planned or self.is_alone):  # the team may begin another without it
            try:
                self._exchange_plans(*work_for_all, renew=self._wants_renewal)
                is_planned = True
            except CollectiveError as error:
                is_planned = self._survive(error)

    def _tell_change(self, formation: Formation, why: str, **known: Any) -> None:
        names = dict(zip(formation.numbers, formation.members, strict=True))
        before, self._known = self._known, names
        leaving, self._leaving = self._leaving, set()
        stayed = {rank for rank, name in before.items() if names.get(rank) == name}
        gone = {rank: name for rank, name in before.items() if rank not in stayed}
        change = Change(
            generation=formation.generation,
            window=self.window,
            why=why,
            members=formation.members,
            lost={rank: name for rank, name in gone.items() if name not in leaving},
            left={rank: name for rank, name in gone.items() if name in leaving},
            joined={rank: name for rank, name in names.items() if rank not in stayed},
            healed={rank: name for rank, name in names.items() if name in formation.receivers},
            donor=formation.donor,
            detect_s=self._detect_s,
            **known,
        )
        self._detect_s = 0.0
        self._begun = (change, time.perf_counter())
        self.slowness.restart(self.team.people)
        self.habits.notice(str(change))
        for tell in self._on_change:
            tell(change)
