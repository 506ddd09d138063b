"""What a run would gain by a change, as ``evener plan`` predicts it. Pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from evener.errors import ConfigError
from evener.observe.estimate import added
from evener.observe.events import Event
from evener.observe.table import RunTable
from evener.planning.policies import ApplyPolicy
from evener.simulation.measured_team import team_of
from evener.simulation.prediction import predict
from evener.simulation.team_advice import useful

_MOST_RANKS: Final = 16
"""Most ranks that are simulated for a report: a larger team would take too long."""


class Change(NamedTuple):
    """A change of a run; ``None`` changes nothing."""

    policy: ApplyPolicy | None = None
    batch_size: int | None = None


Predictor = Callable[[Change], float | None]
"""Returns the fraction by which a run would be faster after a change; ``None`` if unknown.

Under another policy, that is faster for the same loss; see ``useful``.
"""


def predict_changes(table: RunTable, start: Event) -> Predictor | None:
    """Return a function that predicts changes of a run; ``None`` if the run has too few windows.

    Args:
        table: The windows of the run.
        start: Its newest ``run_started``.
    """
    if len(table.members) > _MOST_RANKS:
        return None
    try:
        team = team_of(table, start, "the run")
    except ConfigError:
        return None
    policy = team.measured.policy if team.measured else ApplyPolicy.SYNC
    is_whole = len(team.ranks) == len(table.present)
    present: list[float] = []

    def gain(change: Change) -> float | None:
        if change.policy is not None and not is_whole:
            return None  # a rank whose speed is not known would get work
        if not present:
            present.append(useful(predict(team, policy)))
        changed = replace(team, batch_size=change.batch_size or team.batch_size)
        after = change.policy or policy
        return added(useful(predict(changed, after)), present[0])

    return gain
