"""Commits: a window is known to be applied on all ranks, and functions are called for it."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from evener.engine.consensus import Consensus
from evener.engine.results import WindowResult
from evener.engine.rounds import Rounds
from evener.engine.run_state import RunState
from evener.engine.schedule import Schedule
from evener.observe.sentences import describe
from evener.planning.report import LATE_FIELDS
from evener.planning.stragglers import Straggler, StragglerWatch
from evener.protocol.row import Row
from evener.team.terminal import warn


class Commits:
    """Commits the windows of one rank.

    Args:
        rounds: Know the team.
        run: Holds the window that was applied last.
        consensus: Is shown to functions of ``on_commit``.
        schedule: Sets the learning rates.
    """

    def __init__(
        self, rounds: Rounds, run: RunState, consensus: Consensus, schedule: Schedule
    ) -> None:
        self._rounds, self._run, self._consensus = rounds, run, consensus
        self._schedule = schedule
        self._observers: list[Callable[[WindowResult], None]] = []
        self._on_commit: list[Callable[[WindowResult], None]] = []
        #: Windows for which slow ranks have not been looked for yet.
        self._unjudged: list[WindowResult] = []
        self._stragglers: tuple[Straggler, ...] = ()
        self.forget_speeds()

    def call(self, function: Callable[[WindowResult], None]) -> None:
        """Call ``function`` with every window that is committed, while the model shows it."""
        self._on_commit.append(function)

    def observe(self, function: Callable[[WindowResult], None]) -> None:
        """Call ``function`` first, which neither looks at the model nor exchanges anything."""
        self._observers.append(function)

    def forget_speeds(self) -> None:
        """Forget how fast the ranks were: other workers may have their numbers now."""
        self._watch = StragglerWatch(self._rounds.team.world_size)

    def judge(self) -> None:
        """Find out who was slow in windows that were committed since the last call.

        The main process does it, and warns of ranks that have become slow or have recovered.
        """
        team = self._rounds.team
        if self._rounds.is_main and team.world_size > 1:  # otherwise no rank waits for it
            judged = [one for r in self._unjudged for one in self._watch.observe(r.window, r.ranks)]
            # No rank waits any more for one that is parked or gone by now.
            found = tuple(one for one in judged if one.rank not in team.away)
            for one in found:
                kind = "straggler_over" if one.is_over else "straggler"
                member = team.member_by_rank[one.rank]
                place = f"{member.host}, {member.device}, {member.device_name}"
                warn(str(describe({"type": kind, **one._asdict(), "member": place})))
            self._stragglers += found
        self._unjudged.clear()

    def commit(self, rows: Mapping[int, Row], *, with_lease: bool = True) -> None:
        """Commit the previous window: all ranks have arrived here, so all have applied it.

        Args:
            rows: In which ranks have reported what they knew only after it.
            with_lease: Wait until this rank may commit, in an elastic team.
        """
        run, rounds = self._run, self._rounds
        if with_lease:
            rounds.team.membership.await_lease()
        applied, run.applied = run.applied, None
        rounds.state = rounds.state._replace(applied=False)
        assert applied is not None
        for lease in applied.leases:
            run.open_cursor.commit(lease)
        if rounds.state.is_parked or applied.result.window < run.num_notified:
            return
        run.num_notified = applied.result.window + 1
        result = self._complete(applied.result, rows)
        self._unjudged.append(result)
        for observe in self._observers:
            observe(result)
        if self._on_commit:
            self._notify(result)

    def _complete(self, result: WindowResult, rows: Mapping[int, Row]) -> WindowResult:
        """Return the result with what ranks report of it a round later."""
        ranks = list(result.ranks)
        for rank, row in rows.items():
            ranks[rank] = ranks[rank]._replace(**{k: getattr(row.report, k) for k in LATE_FIELDS})
        found, self._stragglers = self._stragglers, ()
        cadence = result.cadence
        if cadence is not None:
            divergence = max((row.report.divergence for row in rows.values()), default=0.0)
            cadence = replace(cadence, divergence=divergence)
        return replace(result, ranks=tuple(ranks), stragglers=found, cadence=cadence)

    def _notify(self, result: WindowResult) -> None:
        """Call the functions of ``on_commit``."""
        is_local = result.cadence is not None
        if is_local:
            self._schedule.refuse_setting_by_hand()
        self._rounds.committing = True
        try:
            with self._consensus.shown():
                for callback in self._on_commit:
                    callback(result)
        finally:
            self._rounds.committing = False
        if is_local:
            self._schedule.accept()  # set in a callback, which runs on every rank
