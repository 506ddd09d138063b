"""The properties notice a wrong line in the table: each change here breaks at least one of them."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evener.planning.policies import ApplyPolicy
from evener.protocol import machine
from unit.protocol import harness
from unit.protocol.harness import Program, Script, run
from unit.protocol.test_protocol import (
    ALIKE,
    ORDERS,
    TROUBLES,
    check,
    in_order,
    programs,
)

#: Function of the table, what it says, and what a mutant says instead.
MACHINE = (
    ("_commit", "(Action.COMMIT,) * state.applied", "()"),
    ("judge", "purpose in (Purpose.REST, Purpose.IDLE)", "purpose is Purpose.IDLE"),
    ("judge", "state.stopping or stops", "state.stopping"),
    ("_common_purpose", "len(busy) > 1", "len(busy) > 9"),
    ("_judge_window", "actions=(*actions, Action.TURN)", "actions=actions"),
    ("judge", "_judge_window(state._replace(applied=False)", "_judge_window(state"),
    ("_judge_window", "if working[rank].part != part", "if False"),
    ("_judge_window", "bool(bad) or weight == 0.0", "weight == 0.0"),
    ("_settle", "state = state._replace(applied=False)", "state = state"),
    ("_settle", "any(row.busy for row in rows.values())", "False"),
    ("_judge_window", "state.release(), actions", "state, actions"),
    ("land", "applied=steps > 0", "applied=False"),
    ("land", "flight=None", "flight=state.flight"),
)


def changed(module: ModuleType, name: str, old: str, new: str) -> dict[str, Any]:
    """A copy of a module's functions, in one of which a text was replaced."""
    names = dict(vars(module))
    for own, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ != module.__name__:
            continue
        source = inspect.getsource(function)
        if own == name:
            assert old in source, f"{name} does not say {old!r} any more"
            source = source.replace(old, new)
        exec(source, names)
    return names


def fixed() -> list[Program]:
    """Programs that come to places which drawn ones seldom come to."""
    parked = {"samples": 20, "batch_size": 2, "wishes": {0: frozenset({1}), 3: frozenset[int]()}}
    waves = {"policy": ApplyPolicy.ASYNC, "batch_size": 1, "samples": 60}
    return [
        Program(scripts=(Script(), Script()), samples=20, turns=frozenset({2})),
        Program(scripts=(Script(), Script()), **parked),
        Program(scripts=(Script(stops=(2, 0)), Script()), **parked),
        Program(scripts=(Script(breaks=(2, 0)), Script()), epochs=2, **parked),
        Program(scripts=(Script(stops=(1, 0)), Script(micro_batch=2)), samples=20),
        Program(scripts=(Script(breaks=(1, 0)), Script()), samples=20),
        Program(scripts=(Script(breaks=(1, 0)), Script()), samples=20, batch_size=2),
        Program(scripts=(Script(parts=(0,)), Script()), samples=20, turns=frozenset({1})),
        Program(scripts=(Script(bad=frozenset({1}), may_skip=True), Script()), samples=20),
        Program(scripts=(Script(evaluates=1), Script()), samples=20),
        Program(scripts=(Script(pace=(3,)), Script(pace=(2, 3))), saves_at=2, **waves),
    ]


def properties() -> None:
    """All of them, on few programs; raises where one does not hold."""
    for program in fixed():
        for order in ([0], [1, 5, 2, 7], [3, 1, 2]):
            check(run(program, in_order(order)))
    quick = settings(
        max_examples=40,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    asynchronous = [kind for kind in TROUBLES if kind != "evaluates"]
    drawn = (
        programs(),
        programs(troubles=ALIKE),
        programs(ApplyPolicy.CADENCE),
        programs(ApplyPolicy.ASYNC, troubles=asynchronous),
    )

    @quick
    @given(program=st.one_of(*drawn), order=ORDERS)
    def hold(program: Program, order: list[int]) -> None:
        check(run(program, in_order(order)))

    hold()


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets ranks go by other rules for the length of a test."""

    def put(module: ModuleType, name: str, old: str, new: str) -> None:
        names = changed(module, name, old, new)
        for rule in vars(harness.RULES):
            if rule in names:
                monkeypatch.setattr(harness.RULES, rule, names[rule])

    return put


def test_the_rules_as_they_are_pass():
    properties()


@pytest.mark.parametrize(("name", "old", "new"), MACHINE)
def test_a_wrong_line_of_the_table_is_noticed(mutate, name, old, new):
    mutate(machine, name, old, new)
    with pytest.raises(Exception):  # noqa: B017, PT011  # whatever goes wrong first
        properties()
