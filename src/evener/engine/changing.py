"""Elastic teams: a generation ends as a rank is lost, joins or leaves, and the next one begins."""

import hashlib
import math
import struct
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import torch

from evener.data.cursor import Cursor
from evener.engine.engine import Engine, EngineOptions
from evener.engine.results import Progress, pack_applied, unpack_applied
from evener.engine.state import TrainingState
from evener.engine.team import Team
from evener.errors import (
    CollectiveError,
    CollectiveMismatchError,
    LeftOutError,
    ReplicasDifferError,
)
from evener.places import here
from evener.planning.policies import ApplyPolicy
from evener.protocol.formation import Formation, Standing
from evener.protocol.generation import renewed
from evener.protocol.row import Purpose

#: Under this key the team announces its epoch.
_EPOCH = "epoch"
_ALONE = (
    "{} at {} is done by rank {} alone: it joins a team that has passed this point. With "
    "`for epoch in ddp.epochs(n)` its loop begins at the epoch of the team"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of an elastic team, for people.

    Attributes:
        generation: The one that begins.
        window: Its first window.
        why: What led to it.
        members: Names of its ranks, in order.
        lost: Names of ranks that are gone, by number.
        left: Names of ranks that have left as they were told to, by number.
        joined: Names of ranks that are new in it, by number.
        healed: Names of ranks that have received the state, by number.
        donor: Name of the rank that has sent it.
        num_bytes: Its size.
        reform_s: Seconds until the new generation was formed and its ranks were connected.
        heal_s: Seconds until all of them held the same state.
    """

    generation: int
    window: int
    why: str
    members: tuple[str, ...]
    lost: Mapping[int, str]
    left: Mapping[int, str]
    joined: Mapping[int, str]
    healed: Mapping[int, str]
    donor: str
    num_bytes: int
    reform_s: float
    heal_s: float

    def __str__(self) -> str:
        """Return one line for the terminal."""
        said = [f"lost {_named(self.lost)}"] if self.lost else []
        said += [f"{_named(self.left)} left"] if self.left else []
        said += [f"{_named(self.joined)} joined"] if self.joined else []
        times = f"re-formed in {self.reform_s:.2f} s"
        if self.healed:
            times += f", state sent in {self.heal_s:.2f} s"
        return (
            f"generation {self.generation} begins with window {self.window}: "
            f"{', '.join(said) or self.why}; {len(self.members)} "
            f"{'rank' if len(self.members) == 1 else 'ranks'}, {times}"
        )


def _named(ranks: Mapping[int, str]) -> str:
    return " and ".join(f"rank {rank} ({name})" for rank, name in ranks.items())


class ElasticEngine(Engine):
    """An engine whose team may change, where its membership is elastic.

    A rank that is lost ends the exchange that the others are in, or the next one. Each of them
    drops what it has begun and waits for the next generation. There, ranks that are behind or new
    receive the state of the donor, all compare what they hold, the newest window that was applied
    is committed, and new plans are made. A leaf says what it drops, and how it makes plans.

    A rank may find that the team has gone on without it, such as one that was stopped. It then
    drops its state, and joins again as a rank does that has just come.
    """

    def __init__(
        self, team: Team, training: TrainingState, options: EngineOptions, way: ApplyPolicy
    ) -> None:
        super().__init__(team, training, options, way)
        membership = team.membership
        self.state = self.state._replace(
            is_elastic=team.is_elastic,
            generation=membership.generation,
            # A rank that has not joined yet neither plans nor prints.
            planner=-1 if membership.is_joining else team.members[0],
        )
        #: Whether this rank holds the team's state: not before it has joined.
        self._is_in = not membership.is_joining
        #: Whether this rank has joined and not begun an epoch since.
        self._is_new = False
        #: Whether the team has begun again with nobody that held its state, and no epoch since.
        self._is_anew = False
        #: Whether this rank is where the windows of an epoch are planned.
        self._wants_plans = False
        #: Names of the ranks of the last generation that has begun.
        self._known = {} if self.is_joining else {r: team.names[r] for r in team.members}
        #: Names of ranks that were to leave in it.
        self._leaving: set[str] = set()
        #: Rounds in which ranks asked one another, and what came of the last one.
        self._num_asked = 0
        self._answer: Any = None
        self._on_change: list[Callable[[Change], None]] = []
        self._on_anew: list[Callable[[], None]] = []

    # ── for a leaf ───────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _break_off(self) -> None:
        """Drop all that is under way: the share, plans, and whatever waits for other ranks."""

    @abstractmethod
    def _exchange_plans(self, *work_for_all: float) -> None:
        """Agree on the plans of the next windows; all ranks that are present call it together."""

    @abstractmethod
    def _use_team(self) -> None:
        """Use the ranks that are present from now on, in the policy and in exchanges."""

    # ── what others ask ──────────────────────────────────────────────────────────────────────────

    @property
    def is_joining(self) -> bool:
        """Whether the team began before this rank came, which is not in it yet."""
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

    def ask(self, purpose: Purpose, numbers: Sequence[float] = ()) -> dict[int, Sequence[float]]:
        """As ``Engine.ask``; where a rank is lost, those who remain ask again."""
        if self._is_alone:
            self.habits.tell_once(_ALONE.format(purpose.deed, here(), self.rank))
            return super().ask(purpose, numbers)
        asked = self._num_asked + 1
        while True:
            try:
                answer = super().ask(purpose, numbers)
            except CollectiveError as error:
                self._survive(error)
                if self._num_asked < asked:
                    continue
                # Another rank had heard all of them: its answer counts, as it goes on with that.
                return {int(rank): body for rank, body in self._answer}
            self._num_asked, self._answer = asked, list(answer.items())
            return answer

    def hear_main(self, told: Any, *, timeout_s: float | None = None) -> Any:
        """As ``Engine.hear_main``; where a rank is lost, those who remain ask again."""
        if self._is_alone:
            return told
        asked = self._num_asked + 1
        while True:
            try:
                answer = super().hear_main(told, timeout_s=timeout_s)
            except CollectiveError as error:
                self._survive(error)
                if self._num_asked < asked:
                    continue
                return self._answer
            self._num_asked, self._answer = asked, answer
            return answer

    # ── joining ──────────────────────────────────────────────────────────────────────────────────

    @property
    def _is_alone(self) -> bool:
        """Whether this rank's script is where the others have been before it joined."""
        return self.is_joining or self._is_new

    def _step_in(self) -> None:
        """Take part in what the others do from now on, where this rank has just joined."""
        if self._is_new:
            self._is_new = False
            self.team.step_in()

    @property
    def has_just_joined(self) -> bool:
        """Whether this rank has joined and not begun an epoch since."""
        return self._is_new

    def announce(self, epoch: int) -> None:
        """Tell workers that join later that an epoch begins."""
        if self.team.is_elastic and self.is_main:
            self.team.announce(_EPOCH, str(epoch))

    def is_past(self, epoch: int) -> bool:
        """Return whether this rank is to join, and the team has committed an epoch already."""
        return self.is_joining and epoch < self._known_epoch()

    def _known_epoch(self) -> int:
        """Return the epoch that the team announced last."""
        return int(self.team.announced(_EPOCH) or 0)

    def join(self, cursor: Cursor, batch_size: int, max_steps: int | None) -> None:
        """Join the team, if that began before this rank came; see ``begin`` for the arguments."""
        while self.is_joining:
            self._cursor, self.batch_size, self._max_steps = cursor, batch_size, max_steps
            try:
                self._renew("")
            except CollectiveMismatchError:
                raise
            except CollectiveError:
                continue  # a rank was lost before this one was in

    def _drop_out(self, left_out: LeftOutError, *, may_join: bool) -> None:
        """Be a rank that joins, as the team has gone on without this one.

        Args:
            left_out: How this rank has learnt of it; raised where it cannot join again.
            may_join: Whether it can: it goes through epochs of a map-style loader.
        """
        if self._cursor is None or not may_join:
            raise left_out
        self._applied, self._is_in, self._is_new = None, False, False
        self._num_asked, self._answer = 0, None
        self._cursor.release()
        self.team.be_alone()
        state = self.state.release()
        self.state = state._replace(planner=-1, own=None, flight=None, applied=False)
        self._use_team()

    # ── a change ─────────────────────────────────────────────────────────────────────────────────

    def _survive(self, error: CollectiveError, *, may_join: bool = True) -> bool:
        """Go on with those who remain, as a rank was lost; all of them call it.

        If the others have gone on without this rank, it joins again: at once if it is in an epoch
        of plans and so are they, otherwise when it begins the next one.

        Args:
            error: How this rank has learnt of it; raised where the team cannot go on.
            may_join: See ``_drop_out``.

        Returns:
            Whether new plans were made.
        """
        unlike = isinstance(error, CollectiveMismatchError)
        # In a commit, only the round that has led to it can be done again.
        if not self.team.is_elastic or unlike or self.committing:
            raise error
        why = str(error)
        while True:
            try:
                return self._renew(why)
            except CollectiveMismatchError:
                raise
            except CollectiveError as again:
                why = str(again)
            except LeftOutError as left_out:
                self._drop_out(left_out, may_join=may_join)
                if not self._wants_plans or self.cursor.epoch != self._known_epoch():
                    return False
                why = ""

    def _renew(self, why: str) -> bool:
        """Leave the generation, and begin the next one; return whether new plans were made.

        Raises:
            CollectiveError: A rank was lost meanwhile.
            LeftOutError: The team has gone on without this rank.
            KeyboardInterrupt: This rank has left, as it was told to.
        """
        started_s = time.perf_counter()
        epoch = None if self._cursor is None else self._cursor.epoch
        self._leaving |= {self.team.names[rank] for rank in self.state.leaving}
        team, membership, is_new = self.team, self.team.membership, self.is_joining
        self._break_off()
        # Gloo ends the waits of ranks that are no neighbours of the lost one only when every other
        # rank drops its group.
        team.comm.close()
        if self.rank in self.state.leaving and not self.stopping:
            self._leave_team()
        formed = membership.next_generation(None if is_new else self._standing())
        formation = formed.formation
        team.form(formed)
        self.rank = team.rank
        self.state = renewed(self.state, formation, team.rank)
        self._use_team()
        told = self._introduce(is_new=is_new)
        formed_s = time.perf_counter()
        if not formation.has_state:
            self._begin_anew()
        num_bytes = self._heal(formation) if formation.receivers else 0
        self._set_progress(self.progress)  # a team in which nobody held state may have loaded one
        self._compare(formation.base)
        self._is_in = True
        if self._applied is not None:
            self._commit({})
        self._tell_change(
            formation,
            why,
            num_bytes=num_bytes,
            reform_s=formed_s - started_s,
            heal_s=time.perf_counter() - formed_s,
        )
        if self._cursor is not None:
            self.announce(self._cursor.epoch)
        plans = all(one["plans"] for one in told.values() if not one["is_new"])
        places = {one["plans"] for one in told.values()}
        self._is_anew = not formation.has_state and len(places) == 1
        if self._is_anew:  # all are at the same place of their scripts
            plans = self._wants_plans
        elif is_new:  # unless it comes back into the epoch that it was in
            plans &= self._wants_plans and self.cursor.epoch == epoch
            self._is_new = not plans
        if self._is_new:
            self.team.stand_aside()
        elif plans:
            self._exchange_plans(math.inf, math.inf)
        return plans

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
        """Let the run load what it has saved, as no worker is left that holds its state."""
        for load in self._on_anew:
            load()
        window = self.window
        text = f"no worker is left that holds the team's state; it continues with window {window}"
        if not window:
            text = (
                "no worker is left that holds the team's state; it begins again at window 0. Save "
                "checkpoints with ddp.save, and call ddp.load before the first epoch where there "
                "is one, to lose less"
            )
        self.habits.notice(text)

    def _standing(self) -> Standing:
        return Standing(
            member=self.team.name,
            generation=self.state.generation,
            applied=self.window,
            committed=self.window - (self._applied is not None),
            digest=self._digest(),
            phase="training" if self.is_training else "between epochs",
        )

    def _digest(self) -> str:
        """Return a hash of what all ranks hold alike, in hexadecimal."""
        with self.consensus():
            hashes = self._check.hashes()
        return hashlib.blake2b(struct.pack(f"={len(hashes)}q", *hashes), digest_size=8).hexdigest()

    def _introduce(self, *, is_new: bool) -> dict[int, dict[str, Any]]:
        """Tell the others who this rank is and what it is about to do; return what each tells."""
        told = self.team.introduce(
            {
                "is_new": is_new,
                "plans": self._wants_plans,
                "fp16": self.options.dtype == torch.float16,
                "kind": self.options.kind,
                "asked": self._num_asked,
                "answer": self._answer,
            }
        )
        by_rank = dict(zip(self.team.members, told, strict=True))
        self._scale.learn_ranks(rank for rank, one in by_rank.items() if one["fp16"])
        kinds = {tuple(one["kind"]) for one in told}
        self.options = replace(self.options, unlike_devices=len(kinds) > 1)
        # A round needs all ranks, so none is ahead by more than one of them.
        latest = max(told, key=lambda one: int(one["asked"]))
        self._num_asked, self._answer = latest["asked"], latest["answer"]
        return by_rank

    def _heal(self, formation: Formation) -> int:
        """Send the donor's state to the ranks that need it; return its size in bytes."""
        source = formation.members.index(formation.donor)
        receives = self.team.name in formation.receivers
        pending = self._applied
        if receives and pending is not None and pending.result.window + 1 < formation.base:
            self._commit({})  # the donor has applied the next one, so all had applied this one
        counters = {**self._counters(), **self._learnt()}
        counters = self.training.send(self.comm, counters, receives, source, whole=True)
        if receives:
            self._take_counters(counters)
            self._take_learnt(counters)
        return self.training.num_bytes

    def _counters(self) -> dict[str, Any]:
        """Return what a rank that was away has to know beside what is trained, in JSON."""
        return {
            "progress": asdict(self.progress),
            "cursor": None if self._cursor is None else self._cursor.state_dict(),
            "loss_scale": self._scale.state_dict(),
        }

    def _take_counters(self, counters: Mapping[str, Any]) -> None:
        """Undo ``_counters``."""
        self._set_progress(Progress(**counters["progress"]))
        if self._cursor is not None and counters["cursor"] is not None:
            self._cursor.load_state_dict(counters["cursor"])
        self._scale.load_state_dict(counters["loss_scale"])
        self.flat.zero_()
        self.restored()

    def _learnt(self) -> dict[str, Any]:
        """Return what else a rank has to know that was not in the team, in JSON."""
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
        """Lease anew the samples of the window that is applied and not committed."""
        for lease in () if self._applied is None else self._applied.leases:
            # It was the first one that was free, and still is.
            assert self.cursor.take(lease.size) == lease

    def _compare(self, base: int) -> None:
        """Make sure that all ranks hold the same before one of them contributes.

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
            **known,
        )
        self.slowness.restart(change.joined)
        self.habits.notice(str(change))
        for tell in self._on_change:
            tell(change)
