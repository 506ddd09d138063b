"""What a row promises: an exact journey as numbers."""

import itertools
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any, get_type_hints

import pytest

from evener.planning.guard import Verdict
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.report import Report
from evener.protocol.row import Purpose, Row, decode, encode


def filled(kind: Any, numbers: Iterator[int]) -> Any:
    """Another value in every field, so that none can take the place of its neighbour."""
    values: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        number = next(numbers)
        if hint is Report:
            values[name] = filled(Report, numbers)
        elif isinstance(hint, type) and issubclass(hint, Enum):
            values[name] = [*hint][-1]
        elif hint is float:
            values[name] = number + 0.1
        elif hint is int:
            values[name] = 2**53 - number
        elif hint is bool:
            values[name] = True
    return kind(**values)


PLANS = [
    None,
    WindowPlan(7, 1, 10**12, 12, (3, 0, 9), (0, 1, 0)),
    *(
        LocalPlan(
            window=3,
            epoch=1,
            window_s=window_s,
            blocking=blocking,
            steps=(4, 2, 1),
            most=(6, 4, 2),
            queues=(12, 8, 4),
            least=3,
            anchor=2,
            verdict=Verdict.NUDGE_DOWN,
        )
        for window_s, blocking in ((1.5, True), (math.inf, False))
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: type(plan).__name__)
def test_a_row_survives_the_journey(plan: Any) -> None:
    row = filled(Row, itertools.count(1))._replace(plan=plan)
    sent = encode(row, 3)
    assert all(type(number) is float for number in sent)
    assert len(sent) == len(encode(Row(purpose=Purpose.REST, window=0), 3)), "one length in a team"
    received = decode(sent)
    assert received == row
    assert list(map(type, received)) == list(map(type, row))
    assert list(map(type, received.report)) == list(map(type, row.report))
    if plan is not None:
        assert [type(value) for value in vars_of(received.plan)] == [*map(type, vars_of(plan))]


def vars_of(plan: Any) -> list[Any]:
    return [getattr(plan, name) for name in get_type_hints(type(plan)) if hasattr(plan, name)]


def test_what_is_not_finite_travels_where_it_is_the_users() -> None:
    report = Report(loss_sum=math.nan, weight=math.inf, non_finite=-1, divergence=math.inf)
    received = decode(encode(Row(purpose=Purpose.WINDOW, window=0, report=report), 2)).report
    assert math.isnan(received.loss_sum)
    assert received._replace(loss_sum=0.0) == report._replace(loss_sum=0.0)
