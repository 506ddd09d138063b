"""Runs of an elastic team of threads, and what each of them must come to.

In SYNC a team ends where one process ends, but for rounding: in float64, and with layers that treat
each sample by itself. Local steps are those of ``OneStep``, whose sum is known.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evener import Ddp, DdpConfig, WindowResult
from helpers.clocks import RankClocks
from helpers.elastic import ElasticThreads, Kill, ThreadMembership
from helpers.limits import PATIENCE_S
from helpers.loops import STEP_SIZE, OneStep
from helpers.models import seeded
from helpers.sinks import Kept
from helpers.teams import Parks

EPOCHS = 2
X = torch.randn(48, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
DATA = [(x, x.sum().reshape(1)) for x in X]
#: A step of each number in the team takes so long, where time is given.
STEP_S = (0.01, 0.02, 0.01, 0.02, 0.01, 0.01)

AtCommit = Callable[[Ddp, ThreadMembership, WindowResult], object]


def begin(
    membership: ThreadMembership,
    *,
    policy: str = "sync",
    model: nn.Module | None = None,
    prepare: Callable[[Ddp], None] | None = None,
    **options: Any,
) -> Ddp:
    """A worker of the team; its weights differ from those of others before it joins."""
    seed = membership.number + 1
    if model is None:
        model = seeded(make_model, seed, torch.float64) if policy == "sync" else OneStep()
    momentum = 0.9 if policy == "sync" else 0.0  # what a change of the team drops leaves no trace
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=STEP_SIZE, momentum=momentum)
    anchors = {} if policy == "sync" else {"anchor": 2, "max_anchor": 2}
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S, **anchors)
    options |= {"devices": "cpu", "elastic": membership, "policy": policy, "config": config}
    ddp = Ddp.setup(model, optimizer, **options)
    (prepare or park_nobody)(ddp)
    return ddp


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))


def park_nobody(ddp: Ddp) -> None:
    """What is worth parking rests on measured times: here nothing does."""
    policy: Any = ddp.assembly.engine.policy
    policy.decide_parking = lambda batch_size, main: None


def loss_of(ddp: Ddp, x: Tensor, y: Tensor) -> Tensor:
    model = ddp.assembly.model
    loss: Tensor = model(x) if isinstance(model, OneStep) else (model(x) - y).square().mean()
    return loss


def train_epochs(ddp: Ddp, loader: Any, epochs: int = EPOCHS) -> None:
    for epoch in ddp.epochs(epochs):
        for x, y in loader.epoch(epoch):
            ddp.backward(loss_of(ddp, x, y))
            ddp.step()


@dataclass
class Trained:
    """What a rank has at its end, and the number of samples that it was given."""

    state: list[Tensor]
    handed_out: int


class Run:
    """A run over all epochs, which is checked.

    Attributes:
        team: The team.
        windows: What was committed, by window.
        trained: What each rank has that has come to the end.
        committed: The windows that each rank has committed.
        events: Those of the main process.
        told: What was said at the terminal.
    """

    def __init__(
        self,
        founders: int,
        kills: Iterable[Kill] = (),
        *,
        policy: str = "sync",
        batch_size: int = 0,
        clocks: RankClocks | None = None,
        joins_after: int | None = None,
        at_commit: AtCommit = lambda *_: None,
        parks: tuple[Sequence[int], int] | None = None,
    ) -> None:
        """Train.

        Args:
            founders: Members of the first generation.
            kills: Where members die.
            policy: Of all ranks.
            batch_size: Samples of a window in SYNC, of a local step else; 0 for 12 and 2.
            clocks: Where steps take the time of ``STEP_S``, and averages land a step later.
            joins_after: Commit of this window starts another worker, and waits until it is there.
            at_commit: Called on every rank.
            parks: Ranks that are parked after the first window, and for how many windows.
        """
        self.team = ElasticThreads(founders, kills=[*kills])
        self.windows: dict[int, WindowResult] = {}
        self.committed: dict[str, list[int]] = {}
        self.told: list[str] = []
        self.policy, self.batch_size = policy, batch_size or (12 if policy == "sync" else 2)
        self._clocks, self._joins_after, self._at_commit = clocks, joins_after, at_commit
        self._parks, kept = parks, Kept()
        self._sinks = [lambda: kept]
        self.trained: dict[str, Trained] = self.team.run_to_end(self._work)
        self.events = kept.events
        self._check()

    def _work(self, membership: ThreadMembership) -> Trained:
        def commit(result: WindowResult) -> None:
            known = self.windows.setdefault(result.window, result)
            assert (known.loss, known.ranges) == (result.loss, result.ranges)
            self.committed.setdefault(membership.member, []).append(result.window)
            if self._joins_after == result.window and ddp.is_main_process:
                self.team.add("j")
            self._at_commit(ddp, membership, result)

        if self._clocks is not None:
            self._clocks.start()
        handed_out = 0
        with begin(membership, policy=self.policy, sinks=self._sinks, prepare=self._prepare) as ddp:
            ddp.on_commit(commit)
            loader = ddp.loader(DATA, batch_size=self.batch_size, seed=3, micro_batch_size=2)
            for epoch in ddp.epochs(EPOCHS):
                for x, y in loader.epoch(epoch):
                    handed_out += len(x)
                    if self._clocks is not None:
                        self._clocks.spend(STEP_S[membership.number])
                    ddp.backward(loss_of(ddp, x, y))
                    ddp.step()
                assert ddp.weighted_mean(float(epoch)) == epoch
            return Trained(state_of(ddp), handed_out)

    def _prepare(self, ddp: Ddp) -> None:
        engine: Any = ddp.assembly.engine
        engine.options.guards.notice = self.told.append
        if self._parks is None:
            park_nobody(ddp)
        else:
            engine.lookahead.stale_policy = Parks(ddp, *self._parks)

    def _check(self) -> None:
        """Every sample once an epoch, every window once, and all ranks alike at its end."""
        windows = [self.windows[number] for number in range(len(self.windows))]
        once = {(e, p): 1 for e in range(EPOCHS) for p in range(len(DATA))}
        assert once == Counter(
            (result.epoch, position)
            for result in windows
            for start, stop in result.ranges or (result.committed,)
            for position in range(start, stop)
        )
        one = next(iter(self.trained.values()))
        for name, other in self.trained.items():
            assert all(map(torch.equal, other.state, one.state))
            assert self.committed[name] == sorted({*self.committed[name]}), "none twice"
            if self.team.numbers[name] not in windows[-1].parked:
                assert self.committed[name][-1] == windows[-1].window
        if self.policy == "sync":
            for found, expected in zip(one.state, train_alone(self.batch_size), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        else:
            model = OneStep()
            names = model.state_dict()
            model.load_state_dict(dict(zip(names, one.state, strict=True)))
            model.check(windows)

    @property
    def members(self) -> list[tuple[str, ...]]:
        return [formation.members for formation in self.team.formations]

    @property
    def changes(self) -> list[tuple[str, int | None]]:
        """Events of changes of the team, with the ranks that they name."""
        kinds = ("worker_lost", "worker_left", "reformed", "recovered", "worker_joined")
        return [(e["type"], e.get("rank")) for e in self.events if e["type"] in kinds]

    def samples(self, rank: int) -> list[int]:
        """What a rank has done in each window."""
        return [self.windows[window].ranks[rank].samples for window in range(len(self.windows))]


def state_of(ddp: Ddp) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in ddp.assembly.model.state_dict().values()]


def train_alone(batch_size: int) -> list[Tensor]:
    """The state in which a team of one rank ends."""

    def body(membership: ThreadMembership) -> list[Tensor]:
        with begin(membership) as ddp:
            train_epochs(ddp, ddp.loader(DATA, batch_size=batch_size, seed=3))
            return state_of(ddp)

    states: list[list[Tensor]] = [*ElasticThreads(1).run_to_end(body).values()]
    return states[0]
