"""Stops every rank when a loss or a gradient is not finite, with the same words everywhere."""

from collections.abc import Sequence

from evener.errors import NonFiniteGradientError
from evener.planning.local import LocalPlan, LocalReport
from evener.planning.plan import WindowPlan, WindowReport

#: Codes of what is not finite, beside k + 1 for the gradient of trainable parameter k.
LOSS, PARAMETERS = -1, -2


def find_non_finite(
    reports: Sequence[WindowReport], plan: WindowPlan, names: Sequence[str], step: int
) -> NonFiniteGradientError | None:
    """The error for the first rank that reports a non-finite number.

    Args:
        reports: Of all ranks.
        plan: The window.
        names: Trainable parameters, in flat order.
        step: The optimizer step that the window would have been.
    """
    for rank, report in enumerate(reports):
        if report.non_finite:
            name = None if report.non_finite < 0 else names[report.non_finite - 1]
            what = "the loss" if name is None else f"the gradient of parameter {name!r}"
            return _error(f"{what} is not finite on rank {rank}", rank, name, plan, step)
    return None


def find_local_non_finite(
    reports: Sequence[LocalReport], plan: LocalPlan, names: Sequence[str]
) -> NonFiniteGradientError | None:
    """The error for the first rank whose local steps came upon something that is not finite.

    Args:
        reports: Of all ranks.
        plan: The window.
        names: Trainable parameters, in flat order.
    """
    for rank, report in enumerate(reports):
        code = report.non_finite
        if code == 0:
            continue
        name = names[code - 1] if code > 0 else None
        what = {LOSS: "the loss", PARAMETERS: "a parameter"}.get(code)
        if what is None:
            what = f"the gradient of parameter {name!r}"
        return _error(f"{what} is not finite on rank {rank}", rank, name, plan, report.steps + 1)
    return None


def overflow(plan: WindowPlan | LocalPlan, step: int) -> NonFiniteGradientError:
    """The error for finite gradients whose sum over ranks is not."""
    what = "the sum of the ranks' gradients, each of them finite, overflowed"
    return _error(what, 0, None, plan, step)


def _error(
    what: str, rank: int, name: str | None, plan: WindowPlan | LocalPlan, step: int
) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"{what} in step {step} (window {plan.window}, epoch {plan.epoch}); nothing of this window "
        "was applied. Remedy: lower the learning rate, clip gradients, check the data of that "
        "window, or set non_finite='skip' to leave such windows out",
        rank=rank,
        parameter=name,
        window=plan.window,
    )
