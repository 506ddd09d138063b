"""What people do out of habit in a training loop, and what becomes of it inside a window.

A window's gradients are unfinished sums until every rank has added its part. Whatever a plain loop
does to them in between is ignored where that is what the user means, and refused with the remedy
where it would act on something else than the user thinks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from evener.comm.flat import FlatBuffers
from evener.engine.share import Share
from evener.engine.waste import WINDOWS, no_weight
from evener.errors import UsageError

_ZERO_GRAD = (
    "zero_grad() inside a window is ignored: ddp.step() drops gradients when a window has been "
    "applied; you can remove the call"
)


class Habits:
    """Watches one rank's optimizers and gradients.

    Args:
        flat: Knows the gradients.
        optimizers: Those of ``Ddp.setup``.
        notice: Tells the user something, on rank 0.
        warn: Tells the user something about this rank.
        rank: This rank.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        notice: Callable[[str], None],
        *,
        warn: Callable[[str], None],
        rank: int,
    ) -> None:
        self._flat = flat
        self._notice = notice
        self._warn = warn
        self._rank = rank
        #: Windows without weight so far; ``None`` once something of this rank has counted.
        self._weightless: int | None = 0
        self._stepping = False
        self._told: set[str] = set()
        self._share: Share | None = None
        self._stamps: Sequence[int] = ()
        self._first_backward = True
        self._optimizers = optimizers
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            # On the instance, as torch's schedulers wrap ``step``; not part of what is pickled.
            optimizer.zero_grad = self._zero_grad(optimizer)  # type: ignore[method-assign]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Lets optimizers step for the length of the block."""
        before, self._stepping = self._stepping, True
        try:
            yield
        finally:
            self._stepping = before

    def before_backward(self, share: Share, loss: Tensor, weight: float | None) -> None:
        """Looks at the gradients and at the loss before they are added to.

        Raises:
            UsageError: The gradients were written by something else than ``ddp.backward``.
        """
        if self._look(share):
            self._flat.attach_grads()
            self._tell("zero_grad", _ZERO_GRAD)
        if self._first_backward:
            self._first_backward = False
            self._look_at_loss(share, loss, weight)

    def after_backward(self, share: Share) -> None:
        """Remembers the gradients as they are now."""
        self._flat.attach_grads()
        self._share, self._stamps = share, self._flat.stamps()

    def after_update(self, share: Share) -> None:
        """Remembers that gradients have been dropped, those of one optimizer perhaps."""
        self._share, self._stamps = share, self._flat.stamps()
        if self._weightless is not None:
            self._weightless += 1
            if self._weightless == WINDOWS:
                self._warn(no_weight(self._rank))

    def before_step(self, share: Share) -> None:
        """Looks at the gradients before they are averaged.

        Raises:
            UsageError: They were written by something else than ``ddp.backward``.
        """
        if share.weight:
            self._weightless = None
        self._look(share)

    def close(self) -> None:
        """Gives the optimizers back as they were; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()
        for optimizer in self._optimizers:
            vars(optimizer).pop("zero_grad", None)

    def tell_once(self, text: str) -> None:
        """Tells the user something, the first time that it is said."""
        self._tell(text, text)

    def _look(self, share: Share) -> bool:
        """Whether gradients were dropped; raises where they were written."""
        index, dropped = self._flat.find_write(self._stamps if share is self._share else ())
        if index is None:
            return dropped
        raise UsageError(
            f"the gradient of {self._flat.names[index]!r} was written outside of ddp.backward, "
            "inside a window: by loss.backward(), clip_grad_norm_, clip_grad_value_, "
            "GradScaler.unscale_ or the like. It is an unfinished sum there, and another one on "
            "every rank. Remedy: call ddp.backward(loss) for every loss; clip with "
            "DdpConfig(max_grad_norm=...), or do it in optimizer.register_step_pre_hook(fn), which "
            "runs on averaged gradients; for fp16 use precision= instead of a GradScaler"
        )

    def _look_at_loss(self, share: Share, loss: Tensor, weight: float | None) -> None:
        node = loss.grad_fn
        if node is None or node.name() != "DivBackward0" or node.next_functions[1][0] is not None:
            return
        divisor: Any = getattr(node, "_saved_other", None)
        number = float(divisor) if isinstance(divisor, Tensor) and divisor.numel() == 1 else 1.0
        units = share.open_samples if weight is None else weight
        if number > 1 and number == math.floor(number) and number != units:
            self._tell(
                "division",
                f"the loss is divided by {number:g} before ddp.backward. If that is for gradient "
                "accumulation, remove it: a window's gradient is the mean over all its units "
                "already, and would come out too small; otherwise nothing is wrong",
            )

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called in the loop, where gradients are "
                "not averaged yet; remove it: ddp.step() steps the optimizers when a window has "
                "been averaged. With a GradScaler: remove that too, and use precision="
            )

    def _zero_grad(self, optimizer: Optimizer) -> Callable[..., None]:
        def zero_grad(set_to_none: bool = True) -> None:
            if any(stamp >= 0 for stamp in self._flat.stamps()):
                if any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                    self._tell("zero_grad", _ZERO_GRAD)
            else:
                type(optimizer).zero_grad(optimizer, set_to_none)

        return zero_grad

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._notice(text)
