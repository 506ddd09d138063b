"""What the protocol promises, whatever 2 to 5 ranks do and in whatever order they learn of it.

Each property has a letter and a number. Many are checked where they must hold, in ``harness``:

* S1: all ranks that judge a round are told the same. S2: the k-th operation of a channel is the
  same on all ranks. S3: nothing is applied before the rows of all.
* S4: a window is committed when all have applied it, in order, once. S6: ranks at the same window
  have the same model. S8: what is applied is what was planned. S11: one exchange is in flight.
* L1: no rank waits for one that does not come. L3, L4: epochs end, and all ranks are then out.

What a run has come to is checked here: S5 (each sample once), S10 (one error for all), L2 (unlike
programs are told on all ranks).
"""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import CollectiveMismatchError
from evener.planning.policies import ApplyPolicy
from evener.protocol.machine import Phase
from unit.protocol.harness import Network, Program, Script, run

SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC

#: Which of the actions that are possible comes next; taken in turn.
ORDERS = st.lists(st.integers(0, 11), min_size=1, max_size=24)
PLACES = st.tuples(st.integers(0, 4), st.integers(0, 2))
ALIKE = ("stops", "stops_after", "breaks", "asks", "bad", "skips")
UNLIKE = ("leaves", "evaluates", "parts", "freezes")
TROUBLES = (*ALIKE, *UNLIKE)


def in_order(order: list[int]) -> Callable[[int], int]:
    """A scheduler that goes through a list again and again."""
    turn = iter(range(10**9))
    return lambda count: order[next(turn) % len(order)] % count


@st.composite
def programs(draw, policy: ApplyPolicy = SYNC, *, stream: bool = False, troubles=TROUBLES):
    """Ranks that do unlike things, in a program that has trouble in at most three places."""
    world_size = draw(st.integers(2, 5))
    scripts: list[dict[str, Any]] = [
        {
            "micro_batch": draw(st.integers(1, 3)),
            "batches": draw(st.integers(0, 4)),
            "pace": tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))),
        }
        for _ in range(world_size)
    ]
    whole: dict[str, Any] = {}
    for kind in draw(st.lists(st.sampled_from(troubles), max_size=3)):
        rank, place = draw(st.integers(0, world_size - 1)), draw(PLACES)
        mine = scripts[rank]
        if kind == "breaks":
            for script in scripts:
                script["breaks"] = place
        elif kind == "leaves":
            mine["breaks"] = place
        elif kind == "asks":
            whole["asks_at"] = whole.get("asks_at", frozenset()) | {place[0]}
        elif kind in ("evaluates", "freezes"):
            mine[kind] = place[0]
        elif kind == "stops_after":
            mine[kind] = draw(st.integers(0, 12))
        elif kind == "bad":
            mine[kind] = mine.get(kind, frozenset()) | {place[0]}
        elif kind == "skips":
            mine |= {"bad": frozenset({place[0]}), "may_skip": True}
        elif kind == "parts":
            mine["parts"] = draw(st.sampled_from([(0,), (1, 0), (0, 1, 2)]))
        else:
            mine[kind] = place
    if policy is SYNC and not stream:
        whole["turns"] = draw(st.frozensets(st.integers(0, 4), max_size=2))
        whole["rates_at"] = draw(st.frozensets(st.integers(0, 4), max_size=1))
        wish = st.frozensets(st.integers(0, world_size - 1), max_size=2)
        whole["parks_again"] = draw(st.booleans())
        whole["wishes"] = draw(st.dictionaries(st.integers(0, 5), wish, max_size=3))
        weights = st.tuples(*[st.integers(0, 2)] * world_size)
        whole["shares"] = tuple(draw(st.lists(weights, min_size=1, max_size=3)))
    return Program(
        policy=policy,
        stream=stream,
        scripts=tuple(Script(**script) for script in scripts),
        samples=draw(st.integers(1, 24)),
        batch_size=draw(st.integers(3, 6)) if policy is SYNC else 1,
        epochs=draw(st.integers(1, 2)),
        **whole,
    )


def check(network: Network) -> None:
    """What a run without a lost rank has come to."""
    program, ranks = network.program, network.ranks
    raised = network.raised
    if raised:
        assert len(set(raised.values())) == 1, f"S10: {raised}"
        for rank in ranks:
            if rank.me not in raised:
                assert rank.me in network.lost, f"S10: rank {rank.me} was told nothing"
                assert rank.was_parked, f"L1: rank {rank.me} was left"
    else:
        assert not network.lost
        for rank in ranks:
            assert not rank.failed, f"{rank.me}: {rank.task.error!r}"
            assert rank.state.phase is Phase.OUT
            assert rank.state.stopping or not any(other.said_stop for other in ranks), "L3"
            assert rank.done == ranks[0].done
            assert rank.model == ranks[0].model
            assert rank.rate == ranks[0].rate or program.rates_at
            assert rank.cursor.state_dict() == ranks[0].cursor.state_dict()
    alone = {rank.me for rank in ranks if "evaluates" in rank.asked}
    if 0 < len(alone) < len(ranks) and not any(rank.was_parked for rank in ranks):
        assert raised, f"L2: rank {alone} evaluates, and nobody is told"
    if raised or program.stream:
        return
    early = any(rank.state.stopping or rank.left for rank in ranks)
    committed = sorted({piece for rank in ranks for piece in rank.committed})
    for epoch in range(program.epochs):
        at = 0
        for _, start, size in (piece for piece in committed if piece[0] == epoch):
            assert start >= at if early else start == at, "S5"
            at = start + size
        assert early or at == program.samples, "S5: an epoch is not covered"


def summary(network: Network) -> list[object]:
    """What must not depend on the order in which ranks learn."""
    told = []
    for rank in network.ranks:
        told += [type(rank.task.error), rank.model, rank.done]
        if not isinstance(rank.task.error, CollectiveMismatchError):
            # Ranks that are at odds may be told so before or after the commit.
            told += [tuple(rank.commits), tuple(rank.committed)]
    return told


@given(program=programs(), order=ORDERS)
@settings(max_examples=120)
def test_sync(program, order):
    check(run(program, in_order(order)))


@given(program=programs(stream=True), order=ORDERS)
@settings(max_examples=80)
def test_streams(program, order):
    check(run(program, in_order(order)))


@given(program=programs(CADENCE), order=ORDERS)
@settings(max_examples=80)
def test_cadence(program, order):
    check(run(program, in_order(order)))


@given(program=programs(ASYNC, troubles=[t for t in TROUBLES if t != "evaluates"]), order=ORDERS)
@settings(max_examples=100)
def test_async(program, order):
    check(run(program, in_order(order)))
