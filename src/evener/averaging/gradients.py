"""Averages gradients by the one weight rule: Σ weight · ∇loss over ranks, divided by Σ weight.

In the *replicated* update every rank gets all of the mean, and steps all parameters. In the
*sharded* update each rank owns an equal part of every flat buffer: gradients are summed up where
they are needed, each rank's optimizer steps the *pieces* of parameters that lie in its part, and
all ranks copy the result. So the optimizer's state exists once in the team, and parameters have the
same bits on all ranks, however their devices round: only the owner computes, the others copy.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from operator import is_
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

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
from evener.devices import DeviceQueue, float64_device
from evener.errors import UsageError
from evener.protocol.machine import check_weight

_LONG, _ROW = 2**20, 2**16
"""From how many elements on a norm is taken row by row, and a row's. On a CPU, one sum of squares
in float32 over 50 million elements is 0.8 % too small."""

_HALF = (torch.float16, torch.bfloat16)


class Reading:
    """Numbers that devices compute, to be read by the host when they are due.

    Args:
        parts: Tensors of at most one dimension.
        queue: The queue of the device on which all of them are, if it has milestones. The copy into
            host memory is queued at once. So reading waits for what was queued before, and not for
            what comes after.
    """

    def __init__(self, parts: Sequence[torch.Tensor], queue: DeviceQueue | None = None) -> None:
        self._parts = list(parts)
        self._arrival = None
        if queue is not None and parts:
            whole = torch.cat([part.reshape(-1) for part in parts])
            host = queue.fetch(whole)
            self._parts = list(torch.split(host, [part.numel() for part in parts]))
            self._arrival = queue.mark()

    def read(self) -> list[list[float]]:
        """Return the numbers of each part; wait until they are there."""
        if self._arrival is not None:
            self._arrival.wait()
        if all(part.is_cpu for part in self._parts):
            return [part.reshape(-1).tolist() for part in self._parts]
        by_device = defaultdict(list)
        for part in self._parts:
            by_device[part.device].append(part.reshape(-1))
        # One transfer from each device.
        numbers = {device: iter(torch.cat(own).tolist()) for device, own in by_device.items()}
        return [list(islice(numbers[part.device], part.numel())) for part in self._parts]


class GradientAverager:
    """Sums the ranks' gradients and divides them by the window's total weight.

    Each rank accumulates ``weight / scale · ∇loss``. ``scale`` is a power of two near the weight
    that is expected of the whole window, the same on every rank, so that sums neither overflow in
    half precision nor lose bits. After the exchange one multiplication by ``scale / Σ weight``, in
    the same pass as clipping, gives the gradient of the mean loss. No other scaling exists.

    Buckets leave in the order that ``flat`` gives them.

    Args:
        flat: The ranks' buffers.
        comm: The ranks.

    Attributes:
        own_norm: 2-norm of this rank's gradients, as ``judge`` has found it; 0 without any.
    """

    def __init__(self, flat: FlatBuffers, comm: Communicator) -> None:
        self._flat = flat
        self.comm = comm
        self.own_norm = 0.0
        self._is_known = False

    def use(self, comm: Communicator) -> None:
        """Go on with other ranks."""
        self.comm = comm

    def gather(self, part: int | None = None, *, each: bool = False) -> list[torch.Tensor]:
        """Make this rank's gradients ready for ``average``.

        Args:
            part: The part of ``flat`` that is averaged, here and below; all of it by default.
            each: On one rank, return one norm for each parameter that has a gradient.

        Returns:
            Norms of gradients, one tensor for each group that has some, on the group's device.
            ``judge`` takes their values: the caller reads them together with others.
        """
        self._is_known = False
        if not self._flat.gather(part):
            return []
        return [
            _norms(tensors, each=each)
            for group in self._flat.groups_of(part)
            if (tensors := self._flat.gradients(group))
        ]

    def judge(self, norms: Iterable[Iterable[float]], part: int | None = None) -> int | None:
        """Say whether this rank's gradients are finite.

        Args:
            norms: The values of what ``gather`` returned.
            part: As in ``gather``.

        Returns:
            Flat number of the first parameter whose gradient holds an inf or a NaN, if any.
        """
        # One pass tells both: with one rank this norm is the one that average returns.
        self.own_norm, self._is_known = _root(norms), True
        if math.isfinite(self.own_norm):
            return None
        self.own_norm = self._exact_norm(part)
        return None if math.isfinite(self.own_norm) else self._flat.first_non_finite(part)

    def average(
        self,
        scale: float,
        total_weight: float,
        part: int | None = None,
        *,
        what: str,
        max_norm: float | None = None,
    ) -> float:
        """Replace the gradients by the weighted mean over ranks; all ranks call it together.

        Clipping acts after averaging, on the mean, hence the same on every rank.

        Args:
            scale: What each rank's weights were divided by before backward.
            total_weight: Σ weight over ranks and micro-batches; larger than 0.
            part: As in ``gather``.
            what: Names the exchange in errors.
            max_norm: Scale the mean down to this 2-norm, as ``clip_grad_norm_`` does.

        Returns:
            The 2-norm of the averaged gradient, over all parameters, before clipping. Not finite
            when the sum over ranks overflowed; the gradients are then of no use.

        Raises:
            UsageError: The total is not finite or not above 0: such a window is not applied.
        """
        factor = mean_factor(scale, total_weight)
        if self.comm.world_size > 1:
            self.comm.all_reduce_each(
                [
                    (
                        f"gradients of {what}" + (f": {bucket.label}" if bucket.label else ""),
                        group.grad[bucket.start : bucket.stop],
                    )
                    for group, bucket in self._flat.buckets_of(part)
                ]
            )
            self._is_known = False
        norm = factor * (self.own_norm if self._is_known else self._norm(part))
        self._is_known = False
        if math.isfinite(norm):
            self.multiply(clip(factor, norm, max_norm), part)
        return norm

    @torch.no_grad()
    def multiply(self, factor: float | torch.Tensor, part: int | None = None) -> None:
        """Multiply the gradients; a tensor of shape ``()`` is one that a device computes."""
        if isinstance(factor, float) and factor == 1.0:
            return
        for group in self._flat.groups_of(part):
            if tensors := self._flat.gradients(group):
                own = factor if isinstance(factor, float) else factor.to(tensors[0].dtype)
                torch._foreach_mul_(tensors, own)

    def _norm(self, part: int | None) -> float:
        """2-norm of the gradients as they are; finite whenever they are."""
        norm = norm_of([self._flat.gradients(group) for group in self._flat.groups_of(part)])
        return norm if math.isfinite(norm) else self._exact_norm(part)

    def _exact_norm(self, part: int | None) -> float:
        """Return it from sums in float64, which do not overflow."""
        groups = [self._flat.gradients(group) for group in self._flat.groups_of(part)]
        return norm_of(groups, torch.float64)

    @torch.no_grad()
    def unify(self, part: int | None, *, what: str, have_met: bool = False) -> None:
        """Give every rank the same bits of the parameters; all ranks call it together.

        Unlike devices round an update differently, so that replicas would drift apart. Each rank
        owns an equal part of every buffer and the others copy it.

        Args:
            part: As in ``gather``.
            what: Names the exchange in errors.
            have_met: See ``Communicator.all_gather_parts``.
        """
        for group in self._flat.groups_of(part):
            if group.data.numel() % self.comm.world_size == 0:
                self.comm.all_gather_parts(group.data, what=what, have_met=have_met)
            else:  # ranks are parked, the buffer was padded for all: the lowest present rank gives
                self.comm.broadcast(group.data, 0, what=what)


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

    @property
    def is_on(self) -> bool:
        """Whether the update is divided now."""
        return self._comm is not None

    # ── dividing, and putting together ───────────────────────────────────────────────────────────

    def divide(self, comm: Communicator) -> None:
        """Keep this rank's part of the state alone; all ranks of ``comm`` call it together.

        Nothing is exchanged, as all hold the same state. Without effect where one rank is alone, or
        the buffers cannot be cut into equal parts: then each rank goes on with the whole state.
        """
        if (
            not self._is_wanted
            or comm.world_size == 1
            or not _has_equal_parts(self._flat.groups, comm)
        ):
            return
        self._comm = comm
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
        """Put the state together where the next update cannot be divided; all call it together.

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
        total_weight: float,
        part: int | None = None,
        *,
        what: str,
        max_norm: float | None = None,
    ) -> float:
        """Replace this rank's part of the gradients by the weighted mean over ranks.

        All ranks call it together. See ``GradientAverager.average``; the other parts are of no use
        afterwards.
        """
        factor = mean_factor(scale, total_weight)
        self._make_places()
        comm, groups = self._comm, self._flat.groups_of(part)
        assert comm is not None
        for group in groups:
            # Ranks have exchanged rows, and none touches its gradients between that and this.
            comm.reduce_scatter_parts(group.grad_values, what=f"gradients of {what}", have_met=True)
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
        ``join_if_needed`` ends the divided update before the group's first update.
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
        """Put the parts of all ranks together: the states of each of these optimizers."""
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


def mean_factor(scale: float, total_weight: float) -> float:
    """Return what turns a sum of gradients into their mean; see ``GradientAverager.average``.

    Raises:
        UsageError: The total is not finite or not above 0: such a window is not applied.
    """
    if not 0.0 < total_weight < math.inf:
        check_weight(total_weight, owner="the window")
        raise UsageError("a window of weight 0 has no mean gradient: it must not be applied")
    return scale / total_weight


def clip(factor: float, norm: float, max_norm: float | None) -> float:
    """Return ``factor``, made smaller so that a gradient of 2-norm ``norm`` gets ``max_norm``."""
    return factor if max_norm is None else factor * min(1.0, max_norm / (norm + 1e-6))


def norm_of(groups: Sequence[list[torch.Tensor]], dtype: torch.dtype | None = None) -> float:
    """2-norm of groups of tensors, each group of one device and dtype; half ones in float32."""
    norms = [_norms(tensors, dtype) for tensors in groups if tensors]
    return _root(Reading(norms).read())


def _norms(
    tensors: list[torch.Tensor], dtype: torch.dtype | None = None, *, each: bool = False
) -> torch.Tensor:
    """Return the 2-norm of tensors of one device and dtype, or that of each of them."""
    own = tensors[0].dtype
    if dtype is torch.float64:
        tensors = [t.to(float64_device(t.device)) for t in tensors]
    wide = dtype or (torch.float32 if own in _HALF else own)
    long = [t for t in tensors if t.is_cpu and t.numel() >= _LONG and t.is_contiguous()]
    if each:
        return torch.stack(torch._foreach_norm(tensors, 2, dtype=wide))
    norms = [row for tensor in long for row in _norms_by_row(tensor.detach().view(-1), wide)]
    short = [t for t in tensors if not any(t is one for one in long)] if long else tensors
    if short:
        norms += torch._foreach_norm(short, 2, dtype=wide)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _norms_by_row(flat: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norms of all whole rows together, and of what is left."""
    end = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1, dtype=dtype)
    rest = torch.linalg.vector_norm(flat[end:], dtype=dtype)
    return [torch.linalg.vector_norm(rows), rest]


def _root(norms: Iterable[Iterable[float]]) -> float:
    """Return the 2-norm of all together; NaN where one of them is."""
    squares = 0.0
    for values in norms:
        for norm in values:
            squares += norm * norm
    return math.sqrt(squares)
