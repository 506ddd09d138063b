"""The errors for numbers that are not finite, in the same words on every rank."""

from collections.abc import Sequence

from evener.engine.loss_scale import SMALLEST_SCALE
from evener.errors import NonFiniteGradientError
from evener.planning.plans import LocalPlan, WindowPlan
from evener.planning.report import LOSS, PARAMETERS


def non_finite_on(
    rank: int,
    code: int,
    plan: WindowPlan | LocalPlan,
    names: Sequence[str],
    step: int,
    *,
    loss_scale: float,
) -> NonFiniteGradientError:
    """Return the error for a rank that reports a non-finite number.

    Args:
        rank: The rank.
        code: What it reports; see ``Report.non_finite``.
        plan: The window that is not applied.
        names: Trainable parameters, in flat order.
        step: The optimizer step that it would have been.
        loss_scale: That of fp16 on the rank; 0 where it computes in another precision.
    """
    name = names[code - 1] if code > 0 else None
    what = {LOSS: "the loss", PARAMETERS: "a parameter"}.get(code)
    if what is None:
        what = f"the gradient of parameter {name!r}"
    error = _error(f"{what} is not finite on rank {rank}", rank, name, plan, step)
    if 0 < loss_scale <= SMALLEST_SCALE:
        error.add_note(
            f"evener: the loss scale of fp16 is down to {loss_scale:g}, so it is not a passing "
            f"overflow: use precision='bf16' or 'fp32' on rank {rank} if the others are fine"
        )
    return error


def overflow(
    plan: WindowPlan | LocalPlan, step: int, *, are_finite: bool = True
) -> NonFiniteGradientError:
    """Return the error for a sum over ranks that is not finite.

    Args:
        plan: The window that is not applied.
        step: The optimizer step that it would have been.
        are_finite: Whether what was summed is known to be finite on each rank.
    """
    summed = "gradients" if isinstance(plan, WindowPlan) else "changes to parameters"
    how = ", each of them finite, overflowed" if are_finite else " is not finite"
    return _error(f"the sum of the ranks' {summed}{how}", 0, None, plan, step)


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
