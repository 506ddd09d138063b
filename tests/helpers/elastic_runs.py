"""Runs of an elastic team of threads, and what an undisturbed team makes of the same plans."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig, Sink, WindowResult
from helpers.elastic import Died, ElasticThreads, Kill, ThreadMembership
from helpers.limits import PATIENCE_S
from helpers.teams import ScriptedPolicy

NUM_SAMPLES, BATCH, EPOCHS, MICRO_BATCH = 32, 8, 2, 4
DATA = [(torch.tensor([k / 32, 1.0, k * k / 1024]), torch.tensor([k / 16])) for k in range(32)]

SEEDED = threading.Lock()


class Trained(NamedTuple):
    """What a rank has at its end."""

    committed: list[WindowResult]
    state: list[Tensor]
    values: list[float]
    handed_out: list[int]


def loop(
    ddp: Ddp, model: nn.Module, at_commit: Callable[[WindowResult], None], *, num_workers: int = 0
) -> Trained:
    committed: list[WindowResult] = []
    handed_out, values = [], []

    def commit(result: WindowResult) -> None:
        committed.append(result)
        at_commit(result)

    ddp.on_commit(commit)
    loader = ddp.loader(
        DATA, batch_size=BATCH, seed=3, micro_batch_size=MICRO_BATCH, num_workers=num_workers
    )
    for epoch in ddp.epochs(EPOCHS):
        for x, y in loader.epoch(epoch):
            handed_out.append(len(x))
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
        values.append(ddp.weighted_mean(float(epoch)))
    state = [tensor.detach().clone() for tensor in model.state_dict().values()]
    return Trained(committed, state, values, handed_out)


def train(
    membership: ThreadMembership,
    at_commit: Callable[[Ddp, WindowResult], None],
    **options: Any,
) -> Trained:
    """A worker of an elastic team; its weights differ from those of others before it joins."""
    with begin(membership, seed=membership.number + 1, **options) as ddp:
        return loop(ddp, ddp.assembly.model, lambda result: at_commit(ddp, result))


def begin(membership: ThreadMembership, *, seed: int, **options: Any) -> Ddp:
    with SEEDED:  # threads share torch's generator
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S, max_grad_norm=1.0)
    return Ddp.setup(model, optimizer, devices="cpu", elastic=membership, config=config, **options)


def run(
    founders: int,
    kills: Sequence[Kill] = (),
    *,
    joins_after: int | None = None,
    at_commit: Callable[[ThreadMembership, WindowResult], None] | None = None,
    sinks: Sequence[Callable[[], Sink]] = (),
) -> tuple[ElasticThreads, dict[str, Trained]]:
    """Train; return the team, and what each member has that has come to the end.

    Args:
        founders: Members of the first generation.
        kills: Where members die.
        joins_after: Commit of this window starts another worker, and waits until it is there.
        at_commit: Called on every rank.
        sinks: Of every rank; see ``Ddp.setup``.
    """
    team = ElasticThreads(founders, kills=kills)

    def body(membership: ThreadMembership) -> Trained:
        def commit(ddp: Ddp, result: WindowResult) -> None:
            if joins_after == result.window and ddp.is_main_process and "j" not in team.numbers:
                team.start("j", body)
                while not team.joiners:
                    time.sleep(0.001)
            if at_commit is not None:
                at_commit(membership, result)

        return train(membership, commit, sinks=sinks)

    fates = team.run(body)
    errors = [f.error for f in fates if f.error is not None and not isinstance(f.error, Died)]
    if errors:
        raise errors[0]
    return team, {fate.member: fate.value for fate in fates if fate.error is None}


def check(team: ElasticThreads, trained: dict[str, Trained], *, replays: bool = True) -> None:
    """Every sample once an epoch, all members alike, and as an undisturbed team by these plans.

    Without ``replays`` the last is left out: the order of ranks, in which sums are formed, changed.
    """
    one = next(iter(trained.values()))
    windows = NUM_SAMPLES // BATCH * EPOCHS
    complete = max(trained.values(), key=lambda other: len(other.committed))
    assert [r.window for r in complete.committed] == list(range(windows))
    assert [r.committed[0] for r in complete.committed] == [*range(0, NUM_SAMPLES, BATCH)] * EPOCHS
    for other in trained.values():
        assert all(map(torch.equal, other.state, one.state))
        expected = complete.committed[windows - len(other.committed) :]
        assert [(r.window, r.loss) for r in other.committed] == [
            (r.window, r.loss) for r in expected
        ]
        assert other.values[-1] == EPOCHS - 1
    if not replays:
        return
    shares = {r.window: [record.samples for record in r.ranks] for r in complete.committed}
    order = {number: place for place, number in enumerate(team.formations[0].numbers)}
    assert all(
        sorted(f.numbers, key=lambda n: order.get(n, n)) == [*f.numbers] for f in team.formations
    )
    numbers = sorted({number for formation in team.formations for number in formation.numbers})
    for state in replay(shares, len(numbers)):
        assert all(map(torch.equal, state, one.state))


def replay(shares: dict[int, list[int]], founders: int) -> list[list[Tensor]]:
    """What a team without any change makes of the same plans."""

    def body(membership: ThreadMembership) -> list[Tensor]:
        with begin(membership, seed=1) as ddp:
            engine: Any = ddp.assembly.engine
            engine._policy = ScriptedPolicy(membership.most, lambda window, size: shares[window])
            return loop(ddp, ddp.assembly.model, lambda result: None).state

    fates = ElasticThreads(founders).run(body)
    assert not any(fate.error for fate in fates), fates
    return [fate.value for fate in fates]
