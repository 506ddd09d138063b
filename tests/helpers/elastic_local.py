"""Elastic teams that make local steps, on threads, and what an undisturbed team makes of the same.

Optimizers are without a memory: what a change of the team drops then leaves no trace. Each rank's
clock stands still but for what its steps are said to take, so that the planner sees
ranks of different speed, whatever this machine does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from evener import Ddp, WindowResult
from evener.data.cursor import Slice
from evener.data.leases import LeaseBook
from evener.engine import local
from evener.engine.local import LocalEngine
from evener.planning.cadence import CadencePolicy
from evener.planning.plans import LocalPlan
from helpers.clocks import RankClocks
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.elastic_runs import begin

NUM_SAMPLES, BATCH, EPOCHS = 48, 2, 2
DATA = [(torch.tensor([k / 32, 1.0, k * k / 1024]), torch.tensor([k / 16])) for k in range(80)]
STEP_S = (0.01, 0.02, 0.01, 0.02, 0.01, 0.01)


class Trained(NamedTuple):
    """What a rank has at its end."""

    committed: list[WindowResult]
    state: list[Tensor]


class Record:
    """What a team has done, window by window.

    Attributes:
        done: By window and member, the batches that were averaged, in order.
        stale: By window and member, the steps that were made before its average landed, and that
            count for the next one: not those that a change of the team has dropped.
    """

    def __init__(self) -> None:
        self.done: dict[int, dict[str, tuple[Slice, ...]]] = {}
        self.stale: dict[tuple[int, str], int] = {}

    def apply(self, engine: Any, found: Any) -> None:
        self.done[engine.window] = {
            engine.team.names[rank]: engine._leases.queue(rank)[: row.report.steps]
            for rank, row in found.rows.items()
        }
        self.stale[engine.window, engine.team.membership.member] = engine._steps.num_done

    def break_off(self, engine: Any) -> None:
        self.stale[engine.window - 1, engine.team.membership.member] = 0


class LocalRuns:
    """Runs elastic teams of one policy, and replays what they have done.

    A team of five has two windows in an epoch of ``NUM_SAMPLES``, and more with more samples.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        clocks: RankClocks,
        policy: str,
        num_samples: int = NUM_SAMPLES,
    ) -> None:
        self.monkeypatch, self.clocks, self.policy = monkeypatch, clocks, policy
        self.record, self.num_samples = Record(), num_samples

    def run(
        self,
        founders: int,
        kills: Sequence[Kill] = (),
        *,
        joins_after: int | None = None,
        at_commit: Callable[[ThreadMembership, WindowResult], None] | None = None,
        body: Callable[[Ddp, Callable[[], None]], None] | None = None,
        whole: bool = True,
    ) -> ElasticThreads:
        """Train, and compare every rank that comes to the end with the replay.

        Args:
            founders: Members of the first generation.
            kills: Where members die.
            joins_after: Commit of this window starts another worker, and waits until it is there.
            at_commit: Called on every rank.
            body: The script, instead of ``loop``.
            whole: It goes through all epochs, so that it can be replayed.
        """
        team = ElasticThreads(founders, kills=kills)
        record = self.record
        self._watch(record)
        if self.policy == "async":
            self.clocks.land_after(1)

        def worker(membership: ThreadMembership) -> Trained:
            self.clocks.start()
            with begin(
                membership,
                seed=membership.number + 1,
                policy=self.policy,
                optimizer=torch.optim.SGD,
            ) as ddp:
                committed: list[WindowResult] = []

                def commit(result: WindowResult) -> None:
                    committed.append(result)
                    if joins_after == result.window and ddp.is_main_process:
                        team.add("j", worker)
                    if at_commit is not None:
                        at_commit(membership, result)

                def step() -> None:
                    self.clocks.spend(STEP_S[membership.number])

                ddp.on_commit(commit)
                body(ddp, step) if body else loop(ddp, step, num_samples=self.num_samples)
                return Trained(committed, state_of(ddp))

        self.trained = team.run_to_end(worker)
        if whole:
            self._check(team)
        return team

    def _begin(self, membership: ThreadMembership, seed: int) -> Ddp:
        return begin(membership, seed=seed, policy=self.policy, optimizer=torch.optim.SGD)

    def _watch(self, record: Record) -> None:
        apply, drop = LocalEngine._apply, LocalEngine.drop

        def watched_apply(engine: Any, found: Any) -> None:
            record.apply(engine, found)
            apply(engine, found)

        def watched_break_off(engine: Any) -> None:
            record.break_off(engine)
            drop(engine)

        self.monkeypatch.setattr(LocalEngine, "_apply", watched_apply)
        self.monkeypatch.setattr(LocalEngine, "drop", watched_break_off)

    def _check(self, team: ElasticThreads) -> None:
        record = self.record
        assert sorted(record.done) == [*range(len(record.done))]
        positions = [
            (piece.epoch, position)
            for by_rank in record.done.values()
            for pieces in by_rank.values()
            for piece in pieces
            for position in range(piece.start, piece.stop)
        ]
        once = {(e, p): 1 for e in range(EPOCHS) for p in range(self.num_samples)}
        assert Counter(positions) == once
        self.monkeypatch.undo()
        replayed = self.replay([*dict.fromkeys(m for f in team.formations for m in f.members)])
        for trained in self.trained.values():
            assert all(map(torch.equal, trained.state, replayed[0].state))
            losses = {result.window: result.loss for result in trained.committed}
            every = {result.window: result.loss for result in replayed[0].committed}
            assert losses == {window: every[window] for window in losses}
            assert len(losses) == len(trained.committed)
            assert max(losses) == max(every) == len(record.done) - 1
        assert all(map(torch.equal, replayed[0].state, replayed[-1].state))

    def replay(self, members: Sequence[str]) -> list[Trained]:
        """What a team without any change makes of the same batches, averaged at the same time."""
        record = self.record

        class ReplayBook(LeaseBook):
            """Hands out what was done; a plan's sizes are the number of its window."""

            def fill(self, sizes: Sequence[int], *, hand_on: bool = False) -> None:
                for rank, queue in self._queues.items():
                    member = members[rank] if rank < len(members) else ""
                    own = list(record.done[sizes[0]].get(member, ()))
                    stale = record.stale.get((sizes[0], member), 0)
                    own += record.done.get(sizes[0] + 1, {}).get(member, ())[:stale]
                    for piece in own[len(queue) :]:
                        self.cursor.lease(piece)
                        queue.append(piece)

        self.monkeypatch.setattr(local, "LeaseBook", ReplayBook)

        def worker(membership: ThreadMembership) -> Trained:
            with self._begin(membership, 1) as ddp:
                committed: list[WindowResult] = []
                ddp.on_commit(committed.append)
                self._script(ddp.assembly.engine, members)
                loop(ddp, lambda: None, num_samples=self.num_samples)
                return Trained(committed, state_of(ddp))

        team = ElasticThreads(len(members), most=len(members))
        return [*team.run_to_end(worker).values()]

    def _script(self, engine: Any, members: Sequence[str]) -> None:
        record, member = self.record, members[engine.rounds.rank]

        def may_go_on() -> bool:
            wanted = len(record.done.get(engine.window, {}).get(member, ()))
            if engine.rounds.state.flight is not None:
                wanted = record.stale.get((engine.window, member), 0)
            return bool(engine._own) and engine._steps.num_done < wanted

        def has_to_exchange() -> bool:
            working = engine.rounds.state.is_working or engine.rounds.state.flight is not None
            return working and not may_go_on()

        def plan(window: int, epoch: int, **_: Any) -> LocalPlan:
            done = record.done.get(window, {})
            counts = tuple(len(done.get(m, ())) for m in members)
            here = any(p.epoch == epoch for pieces in done.values() for p in pieces)
            return LocalPlan(
                window=window,
                epoch=epoch,
                window_s=1.0,
                blocking=self.policy == "cadence",
                steps=counts,
                most=counts if here else (0,) * engine.team.world_size,
                queues=(window,) * engine.team.world_size,
            )

        engine._may_go_on, engine._has_to_exchange = may_go_on, has_to_exchange
        policy: CadencePolicy = engine._policy
        policy.plan = plan


def state_of(ddp: Ddp) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in ddp.assembly.model.state_dict().values()]


def loop(
    ddp: Ddp,
    step: Callable[[], None],
    *,
    at_end: Callable[[int], object] = lambda epoch: None,
    num_samples: int = NUM_SAMPLES,
) -> None:
    """Train; ``step`` begins each batch, and ``at_end`` ends each epoch."""
    model = ddp.assembly.model
    loader = ddp.loader(DATA[:num_samples], batch_size=BATCH, seed=3)
    for epoch in ddp.epochs(EPOCHS):
        for x, y in loader.epoch(epoch):
            step()
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
        at_end(epoch)
