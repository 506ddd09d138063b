"""The sharded update: each rank steps its part of the parameters, and keeps the state of it."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain, product
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor, optim
from torch.nn import Parameter
from torch.optim import Optimizer

from evener.averaging.norms import clip, norm_of
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
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

_DIVIDED: Final = (
    "the state of this optimizer is divided among {} ranks (sharded_update), and each holds its "
    "part of it: call optimizer.state_dict() on all ranks, save with ddp.save, or use "
    "DdpConfig(sharded_update='off')"
)
_LOST: Final = (
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
class _DividedState(MutableMapping[Any, Any]):
    """Stands for an optimizer's state while that is divided: reading it says what to do instead.

    Args:
        reason: The message.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any) -> NoReturn:
        raise UsageError(self._reason)

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse


#: What an optimizer keeps for each parameter.
_States = dict[Any, dict[str, Any]]
#: What an index of states says of a value that is kept for each element.
_BY_ELEMENT = "by element"


class _Place(NamedTuple):
    """Where a parameter lies, and which piece of it is this rank's.

    Attributes:
        number: Its flat number.
        group: Its flat group.
        offset: Its first element there.
        where: The elements of this rank's piece there.
        piece: Those elements; ``None`` where other ranks own all of the parameter.
        grad: The piece's gradient.
    """

    number: int
    group: FlatGroup
    offset: int
    where: slice
    piece: Parameter | None
    grad: Tensor


@final
class ShardedUpdate:
    """Divides the update of the parameters, and the optimizers' state, among ranks.

    The user's own optimizer object makes the step. Outside of the step its groups hold the user's
    parameters; for the step each holds the pieces of those that some rank had a gradient of.

    While it is *on*, ``optimizer.state`` is a mapping that refuses to be read. A state that an
    optimizer is given (by ``load_state_dict``) is divided before the next step.

    Args:
        flat: The parameters.
        optimizers: Those that step them.
        is_wanted: Whether to divide the update at all.
        is_required: Whether the user has asked for it, so that a reason against it is an error.

    Attributes:
        can_blame: Whether the last exchange has left what each rank has given to the others' parts,
            in which ``blame`` looks.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        *,
        is_wanted: bool,
        is_required: bool,
    ) -> None:
        self._flat = flat
        self._optimizers = optimizers
        self._is_wanted = is_wanted
        self._is_required = is_required
        #: The ranks among which the update is divided; ``None`` while it is not.
        self._comm: Communicator | None = None
        self._places: dict[Tensor, _Place] = {}
        #: By flat group that is divided, this rank's part of it.
        self._parts: dict[FlatGroup, slice] = {}
        #: Flat numbers of the parameters that some rank had a gradient of, at the last ``average``.
        self._touched: set[int] = set()
        #: By optimizer, the states of this rank's pieces, and those of parameters without a place.
        self._own: list[_States] = []
        self._face = _DividedState("")
        self.can_blame = False

    @property
    def is_on(self) -> bool:
        """Return whether the update is divided now."""
        return self._comm is not None

    # ── dividing, and putting together ───────────────────────────────────────────────────────────

    def divide(self, comm: Communicator) -> None:
        """Keep this rank's part of the state alone; all ranks of ``comm`` call it together.

        Nothing is exchanged, as all hold the same state. Without effect where one rank is alone, or
        the buffers cannot be cut into equal parts: then each rank continues with the whole state.
        """
        is_possible = self._is_wanted and comm.world_size > 1
        if is_possible and _has_equal_parts(self._flat.groups, comm):
            self._comm = comm
            self._face = _DividedState(_DIVIDED.format(comm.world_size))
            self._own = [defaultdict(dict) for _ in self._optimizers]
            self._catch_up()

    def join_if_needed(self, hooked: Sequence[int]) -> None:
        """Gather the state if the next update cannot be divided; all ranks call it together.

        Args:
            hooked: Ranks on which the step of an optimizer has a hook of the user's, or is the
                user's own. It has to see all gradients and parameters.

        Raises:
            UsageError: The user wants the update divided.
        """
        if hooked and self._is_required:
            raise UsageError(
                f"an optimizer of rank {hooked[0]} has a hook on its step "
                "(register_step_pre_hook, register_step_post_hook, or a function in place of "
                "optimizer.step), which has to see all gradients, but sharded_update is 'on': "
                "remove the hook, or use 'auto'"
            )
        assert self._comm is not None
        if hooked or not _has_equal_parts(self._flat.groups, self._comm):  # a buffer may be new
            self.join()

    def join(self) -> None:
        """Give the optimizers back their whole state; all ranks call it together."""
        if self._comm is not None:
            self._end([self._gather(n, keeps=True) for n, _ in enumerate(self._optimizers)])

    def abandon(self) -> None:
        """End without the other ranks: their parts of the state are lost; idempotent."""
        if self._comm is not None:
            self._end([_DividedState(_LOST)] * len(self._optimizers))

    def _end(self, states: Sequence[Any]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            vars(optimizer)["state"] = state
        self._comm, self.can_blame = None, False
        self._places, self._parts, self._own = {}, {}, []

    def state_dict(self, number: int, *, keeps: bool) -> dict[str, Any]:
        """Return what ``state_dict()`` of an optimizer is with the parts of all ranks.

        All ranks call it together. The tensors are copies.

        Args:
            number: The optimizer's.
            keeps: Whether this rank wants the result; otherwise it is empty here.
        """
        states, optimizer = self._gather(number, keeps=keeps), self._optimizers[number]
        if not keeps:
            return {}
        vars(optimizer)["state"] = states
        found = type(optimizer).state_dict(optimizer)
        vars(optimizer)["state"] = self._face
        return found

    # ── the update ───────────────────────────────────────────────────────────────────────────────

    def average(
        self,
        scale: float,
        divisor: float,
        part: int | None = None,
        *,
        what: str,
        max_norm: float | None = None,
    ) -> float:
        """Replace this rank's part of the gradients by the weighted mean over ranks.

        All ranks call it together. See ``GradientAverager.average``; the other parts are of no use
        afterwards.
        """
        factor, comm, groups = scale / divisor, self._catch_up(), self._flat.groups_of(part)
        self.can_blame = True
        for group in groups:
            # Ranks have exchanged rows, and none touches its gradients between that and this.
            self.can_blame &= comm.reduce_scatter_parts(
                group.grad_values, what=f"gradients of {what}", have_met=True
            )
        own = [[group.grad_values[self._parts[group]]] for group in groups]
        had = self._flat.have_gradients()  # the buffer's flags would have to be waited for
        numbers = [number for group in groups for number in group.indices]
        row = [norm_of(own), *(had[number] for number in numbers)]
        norms, *columns = zip(
            *comm.all_gather_rows(row, what=f"gradient norms of {what}"), strict=True
        )
        self._touched = {n for n, column in zip(numbers, columns, strict=True) if any(column)}
        norm = factor * math.hypot(*norms)
        if math.isfinite(norm) and (factor := clip(factor, norm, max_norm)) != 1.0:
            with torch.no_grad():
                for tensors in own:
                    torch._foreach_mul_(tensors, factor)
        return norm

    def blame(self, part: int | None = None, *, what: str) -> tuple[int, int] | None:
        """Find the rank whose gradients made a mean infinite or NaN; all ranks call it together.

        Each rank still has what it has given to the parts of others. Its own part holds sums by
        now: if no rank finds anything in what it has given, the owner of such a sum is to blame.

        Args:
            part: As in ``average``, which was called before.
            what: Names the exchange in errors.

        Returns:
            Number of the rank and flat number of the parameter; ``None`` where the sum of finite
            gradients has overflowed, or the exchange has left nothing to look at.
        """
        comm = self._comm
        assert comm is not None
        if not self.can_blame:
            return None
        given = summed = largest = 0.0
        for group in self._flat.groups_of(part):
            values, own = group.grad_values, torch.zeros_like(group.grad_values)
            own[self._parts[group]] = values[self._parts[group]]
            others = values.clone()
            others[self._parts[group]] = 0.0
            given = given or _first_non_finite(group, others)
            summed = summed or _first_non_finite(group, own)
            most = torch.finfo(values.dtype).max / (2 * comm.world_size)
            largest = max(largest, float(others.nan_to_num(0.0, 0.0, 0.0).abs().max()) / most)
        rows = comm.all_gather_rows([given, summed, largest], what=f"who is to blame for {what}")
        may_overflow = any(row[2] >= 1.0 for row in rows)
        for column in (0,) if may_overflow else (0, 1):
            for rank, row in zip(comm.numbers, rows, strict=True):
                if row[column]:
                    return rank, int(row[column]) - 1
        return None

    @contextmanager
    def stepping(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Show optimizers this rank's pieces, with their states, for the length of a block."""
        shown = [
            (optimizer, own)
            for optimizer, own in zip(self._optimizers, self._own, strict=True)
            if any(optimizer is one for one in optimizers)
        ]
        before = [(group, group["params"]) for one, _ in shown for group in one.param_groups]
        try:
            for group, parameters in before:
                group["params"] = self._pieces_of(parameters)
            for optimizer, own in shown:
                vars(optimizer)["state"] = own
            yield
        finally:
            for group, parameters in before:
                group["params"] = parameters
            for optimizer, _ in shown:
                vars(optimizer)["state"] = self._face

    def _pieces_of(self, parameters: Iterable[Tensor]) -> list[Parameter]:
        """Return this rank's pieces of those that some rank had a gradient of, with it."""
        pieces = []
        for parameter in parameters:
            place = self._places.get(parameter)
            if place and place.piece is not None and place.number in self._touched:
                place.piece.grad = place.grad
                pieces.append(place.piece)
        return pieces

    # ── pieces and their states ──────────────────────────────────────────────────────────────────

    def _catch_up(self) -> Communicator:
        """Divide the groups that are new, as parameters were unfrozen, and states that were given.

        A group without equal parts gets no places, so each rank keeps the whole state of it until
        ``join_if_needed`` ends the sharded update before the group's first update.
        """
        comm = self._comm
        assert comm is not None
        groups = [group for group in self._flat.groups if group not in self._parts]
        new = [group for group in groups if _has_equal_parts([group], comm)]
        for group in new:
            self._make_places(group, comm)
        for number, optimizer in enumerate(self._optimizers):
            is_given = optimizer.state is not self._face
            if is_given or new:
                states = optimizer.state if is_given else self._own[number]
                self._own[number] = self._cut(ELEMENTWISE[type(optimizer)], states)
                vars(optimizer)["state"] = self._face
        return comm

    def _make_places(self, group: FlatGroup, comm: Communicator) -> None:
        size = group.data.numel() // comm.world_size
        part = self._parts[group] = slice(size * comm.rank, size * (comm.rank + 1))
        for number, (first, end) in zip(group.indices, group.spans(), strict=True):
            where = slice(max(first, part.start), min(end, part.stop))
            piece = None
            if where.start < where.stop or first == end:  # one without elements has a state, too
                piece = Parameter(group.data[where], requires_grad=False)
            place = _Place(number, group, first, where, piece, group.grad_values[where])
            self._places[self._flat.parameters[number]] = place

    @torch.no_grad()
    def _cut(self, by_element: frozenset[str], states: Mapping[Any, dict[str, Any]]) -> _States:
        """Return this rank's pieces of states; all of those of parameters without a place."""
        own: _States = defaultdict(dict)
        for parameter, state in states.items():
            place = self._places.get(parameter)
            if place is None:
                own[parameter] = state
            elif place.piece is not None:
                own[place.piece] = {
                    name: self._part_of(value, place)
                    if name in by_element and value is not None
                    else value
                    for name, value in state.items()
                }
        return own

    def _part_of(self, value: Tensor, place: _Place) -> Tensor:
        """Return this rank's piece of what is kept for each element of a parameter."""
        flat = torch.empty(value.numel(), dtype=place.grad.dtype, device=value.device)
        view_like(flat, 0, self._flat.order_of(place.number)).copy_(value)
        return flat[place.where.start - place.offset :][: place.grad.numel()].clone()

    @torch.no_grad()
    def _gather(self, number: int, *, keeps: bool) -> _States:
        """Gather an optimizer's state from the pieces of all ranks, which call it together.

        Returns:
            What the optimizer would hold alone: new tensors, as the parameters lie. Of no use where
            this rank does not keep it.
        """
        comm, optimizer, own = self._catch_up(), self._optimizers[number], self._own[number]
        by_element = ELEMENTWISE[type(optimizer)]
        pieces = {place.piece: place for place in self._places.values() if place.piece is not None}
        rest = {key: state for key, state in own.items() if key not in pieces}
        described = [
            (place.number, {name: _describe(v, name in by_element) for name, v in state.items()})
            for piece, place in pieces.items()
            if (state := own.get(piece)) is not None
        ]
        notes = comm.all_gather_json(described, what="index of optimizer state")
        # All ranks that own pieces of a parameter say the same of it.
        index: dict[int, dict[str, Any]] = dict(chain.from_iterable(notes))
        whole: _States = dict(rest)
        for i, entries in index.items():
            parameter = self._flat.parameters[i]
            whole[parameter] = {n: _read(value, parameter.device) for n, value in entries.items()}
        for group, name in product(self._parts, sorted(by_element)):
            members = [i for i in group.indices if index.get(i, {}).get(name) == _BY_ELEMENT]
            if not members:
                continue
            buffer = torch.zeros_like(group.data)
            for piece, place in pieces.items():
                if place.number in members:
                    buffer[place.where] = own[piece][name]
            comm.all_gather_parts(buffer, what=f"optimizer state {name}")
            for i in members if keeps else ():
                parameter, order = self._flat.parameters[i], self._flat.order_of(i)
                value = torch.empty_like(parameter, dtype=buffer.dtype, requires_grad=False)
                offset = self._places[parameter].offset
                whole[parameter][name] = value.copy_(view_like(buffer, offset, order))
        # As a plain optimizer has them: in the order of its groups.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        order_of_keys = dict.fromkeys([*parameters, *rest])
        return defaultdict(dict, {key: whole[key] for key in order_of_keys if key in whole})


def _has_equal_parts(groups: Iterable[FlatGroup], comm: Communicator) -> bool:
    return all(group.data.numel() % comm.world_size == 0 for group in groups)


def _first_non_finite(group: FlatGroup, values: Tensor) -> float:
    """Return 1 + the flat number of the first parameter with an inf or a NaN; 0 for none."""
    found = values.isfinite().logical_not().nonzero()
    if not found.numel():
        return 0.0
    return float(group.indices.start + bisect_right(group.offsets, int(found[0])))


def _describe(value: Any, is_element: bool) -> Any:
    """Return what is kept for a parameter in JSON."""
    if not isinstance(value, Tensor):
        return value
    if is_element:
        return _BY_ELEMENT
    return [value.tolist(), str(value.dtype).removeprefix("torch."), value.device.type]


def _read(packed: Any, device: torch.device) -> Any:
    """Undo ``_describe`` of a number; what is kept for each element follows."""
    if not isinstance(packed, list):
        return packed
    number, dtype, kind = packed
    where = "cpu" if kind == "cpu" else device
    return torch.tensor(number, dtype=getattr(torch, dtype), device=where)
