"""What optimizers keep for parameters, and how it is cut into parts and put together again."""

from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from evener.comm.base import Communicator
from evener.comm.flat_groups import FlatGroup, view_like
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
    "the state of this {} is divided among {} ranks (sharded_update), and each holds its part of "
    "it: call optimizer.state_dict() on all ranks, save with ddp.save, or use "
    "DdpConfig(sharded_update='off')"
)
LOST: Final = (
    "the state of this {} was divided among ranks (sharded_update), and the team ended before all "
    "ranks came to ddp.close(), so the other parts are lost: make a new optimizer and resume "
    "from a checkpoint, or give it a state with optimizer.load_state_dict"
)

#: What an optimizer keeps for each parameter.
States = dict[Any, dict[str, Any]]


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


class Portion(NamedTuple):
    """Where a parameter lies, and which piece of it is this rank's.

    Attributes:
        number: Its flat number.
        group: Its flat group.
        offset: Its first element there.
        start: First element of the piece, counted from ``offset``.
        stop: Last-plus-one element of the piece.
        piece: ``(stop - start,)``; ``None`` where another rank owns all of it.
        grad: ``(stop - start,)``; the gradient of the piece.
        order: In the parameter's shape; lies in memory as the group holds the parameter, which may
            have been given another memory format since.
    """

    number: int
    group: FlatGroup
    offset: int
    start: int
    stop: int
    piece: Parameter | None
    grad: Tensor
    order: Tensor


@final
class DividedState(MutableMapping[Any, Any]):
    """Stands for an optimizer's state while that is divided: reading it says what to do instead.

    Args:
        reason: The message.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self) -> NoReturn:
        raise UsageError(self._reason)

    def __getitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse()

    def __delitem__(self, key: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()


def part_of(value: Tensor, place: Portion) -> Tensor:
    """Return this rank's part of what is kept for each element of a parameter.

    Args:
        value: In the shape of the parameter.
        place: The parameter's.
    """
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    view_like(flat, 0, place.order).copy_(value)
    return flat[place.start : place.stop].clone()


@torch.no_grad()
def gather(
    comm: Communicator,
    optimizer: Optimizer,
    own: States,
    places: Mapping[Tensor, Portion],
    *,
    keeps: bool,
) -> States:
    """Gather one optimizer's state from the parts of all ranks, which call it together.

    Args:
        comm: The ranks.
        optimizer: The optimizer.
        own: By piece, what this rank holds.
        places: By parameter.
        keeps: Whether this rank wants the result; otherwise it is empty here.

    Returns:
        By parameter, what the optimizer would hold alone: new tensors, as the parameter lies.
    """
    by_element = ELEMENTWISE[type(optimizer)]
    parameters = {place.number: parameter for parameter, place in places.items()}
    told = [
        (place.number, {name: _describe(v, name in by_element) for name, v in state.items()})
        for place in places.values()
        if place.piece is not None and (state := own.get(place.piece))
    ]
    index: dict[int, dict[str, Any]] = {}
    for note in comm.all_gather_json(told, what="index of optimizer state"):
        for number, entries in note:
            index.setdefault(number, entries)  # all ranks with a piece of it say the same
    whole: States = {}
    for number in index if keeps else ():
        device = parameters[number].device
        entries = index[number].items()
        whole[parameters[number]] = {name: _read(entry, device) for name, entry in entries}
    of_group: dict[tuple[FlatGroup, str, str], list[tuple[Tensor, Portion]]] = {}
    for number in sorted(index):
        place = places[parameters[number]]
        for name, entry in index[number].items():
            if isinstance(entry, dict) and "element" in entry:
                members = of_group.setdefault((place.group, name, entry["element"]), [])
                members.append((parameters[number], place))
    for (group, name, dtype), members in of_group.items():
        kind = {"dtype": getattr(torch, dtype), "device": group.data.device}
        buffer = torch.zeros(group.data.shape, **kind)
        for _, place in members:
            value = own[place.piece].get(name) if place.piece in own else None
            if value is not None:
                buffer[place.offset + place.start : place.offset + place.stop].copy_(value)
        comm.all_gather_parts(buffer, what=f"optimizer state {name}")
        for parameter, place in members if keeps else ():
            value = torch.empty_like(parameter, dtype=buffer.dtype, requires_grad=False)
            whole[parameter][name] = value.copy_(view_like(buffer, place.offset, place.order))
    return whole


def _describe(value: Any, is_element: bool) -> Any:
    """Return what is kept for a parameter in JSON; of what is kept for each element, the dtype."""
    if not isinstance(value, Tensor):
        return value
    dtype = str(value.dtype).removeprefix("torch.")
    if is_element:
        return {"element": dtype}
    return {"number": value.tolist(), "dtype": dtype, "device": value.device.type}


def _read(told: Any, device: torch.device) -> Any:
    """Undo ``_describe`` of a number; what is kept for each element follows."""
    if not isinstance(told, dict):
        return told
    if "element" in told:
        return None
    where = "cpu" if told["device"] == "cpu" else device
    return torch.tensor(told["number"], dtype=getattr(torch, told["dtype"]), device=where)
