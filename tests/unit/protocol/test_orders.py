"""Every order in which two or three ranks can go through a few windows; and ranks that are lost."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.planning.policies import ApplyPolicy
from unit.protocol.harness import FAILPOINTS, LostError, Network, Program, Script, check_end, run
from unit.protocol.test_protocol import (
    ALIKE,
    ORDERS,
    check,
    in_order,
    programs,
    summary,
)

SYNC, CADENCE, ASYNC = ApplyPolicy.SYNC, ApplyPolicy.CADENCE, ApplyPolicy.ASYNC

#: What a rank may do in the middle of three windows.
SMALL = (
    Script(),
    Script(breaks=(1, 0)),
    Script(stops=(1, 0)),
    Script(bad=frozenset({1}), may_skip=True),
    Script(evaluates=1),
)


def every_order(program: Program) -> set[str]:
    """What a program comes to in each order; a state that was met before is not gone on from."""
    seen, found, paths = set(), set(), [()]
    while paths:
        path = paths.pop()
        network = Network(program)
        for choice in path:
            network.act(network.actions()[choice])
        while (place := network.fingerprint()) not in seen:
            seen.add(place)
            actions = network.actions()
            if not actions:
                check_end(network)
                check(network)
                found.add(repr(summary(network)))
                break
            paths += [(*path, choice) for choice in range(1, len(actions))]
            path = (*path, 0)
            network.act(actions[0])
    return found


@pytest.mark.parametrize("first", range(len(SMALL)))
def test_all_orders_of_two_ranks_and_three_windows(first):
    for second in range(first, len(SMALL)):
        program = Program(scripts=(SMALL[first], SMALL[second]), samples=6, batch_size=2)
        assert len(every_order(program)) == 1, program


def test_all_orders_of_three_ranks_and_two_windows():
    for scripts in ((0, 0, 1), (2, 0, 3)):
        program = Program(scripts=tuple(SMALL[k] for k in scripts), samples=6, batch_size=3)
        assert len(every_order(program)) == 1, program


@pytest.mark.parametrize("parked", [0, 1])
def test_all_orders_of_a_rank_that_is_parked_and_called_back(parked):
    wishes = {0: frozenset({parked}), 1: frozenset[int]()}
    for script in (Script(), Script(stops=(2, 0)), Script(breaks=(2, 0))):
        program = Program(scripts=(script,) * 2, samples=12, batch_size=2, wishes=wishes)
        assert len(every_order(program)) == 1, program


@pytest.mark.parametrize("script", [Script(), Script(stops=(2, 0)), Script(breaks=(1, 1))])
def test_all_orders_of_averages_in_the_background(script):
    scripts = (script, Script(pace=(1, 3)))
    assert every_order(Program(policy=ASYNC, scripts=scripts, samples=12, batch_size=1))


@given(order=ORDERS)
@settings(max_examples=30)
def test_a_save_in_the_middle_lands_what_is_in_flight_first(order):
    scripts = (Script(pace=(3,)), Script(pace=(2, 3)))
    check(
        run(
            Program(policy=ASYNC, scripts=scripts, samples=60, batch_size=1, saves_at=2),
            in_order(order),
        )
    )


# ── ranks that are lost ──────────────────────────────────────────────────────────────────────────

#: Programs in which every place between two effects is passed.
RICH = (
    Program(
        scripts=(Script(), Script(micro_batch=2), Script()),
        samples=28,
        epochs=2,
        shares=((1, 1, 1), (0, 1, 2)),
        wishes={0: frozenset({0}), 1: frozenset(), 2: frozenset({2})},
        turns=frozenset({5}),
    ),
    Program(scripts=(Script(stops=(1, 0)), Script(micro_batch=2))),
    Program(policy=CADENCE, scripts=(Script(), Script(pace=(1, 3))), samples=30, batch_size=1),
    Program(policy=ASYNC, scripts=(Script(), Script(pace=(1, 3))), samples=30, batch_size=1),
)


def check_lost(network: Network) -> bool:
    """Who is left is told; whether a rank was lost. S4 was checked at each commit."""
    dead = [rank for rank in network.ranks if rank.died]
    for rank in network.ranks:
        if dead and rank.failed and not rank.died and rank.me not in network.raised:
            assert isinstance(rank.task.error, LostError), repr(rank.task.error)
    return bool(dead)


@pytest.mark.parametrize("place", FAILPOINTS)
def test_a_rank_is_lost_between_two_effects(place):
    reached = 0
    for program, number in product(RICH, (1, 4)):
        for me in range(program.world_size):
            scripts = list(program.scripts)
            scripts[me] = program.scripts[me].changed(dies=(place, number))
            lossy = program.changed(scripts=tuple(scripts))
            for order in ([0], [1, 5, 2, 7]):
                reached += check_lost(run(lossy, in_order(order)))
    assert reached, f"no program passes {place}"


@given(data=st.data(), order=ORDERS)
@settings(max_examples=120)
def test_whoever_is_lost_the_others_are_told(data, order):
    program = data.draw(
        st.one_of(
            programs(troubles=ALIKE),
            programs(CADENCE, troubles=ALIKE),
            programs(ASYNC, troubles=ALIKE),
        )
    )
    me = data.draw(st.integers(0, program.world_size - 1))
    dies = (data.draw(st.sampled_from(FAILPOINTS)), data.draw(st.integers(1, 8)))
    scripts = list(program.scripts)
    scripts[me] = scripts[me].changed(dies=dies)
    check_lost(run(program.changed(scripts=tuple(scripts)), in_order(order)))
