"""Which optimizers can update parts of parameters alone, and what they keep for each element."""

from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn, final

from torch import optim
from torch.optim import Optimizer

from evener.errors import UsageError

#: By optimizer that updates each element from this element's gradient and state alone: what it
#: keeps for each element. All else that it keeps for a parameter is one number.
ELEMENTWISE: Final[Mapping[type[Optimizer], frozenset[str]]] = MappingProxyType(
    {
        optim.ASGD: frozenset({"ax"}),
        optim.Adadelta: frozenset({"square_avg", "acc_delta"}),
        optim.Adagrad: frozenset({"sum"}),
        optim.Adam: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        optim.AdamW: frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        optim.Adamax: frozenset({"exp_avg", "exp_inf"}),
        optim.NAdam: frozenset({"exp_avg", "exp_avg_sq"}),
        optim.RAdam: frozenset({"exp_avg", "exp_avg_sq"}),
        optim.RMSprop: frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
        optim.Rprop: frozenset({"prev", "step_size"}),
        optim.SGD: frozenset({"momentum_buffer"}),
    }
)

#: Backends over which ``sharded_update="auto"`` divides the update.
FAST_BACKENDS: Final = frozenset({"shared", "nccl"})
LEAST_DIVIDED: Final = 2**19
"""From how many trainable elements on it does so. To divide the update of fewer takes more of a CPU
than it saves, and ranks meet twice more in each window; state of so few takes little memory."""

DIVIDED: Final = (
    "the state of this optimizer is divided among {} ranks (sharded_update), and each holds its "
    "part of it: call optimizer.state_dict() on all ranks, save with ddp.save, or use "
    "DdpConfig(sharded_update='off')"
)
LOST: Final = (
    "the state of this optimizer was divided among ranks (sharded_update), and the team ended "
    "before all ranks came to ddp.close(), so the other parts are lost: make a new optimizer and "
    "resume from a checkpoint, or give it a state with optimizer.load_state_dict"
)


def why_replicated(optimizers: Sequence[Optimizer]) -> str:
    """Return why the update of these optimizers cannot be divided; empty where it can."""
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        if kind not in ELEMENTWISE:
            known = ", ".join(sorted(one.__name__ for one in ELEMENTWISE))
            return (
                f"optimizer {number} is {kind.__module__}.{kind.__qualname__}, and a part of a "
                f"parameter can be updated alone by torch.optim's {known} only, not by their "
                "subclasses or others"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            return f"optimizer {number} ({kind.__name__}) is differentiable"
    return ""


@final
class DividedState(MutableMapping[Any, Any]):
    """Stands for an optimizer's state while that is divided: reading it says what to do instead.

    Args:
        reason: The message.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(self._reason)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse
