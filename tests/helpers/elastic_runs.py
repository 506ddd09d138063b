"""Runs of an elastic team of threads, and what an undisturbed team makes of the same plans."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig, WindowResult
from evener.planning.policies import Parking
from evener.planning.shares import apportion
from helpers.elastic import STEP, ElasticThreads, Kill, ThreadMembership
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
    ddp: Ddp,
    model: nn.Module,
    at_commit: Callable[[WindowResult], None],
    *,
    batch_size: int = BATCH,
    num_workers: int = 0,
) -> Trained:
    committed: list[WindowResult] = []
    handed_out, values = [], []

    def commit(result: WindowResult) -> None:
        committed.append(result)
        at_commit(result)

    ddp.on_commit(commit)
    sizes = {"batch_size": batch_size, "micro_batch_size": min(batch_size, MICRO_BATCH)}
    loader = ddp.loader(DATA, seed=3, num_workers=num_workers, **sizes)
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
    *,
    batch_size: int = BATCH,
    **options: Any,
) -> Trained:
    """A worker of an elastic team; its weights differ from those of others before it joins."""
    with begin(membership, seed=membership.number + 1, **options) as ddp:
        return loop(
            ddp, ddp.assembly.model, lambda result: at_commit(ddp, result), batch_size=batch_size
        )


def make_model(
    seed: int,
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 1))
    return model, optimizer(model.parameters(), lr=0.05)


def begin(
    membership: ThreadMembership,
    *,
    seed: int,
    norm: Callable[[int], nn.Module] = nn.BatchNorm1d,
    freezes: Sequence[int] = (),
    policy: str = "sync",
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    prepare: Callable[[Ddp], None] | None = None,
    **options: Any,
) -> Ddp:
    with SEEDED:  # threads share torch's generator
        model, made = make_model(seed, norm, optimizer)
    for layer in freezes:
        model.get_submodule(str(layer)).requires_grad_(False)
    kills = membership.team.kills
    if any((kill.member, kill.what) == (membership.member, STEP) for kill in kills):
        made.register_step_pre_hook(lambda *_: step_or_die(membership, model))
    config = replace(config_for(policy), max_grad_norm=1.0)
    options |= {"devices": "cpu", "elastic": membership, "policy": policy, "config": config}
    ddp = Ddp.setup(model, made, **options)
    (prepare or park_nobody)(ddp)
    return ddp


def park_nobody(ddp: Ddp) -> None:
    """What is worth parking rests on measured times: here nothing does."""
    policy: Any = ddp.assembly.engine.policy
    policy.decide_parking = lambda batch_size, main: None


def config_for(policy: str) -> DdpConfig:
    """Two local steps of the slowest rank in each window, where there are local steps."""
    anchors = {} if policy == "sync" else {"anchor": 2, "max_anchor": 2}
    return DdpConfig(quiet=True, timeout_s=PATIENCE_S, **anchors)


@torch.no_grad()
def step_or_die(membership: ThreadMembership, model: nn.Module) -> None:
    """Ends this rank in the step in which it is to die: one parameter has changed by then."""
    if membership.team.kill_due(membership.member, STEP):
        next(model.parameters()).add_(1.0)
        membership.team.die(membership.member)


def run(
    founders: int,
    kills: Sequence[Kill] = (),
    *,
    joins_after: int | None = None,
    at_commit: Callable[[ThreadMembership, WindowResult], None] | None = None,
    **options: Any,
) -> tuple[ElasticThreads, dict[str, Trained]]:
    """Train; return the team, and what each member has that has come to the end.

    Args:
        founders: Members of the first generation.
        kills: Where members die.
        joins_after: Commit of this window starts another worker, and waits until it is there.
        at_commit: Called on every rank.
        options: Of every rank; see ``begin``.
    """
    team = ElasticThreads(founders, kills=kills)

    def body(membership: ThreadMembership) -> Trained:
        def commit(ddp: Ddp, result: WindowResult) -> None:
            if joins_after == result.window and ddp.is_main_process:
                team.add("j", body)
            if at_commit is not None:
                at_commit(membership, result)

        return train(membership, commit, **options)

    return team, team.run_to_end(body)


def check(
    team: ElasticThreads, trained: dict[str, Trained], *, replays: bool = True, **options: Any
) -> None:
    """Every sample once an epoch, all members alike, and as an undisturbed team by these plans.

    Without ``replays`` the last is left out: the order of ranks, in which sums are formed, changed.
    ``options`` are those of ``run``.
    """
    one = next(iter(trained.values()))
    batch_size = options.pop("batch_size", BATCH)
    windows = NUM_SAMPLES // batch_size * EPOCHS
    complete = max(trained.values(), key=lambda other: len(other.committed))
    assert [r.window for r in complete.committed] == list(range(windows))
    assert [r.committed[0] for r in complete.committed] == [
        *range(0, NUM_SAMPLES, batch_size)
    ] * EPOCHS
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
    for state in replay(shares, len(numbers), batch_size, **options):
        assert all(map(torch.equal, state, one.state))


def replay(
    shares: dict[int, list[int]], founders: int, batch_size: int = BATCH, **options: Any
) -> list[list[Tensor]]:
    """What a team without any change makes of the same plans."""

    def body(membership: ThreadMembership) -> list[Tensor]:
        with begin(membership, seed=1, **options) as ddp:
            engine: Any = ddp.assembly.engine
            engine.lookahead.stale_policy = ScriptedPolicy(
                membership.most, lambda window, size: shares[window]
            )
            return loop(ddp, ddp.assembly.model, lambda result: None, batch_size=batch_size).state

    team = ElasticThreads(founders, most=len(shares[0]))
    return [*team.run_to_end(body).values()]


@cache
def alone(norm: Callable[[int], nn.Module]) -> list[Tensor]:
    """The state in which one process ends; ``norm`` treats each sample by itself."""
    _, trained = run(1, norm=norm)
    return trained["w0"].state


class Parks(ScriptedPolicy):
    """Equal shares of those who are present; some ranks are parked after the first window."""

    def __init__(self, ddp: Ddp, misfits: Iterable[int], apart: int) -> None:
        super().__init__(ddp.world_size, self._deal)
        self._ddp, self._misfits, self._apart = ddp, tuple(misfits), apart
        self._absent, self._parked = ddp.assembly.engine.team.absent, frozenset[int]()

    def _deal(self, window: int, size: int) -> tuple[int, ...]:
        away = self._absent | self._parked
        return tuple(apportion(size, [float(r not in away) for r in range(self.world_size)]))

    def set_absent(self, ranks: frozenset[int]) -> None:
        self._absent = ranks

    def set_parked(self, ranks: frozenset[int]) -> None:
        self._parked = ranks

    def decide_parking(self, batch_size: int, main: int) -> Parking | None:
        return Parking(dict.fromkeys(self._misfits, 1.0)) if self._ddp.window == 0 else None

    def windows_apart(self, batch_size: int, change_s: float) -> int:
        return self._apart
