"""The sharded update: each rank steps its part of the parameters, and keeps the state of it."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from evener.averaging.gradients import clip, mean_factor, norm_of
from evener.averaging.optimizer_state import (
    DIVIDED,
    ELEMENTWISE,
    LOST,
    DividedState,
    Portion,
    States,
    gather,
    part_of,
)
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.comm.flat_groups import FlatGroup
from evener.errors import UsageError


@final
class ShardedUpdate:
    """Divides the update of the parameters, and the optimizers' state, among ranks.

    The user's own optimizer object makes the step. Outside of the step its groups hold the user's
    parameters; for the step each holds the pieces of those that some rank had a gradient of.

    While it is *on*, ``optimizer.state`` is a ``DividedState``, and ``optimizer.load_state_dict``
    keeps this rank's part of what it is given.

    Args:
        flat: The parameters.
        optimizers: Those that step them.
        is_wanted: Whether to divide the update at all.
        is_must: Whether the user has asked for it, so that a reason against it is an error.

    Attributes:
        is_on: Whether the update is divided now.
        can_blame: Whether the last exchange has left what each rank has given to the others' parts,
            in which ``blame`` looks.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        optimizers: Sequence[Optimizer],
        *,
        is_wanted: bool,
        is_must: bool = False,
    ) -> None:
        self._flat = flat
        self._optimizers = optimizers
        self._is_wanted = is_wanted
        self._is_must = is_must
        #: The ranks among which the update is divided; ``None`` while it is not.
        self._comm: Communicator | None = None
        self._places: dict[Tensor, Portion] = {}
        self._num_groups = 0
        #: By flat group, this rank's part of its gradients.
        self._parts: dict[FlatGroup, Tensor] = {}
        #: By optimizer and parameter group: its parameters, and what is shown in their place.
        self._shown: dict[tuple[int, int], tuple[list[Tensor], list[Portion]]] = {}
        #: By flat number, whether some rank had a gradient of the parameter.
        self._touched: list[bool] = []
        #: By optimizer, the states of this rank's pieces, and those of parameters that are frozen.
        self._own: list[States] = []
        self._rest: list[States] = []
        self._faces: list[DividedState] = []
        self.is_on = self.can_blame = False

    # ── dividing, and putting together ───────────────────────────────────────────────────────────

    def divide(self, comm: Communicator) -> None:
        """Keep this rank's part of the state alone; all ranks of ``comm`` call it together.

        Nothing is exchanged, as all hold the same state. Without effect where one rank is alone, or
        the buffers cannot be cut into equal parts: then each rank continues with the whole state.
        """
        if (
            not self._is_wanted
            or comm.world_size == 1
            or not _has_equal_parts(self._flat.groups, comm)
        ):
            return
        self._comm, self.is_on = comm, True
        self._own = [defaultdict(dict) for _ in self._optimizers]
        self._rest = [{} for _ in self._optimizers]
        self._faces = [
            DividedState(DIVIDED.format(type(optimizer).__name__, comm.world_size))
            for optimizer in self._optimizers
        ]
        self._make_places()
        for number, optimizer in enumerate(self._optimizers):
            self._take_over(number)
            vars(optimizer)["load_state_dict"] = partial(self._load, number)

    def join_if_needed(self, hooked: Sequence[int]) -> None:
        """Gather the state if the next update cannot be divided; all ranks call it together.

        Args:
            hooked: Ranks on which the step of an optimizer has a hook of the user's, or is the
                user's own. It has to see all gradients and parameters.

        Raises:
            UsageError: The user wants the update divided.
        """
        if hooked and self._is_must:
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
            whole = self._gather(range(len(self._optimizers)), keeps=True)
            for optimizer, states in zip(self._optimizers, whole, strict=True):
                _set_state(optimizer, states)
            self._end()

    def abandon(self) -> None:
        """End without the other ranks: their parts of the state are lost; idempotent."""
        if self._comm is not None:
            for optimizer in self._optimizers:
                vars(optimizer)["state"] = DividedState(LOST.format(type(optimizer).__name__))
            self._end()

    def _end(self) -> None:
        for optimizer in self._optimizers:
            vars(optimizer).pop("load_state_dict", None)
        self._comm, self._num_groups = None, 0
        self.is_on = self.can_blame = False
        self._places, self._own, self._rest, self._faces = {}, [], [], []
        self._parts, self._shown = {}, {}

    def state_dicts(self, numbers: Sequence[int], *, keeps: bool) -> list[dict[str, Any]]:
        """Return what ``state_dict()`` of optimizers is with the parts of all ranks.

        All ranks call it together. The tensors are copies.

        Args:
            numbers: The optimizers'.
            keeps: Whether this rank wants the result; otherwise it is empty here.
        """
        found = []
        for number, states in zip(numbers, self._gather(numbers, keeps=keeps), strict=True):
            if keeps:
                optimizer = self._optimizers[number]
                _set_state(optimizer, states)
                try:
                    found.append(type(optimizer).state_dict(optimizer))
                finally:
                    vars(optimizer)["state"] = self._faces[number]
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
        factor = mean_factor(scale, divisor)
        self._make_places()
        comm, groups = self._comm, self._flat.groups_of(part)
        assert comm is not None
        self.can_blame = True
        for group in groups:
            # Ranks have exchanged rows, and none touches its gradients between that and this.
            self.can_blame &= comm.reduce_scatter_parts(
                group.grad_values, what=f"gradients of {what}", have_met=True
            )
        own = [[self._parts[group]] for group in groups]
        had = self._flat.have_gradients()  # the buffer's flags would have to be waited for
        flags = [flag for group in groups for flag in had[group.indices.start : group.indices.stop]]
        norm = norm_of(own)
        norm = norm if math.isfinite(norm) else norm_of(own, torch.float64)
        rows = comm.all_gather_rows([norm, *flags], what=f"gradient norms of {what}")
        norms, *columns = zip(*rows, strict=True)
        self._touch(groups, list(map(any, columns)))
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
        comm, groups = self._comm, self._flat.groups_of(part)
        assert comm is not None
        if not self.can_blame:
            return None
        given = summed = largest = 0.0
        for place in self._places.values():
            if place.group not in groups:
                continue
            whole = place.group.grad_values[place.offset :][: place.order.numel()]
            split = (0, 0) if place.piece is None else (place.start, place.stop)
            others = torch.cat([whole[: split[0]], whole[split[1] :]])
            if not given and not bool(others.isfinite().all()):
                given = place.number + 1.0
            if not summed and not bool(whole[split[0] : split[1]].isfinite().all()):
                summed = place.number + 1.0
            if others.numel() and not given:
                most = torch.finfo(others.dtype).max / (2 * comm.world_size)
                largest = max(largest, float(others.abs().max()) / most)
        rows = comm.all_gather_rows([given, summed, largest], what=f"who is to blame for {what}")
        blamed = [(rank, row[0]) for rank, row in zip(comm.numbers, rows, strict=True) if row[0]]
        if not blamed and all(row[2] < 1.0 for row in rows):  # else sums may well overflow
            blamed = [
                (rank, row[1]) for rank, row in zip(comm.numbers, rows, strict=True) if row[1]
            ]
        return (blamed[0][0], int(blamed[0][1]) - 1) if blamed else None

    def _touch(self, groups: Iterable[FlatGroup], flags: Sequence[bool]) -> None:
        """Remember which parameters of some groups have a gradient on some rank."""
        for group in groups:
            size, place = len(group.parameters), slice(group.indices.start, group.indices.stop)
            if self._touched[place] != flags[:size]:
                self._touched[place] = flags[:size]
                self._shown.clear()
            flags = flags[size:]

    @contextmanager
    def stepping(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Show optimizers this rank's pieces, with their states, for the length of a block."""
        numbers = [n for n, one in enumerate(self._optimizers) if any(one is o for o in optimizers)]
        for number in numbers:
            self._take_over(number)
        before = []
        try:
            for number in numbers:
                optimizer = self._optimizers[number]
                for place, group in enumerate(optimizer.param_groups):
                    before.append((group, group["params"]))
                    group["params"] = self._show((number, place), group["params"])
                vars(optimizer)["state"] = self._own[number]
            yield
        finally:
            for group, parameters in before:
                group["params"] = parameters
            for number in numbers:
                vars(self._optimizers[number])["state"] = self._faces[number]

    def _show(self, of: tuple[int, int], parameters: list[Tensor]) -> list[Parameter]:
        """Return this rank's pieces of parameters that some rank had a gradient of, with it.

        Args:
            of: Numbers of the optimizer and of its parameter group.
            parameters: Those of the group.
        """
        known, portions = self._shown.get(of, ([], []))
        if len(known) != len(parameters) or not all(map(is_, known, parameters)):
            places = [self._places.get(parameter) for parameter in parameters]
            portions = [p for p in places if p is not None and self._touched[p.number]]
            self._shown[of] = list(parameters), portions
        pieces = []
        for portion in portions:
            if (piece := portion.piece) is not None:
                if piece.grad is not portion.grad:  # also a hook may have dropped it
                    piece.grad = portion.grad
                pieces.append(piece)
        return pieces

    # ── pieces and their states ──────────────────────────────────────────────────────────────────

    def _make_places(self) -> None:
        """Make pieces of the groups that are new, as parameters were made trainable.

        The state of a group without equal parts stays whole on each rank: it lies in ``_rest``, and
        ``join_if_needed`` ends the sharded update before the group's first update.
        """
        if self._num_groups == len(self._flat.groups):
            return
        comm = self._comm
        assert comm is not None
        for group in self._flat.groups[self._num_groups :]:
            if not _has_equal_parts([group], comm):
                continue
            size = group.data.numel() // comm.world_size
            first, last = size * comm.rank, size * (comm.rank + 1)
            self._parts[group] = group.grad_values[first:last]
            for i, (a, b) in zip(group.indices, group.spans(), strict=True):
                start, stop = max(a, first), min(b, last)
                piece = None
                # A parameter without elements has a state, too: on the first rank.
                if start < stop or (a == b and comm.rank == 0):
                    piece = Parameter(group.data[start:stop], requires_grad=False)
                grad, order = group.grad_values[start:stop], self._flat.order_of(i)
                place = Portion(i, group, a, start - a, stop - a, piece, grad, order)
                self._places[self._flat.parameters[i]] = place
        self._num_groups = len(self._flat.groups)
        self._shown.clear()
        self._touched += [False] * (len(self._flat.parameters) - len(self._touched))
        for number, rest in enumerate(self._rest):
            self._rest[number] = {}
            self._cut(number, rest)

    def _take_over(self, number: int) -> None:
        """Cut the state that an optimizer was given since the last step, if any."""
        optimizer, face = self._optimizers[number], self._faces[number]
        if optimizer.state is not face:
            self._own[number], self._rest[number] = defaultdict(dict), {}
            self._cut(number, optimizer.state)
            vars(optimizer)["state"] = face

    def _load(self, number: int, state_dict: Mapping[str, Any]) -> None:
        """Do what ``optimizer.load_state_dict`` does, and keep this rank's part."""
        optimizer = self._optimizers[number]
        type(optimizer).load_state_dict(optimizer, dict(state_dict))
        self._take_over(number)

    @torch.no_grad()
    def _cut(self, number: int, states: Mapping[Any, dict[str, Any]]) -> None:
        """Keep this rank's part of the states of parameters; all of those that are frozen."""
        by_element = ELEMENTWISE[type(self._optimizers[number])]
        for parameter, state in states.items():
            place = self._places.get(parameter)
            if place is None:
                self._rest[number][parameter] = state
            elif place.piece is not None and state:
                self._own[number][place.piece] = {
                    name: part_of(value, place)
                    if name in by_element and value is not None
                    else value
                    for name, value in state.items()
                }

    def _gather(self, numbers: Sequence[int], *, keeps: bool) -> list[States]:
        """Gather the parts of all ranks: the states of each of these optimizers."""
        assert self._comm is not None
        self._make_places()
        for number in numbers:
            self._take_over(number)
        found = []
        for number in numbers:
            optimizer, rest = self._optimizers[number], self._rest[number]
            whole = gather(self._comm, optimizer, self._own[number], self._places, keeps=keeps)
            # As a plain optimizer has them: in the order of its groups.
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            whole |= rest if keeps else {}
            order = dict.fromkeys([*(p for p in parameters if p in whole), *rest])
            found.append({key: whole[key] for key in order if keeps})
        return found


def _has_equal_parts(groups: Iterable[FlatGroup], comm: Communicator) -> bool:
    return all(group.data.numel() % comm.world_size == 0 for group in groups)


def _set_state(optimizer: Optimizer, states: States) -> None:
    vars(optimizer)["state"] = defaultdict(dict, states)
