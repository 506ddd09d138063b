"""Flat buffers: parameters and gradients of one device and dtype side by side in memory.

``.data`` and ``.grad`` of each trainable parameter become views into two buffers per group, so that
one collective moves a whole group and nothing is concatenated per step.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat, zip_longest
from operator import attrgetter, is_, is_not
from typing import Final, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from evener.comm.base import Communicator
from evener.comm.flat_groups import Bucket, FlatGroup, build_group, move_parameter, view_like
from evener.comm.trainable import choose_trainable, refuse_overlap
from evener.errors import ConfigError, UsageError

_GRAD: Final = attrgetter("grad")


@final
class FlatBuffers:
    """Flat buffers of all trainable parameters.

    The life of a window: ``zero_()``; ``attach_grads()`` after each backward; ``gather()`` after
    the last one; exchange ``group.grad`` of each group; ``mask_untouched()``; ``optimizer.step()``;
    ``attach_data()``.

    A window starts with ``.grad = None``, so that the first backward writes fresh gradients instead
    of adding to zeros. With several ranks, hooks then *move* them into their places of the buffer,
    a run of parameters at once, while they are in the processor's cache; further ones are added to
    them there. With one rank they stay where autograd has put them.

    Views keep a parameter's shape and, where its memory is dense, its strides (so also
    ``channels_last``). ``state_dict``, ``copy.deepcopy``, safetensors and optimizers see ordinary,
    disjoint tensors.

    A parameter that was frozen and is made trainable later gets its place in ``attach_grads``, in
    groups after the others; one that is frozen later keeps its own.

    Attributes:
        groups: One for each device and dtype, in the order in which they first occur.
        parameters: Trainable parameters of all groups, in flat order.
        names: Their names.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        world_size: int,
        *,
        parts: Mapping[int, int] | None = None,
        buckets: Sequence[tuple[str, Sequence[str]]] | None = None,
        comm: Communicator | None = None,
        is_divided: bool = False,
    ) -> None:
        """Move the trainable ones of ``parameters`` into flat buffers.

        Args:
            parameters: ``(name, parameter)`` in the model's order, as from ``named_parameters()``;
                frozen ones are left alone for now, one that occurs twice (tied) is taken once.
            world_size: Buffers are padded so that as many ranks can share them in equal parts.
            parts: By ``id`` of a parameter, the part that it belongs to: parts lie in groups of
                their own and can be exchanged one by one. All belong to part 0 by default.
            buckets: Labels with names of parameters, in the order in which their gradients are
                exchanged; those that no bucket names follow in one without a label. By default one
                bucket holds all.
            comm: What gradients are exchanged over: they lie in its memory.
            is_divided: Ranks own parts of the buffers: parameters are exchanged over ``comm``, too,
                and keep their order in memory, which that of optimizer states follows.

        Raises:
            ConfigError: A parameter has no shape yet, or two of them overlap in memory; a bucket
                names one that is not there, or that another bucket has named.
        """
        self._world_size = world_size
        self._comm = Communicator() if comm is None else comm
        self._is_divided = is_divided
        self._parts = dict(parts or {})
        self._bucket_by_name = _bucket_by_name(buckets or (), {name for name, _ in parameters})
        self.groups: tuple[FlatGroup, ...] = ()
        self._buckets: list[tuple[FlatGroup, Bucket]] = []
        self.parameters: tuple[Parameter, ...] = ()
        self.names: tuple[str, ...] = ()
        self._places: list[int] = []
        self._data_ptrs: list[int] = []
        #: What each parameter has accumulated in this window; None before its first gradient.
        self._held: list[Tensor | None] = []
        #: The versions of gradients when they were written here last.
        self._stamps: list[int] = []
        #: Places in the buffers; none with one rank. Users get ``_views``, whose memory they can
        #: replace by ``p.grad.data = x``; ``_orders`` are the same places, and keep their strides.
        self._views: list[Tensor] = []
        self._orders: list[Tensor] = []
        # Pointers show whether a view still lies there: ``p.grad.data = x`` changes the memory
        # behind a view that is the same Python object as before.
        self._view_ptrs: list[int] = []
        self._hooks: list[RemovableHandle] = []
        self._frozen = [(name, p) for name, p in parameters if not p.requires_grad]
        self._add(choose_trainable(parameters))
        self.zero_()

    def groups_of(self, part: int | None) -> tuple[FlatGroup, ...]:
        """Return the groups of a part; all for ``None``."""
        return self.groups if part is None else tuple(g for g in self.groups if g.part == part)

    def buckets_of(self, part: int | None) -> list[tuple[FlatGroup, Bucket]]:
        """Return a part's buckets in order of exchange, each with its group; all for ``None``."""
        return [pair for pair in self._buckets if part is None or pair[0].part == part]

    def zero_(self, part: int | None = None) -> None:
        """Drop the gradients (of a part): ``.grad`` is ``None``, as after ``zero_grad()``."""
        for group in self.groups_of(part):
            for parameter in group.parameters:
                parameter.grad = None
            self._held[group.indices.start : group.indices.stop] = [None] * len(group.parameters)
        self._stamps = [] if part is None else self._versions()

    def check_grads(self) -> str | None:
        """Restore gradients that were dropped since ``attach_grads()``, and find other changes.

        Returns:
            Name of a parameter whose gradient was written or assigned since then, or since
            ``zero_()``, if any.
        """
        versions = self._versions()
        if versions == self._stamps and all(map(is_, map(_GRAD, self.parameters), self._held)):
            return None  # nearly always: no further loop in Python
        places = range(len(self.groups)) if self._views else self.with_gradients()
        pairs = zip_longest(places, versions, self._stamps)
        written = {place for place, now, before in pairs if now != before}
        for i, (parameter, held) in enumerate(zip(self.parameters, self._held, strict=True)):
            is_written = held is not None and (self._places[i] if self._views else i) in written
            if is_written or (parameter.grad is not held and parameter.grad is not None):
                return self.names[i]
        self._attach_grads(are_in_place=True)
        return None

    def _versions(self) -> list[int]:
        """Return numbers that change when gradients are written; none while there are none."""
        if not any(map(is_not, self._held, repeat(None))):
            return []
        if self._views:  # they share the version of their buffer
            return [group.grad._version for group in self.groups]
        return [held._version for held in self._held if held is not None]

    def attach_grads(self) -> int:
        """Undo what the user did to ``.grad`` since the last backward of this window.

        To be called after each backward. A parameter whose ``.grad`` was dropped
        (``zero_grad(set_to_none=True)``) gets back what it has accumulated; a ``.grad`` that was
        assigned replaces that.

        Returns:
            How many accumulated gradients had been dropped or replaced.

        Raises:
            UsageError: A gradient is sparse.
        """
        broken = self._attach_grads(are_in_place=True)
        self._stamps = self._versions()
        return broken

    def add_unfrozen(self) -> None:
        """Add parameters that have become trainable, before their first update."""
        if any(p.requires_grad for _, p in self._frozen):
            unfrozen = choose_trainable(self._frozen)
            self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
            self._add(unfrozen)

    def describe(self) -> list[dict[str, bool]]:
        """Return for ``follow`` which parameters are trainable now.

        Returns:
            A dict by name for each group, in flat order, and one for what is in no group.
        """
        pairs = [zip(group.names, group.parameters, strict=True) for group in self.groups]
        return [{name: p.requires_grad for name, p in part} for part in (*pairs, self._frozen)]

    def follow(self, described: Sequence[Mapping[str, bool]]) -> None:
        """Take over the groups and the trained parameters of another rank.

        Args:
            described: Its ``describe``.

        Raises:
            UsageError: It began with other trainable parameters.
        """
        *groups, _ = described
        for names in groups[len(self.groups) :]:
            for name, parameter in self._frozen:
                parameter.requires_grad_(name in names)
            self.add_unfrozen()
        if [[*group] for group in groups] != [[*group.names] for group in self.groups]:
            theirs = {name for group in groups for name in group}
            odd = sorted(theirs ^ {*self.names}) or ["their order"]
            raise UsageError(
                f"this worker trains {len(self.names)} parameters and the team {len(theirs)}; they "
                f"differ in {odd[0]!r}. Make the same parameters trainable on all workers before "
                "Ddp.setup; a worker that joins unfreezes what the team has unfrozen since then"
            )
        wanted = {name: flag for part in described for name, flag in part.items()}
        for name, parameter in (*zip(self.names, self.parameters, strict=True), *self._frozen):
            parameter.requires_grad_(wanted[name])

    @property
    def outside(self) -> list[Parameter]:
        """Return the parameters in no group: those that have never been trainable."""
        return [parameter for _, parameter in self._frozen]

    def _attach_grads(self, *, are_in_place: bool) -> int:
        """See ``attach_grads``; ``p.grad.data = x`` may have moved views to other memory."""
        self.add_unfrozen()
        grads = list(map(_GRAD, self.parameters))
        if are_in_place and all(map(is_, grads, self._held)):
            return 0
        if self._views:
            _move_fresh(enumerate(self.parameters), self._held, self._views, self._view_ptrs)
        elif not self._versions() and all(g is None or g.layout is torch.strided for g in grads):
            self._held = grads
            return 0
        broken = 0
        for i, (parameter, held) in enumerate(zip(self.parameters, self._held, strict=True)):
            strays = held is not None and self._views and held.data_ptr() != self._view_ptrs[i]
            if parameter.grad is not held or strays:
                broken += held is not None
                self._restore_grad(i)
        return broken

    def attach_data(self) -> None:
        """Copy what was assigned to ``.data`` into the buffers, and make it the views again.

        To be called after each update, and by ``gather``.

        Raises:
            UsageError: A parameter was moved to another device or dtype, or has another shape.
        """
        pointers = [parameter.data_ptr() for parameter in self.parameters]
        if pointers != self._data_ptrs:
            for i, pointer in enumerate(pointers):
                if pointer != self._data_ptrs[i]:
                    self._restore_data(i)

    def gather(self, part: int | None = None) -> bool:
        """Put this rank's gradients and flags into the buffers, ready to be exchanged.

        To be called after the last backward of a window, also on a rank that had none.

        Args:
            part: Only what belongs to this part.

        Returns:
            Whether this rank had any gradient.

        Raises:
            UsageError: A gradient is sparse, or a parameter was moved to another device or dtype.
        """
        self.settle()
        had_any = False
        for group in self.groups_of(part):
            missing = [i for i in group.indices if self._held[i] is None]
            had_any = had_any or len(missing) < len(group.parameters)
            if not self._views:
                continue
            if len(missing) == len(group.parameters):
                group.grad.zero_()
                continue
            self.complete(missing)
            self.flag(group, missing)
        return had_any

    def settle(self) -> None:
        """Take in what was assigned to ``.data`` and ``.grad`` since the last backward.

        Raises:
            UsageError: A gradient is sparse, or a parameter was moved to another device or dtype.
        """
        self.attach_data()
        # Before the exchange is soon enough: until then autograd adds to what was assigned.
        pointers = [view.data_ptr() for view in self._views]
        self._attach_grads(are_in_place=pointers == self._view_ptrs)

    def flag(self, group: FlatGroup, missing: Iterable[int]) -> None:
        """Flag the parameters of a group that have a gradient: all but the ``missing`` ones."""
        group.touched.fill_(1)
        for i in missing:
            group.touched[i - group.indices.start] = 0

    # ── gradients that leave before the window's last backward is over ───────────────────────────

    def complete(self, indices: Iterable[int]) -> list[int]:
        """Put the gradients of some parameters into their places; zeros where there is none.

        Returns:
            The parameters without a gradient.
        """
        missing = []
        for i in indices:
            if self._held[i] is None:
                members = [(i, self.parameters[i])]
                _move_fresh(members, self._held, self._views, self._view_ptrs)
                if self.parameters[i].grad is not self._held[i]:
                    self._restore_grad(i)
                if self._held[i] is None:
                    self._views[i].zero_()
                    missing.append(i)
        return missing

    def hide(self, indices: Iterable[int]) -> None:
        """Let autograd begin again for parameters whose gradients have left."""
        for i in indices:
            self._held[i] = self._views[i]  # so that no hook moves further ones there
            self.parameters[i].grad = None

    def reveal(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Show gradients that were hidden; return those that have come since, by number."""
        late = {}
        for i in indices:
            parameter, held = self.parameters[i], self._held[i]
            if parameter.grad is not None and parameter.grad is not held:
                late[i] = parameter.grad
            parameter.grad = held
        return late

    def place_of(self, i: int, buffer: Tensor) -> Tensor:
        """Return a parameter's place in a buffer like ``FlatGroup.grad`` of its group."""
        group = self.groups[self._places[i]]
        return view_like(buffer, group.offsets[i - group.indices.start], self.parameters[i])

    def mask_untouched(self, part: int | None = None) -> None:
        """Show optimizers the gradients that some rank had, and ``.grad = None`` where none had.

        To be called after the exchange and before ``optimizer.step()``.
        """
        for group in self.groups_of(part) if self._views else ():
            for i, count in zip(group.indices, group.touched.tolist(), strict=True):
                shown = self._views[i] if count else None
                if self._held[i] is not shown:  # mostly it is: to set .grad takes longer
                    self._held[i] = self.parameters[i].grad = shown

    def gradients(self, group: FlatGroup) -> list[Tensor]:
        """Return a group's gradients, for arithmetic on all; after ``gather``, any shapes."""
        if self._views:
            return [group.grad_values]
        return [held for i in group.indices if (held := self._held[i]) is not None]

    def order_of(self, i: int) -> Tensor:
        """Return a tensor that lies in memory as the buffers hold a parameter; not on one rank.

        Until ``attach_data`` the parameter itself may lie otherwise.
        """
        return self._orders[i]

    def with_gradients(self) -> list[int]:
        """Return the flat numbers of parameters that have a gradient in this window."""
        return [i for i, held in enumerate(self._held) if held is not None]

    def have_gradients(self) -> list[bool]:
        """Return for each parameter whether it has a gradient in this window."""
        return [held is not None for held in self._held]

    def first_non_finite(
        self, part: int | None = None, among: Iterable[int] | None = None
    ) -> int | None:
        """Return the flat number of the first parameter whose gradient holds an inf or a NaN.

        Args:
            part: Only what belongs to this part.
            among: Only these.
        """
        of_part = (i for group in self.groups_of(part) for i in group.indices)
        for i in of_part if among is None else among:
            held = self._held[i]
            if held is not None and not bool(torch.isfinite(held).all()):
                return i
        return None

    def move(self, comm: Communicator) -> None:
        """Move gradients into memory that other ranks can map; there are none afterwards."""
        self._comm = comm
        self.zero_()
        self.groups = tuple(
            group.with_gradients_in(comm) if self._views else group for group in self.groups
        )
        # The hooks know these lists, so they are filled again in place.
        for i in range(len(self._views)):
            self._orders[i] = self._order(i)
            self._views[i] = self._orders[i].detach()
            self._view_ptrs[i] = self._views[i].data_ptr()
        self._sort_buckets()

    def close(self) -> None:
        """Remove the hooks; parameters and gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _add(self, chosen: Sequence[tuple[str, Parameter]]) -> None:
        """Give parameters a place, in groups of their own after those that are there."""
        refuse_overlap(chosen)
        by_kind: dict[tuple[int, torch.device, torch.dtype], list[tuple[str, Parameter]]] = {}
        rest = (len(self._bucket_by_name), "")
        bucket_of = {name: self._bucket_by_name.get(name, rest) for name, _ in chosen}
        ordered = list(reversed(chosen))
        ordered.sort(key=lambda pair: bucket_of[pair[0]][0])  # and within a bucket as it was
        for name, parameter in ordered:
            kind = (self._parts.get(id(parameter), 0), parameter.device, parameter.dtype)
            by_kind.setdefault(kind, []).append((name, parameter))
        for (part, *_), members in by_kind.items():
            labels = [bucket_of[name] for name, _ in members]
            group = build_group(
                members,
                part,
                len(self.parameters),
                self._world_size,
                labels,
                self._comm,
                shares_data=self._is_divided,
            )
            self.groups += (group,)
            self.parameters += group.parameters
            self.names += group.names
            for i, parameter in zip(group.indices, group.parameters, strict=True):
                self._data_ptrs.append(parameter.data_ptr())
                self._held.append(None)
                self._places.append(len(self.groups) - 1)
                if self._world_size > 1:
                    self._orders.append(self._order(i))
                    self._views.append(self._orders[i].detach())
                    self._view_ptrs.append(self._views[i].data_ptr())
            for run in group.runs() if self._views else ():
                members_of_run = [(i, weakref.ref(self.parameters[i])) for i in run]
                mover = partial(_move_run, members_of_run, self._held, self._views, self._view_ptrs)
                last = self.parameters[run[-1]]
                self._hooks.append(last.register_post_accumulate_grad_hook(mover))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._sort_buckets()

    def _sort_buckets(self) -> None:
        every = [(group, bucket) for group in self.groups for bucket in group.buckets]
        self._buckets = sorted(every, key=lambda pair: pair[1].number)

    def _restore_grad(self, i: int) -> None:
        """Make ``.grad`` the window's gradient again; an assigned one replaces it."""
        parameter, grad, held = self.parameters[i], self.parameters[i].grad, self._held[i]
        if grad is None:
            parameter.grad = held
            return
        if grad.layout is not torch.strided:
            raise UsageError(
                f"the gradient of {self.names[i]!r} is sparse: ranks exchange dense gradients; use "
                "sparse=False in its layer"
            )
        if self._views:
            if self._views[i].data_ptr() != self._view_ptrs[i]:  # its .data was replaced
                self._views[i] = self._orders[i].detach()
            grad = _move_grad(grad, self._views[i])
        self._held[i] = parameter.grad = grad

    def _restore_data(self, i: int) -> None:
        parameter, group, name = self.parameters[i], self.groups[self._places[i]], self.names[i]
        now, buffer, before = parameter.data, group.data, group.shapes[i - group.indices.start]
        if (now.device, now.dtype) != (buffer.device, buffer.dtype):
            raise UsageError(
                f"parameter {name!r} was on {buffer.device} as {buffer.dtype} when the team was "
                f"set up and is now on {now.device} as {now.dtype}: move and convert the model "
                "before Ddp.setup"
            )
        if now.shape != before:
            raise UsageError(
                f"parameter {name!r} had shape {tuple(before)} when the team was set up and has "
                f"{tuple(now.shape)} now: change the model before Ddp.setup"
            )
        like = self._orders[i] if self._is_divided else None
        move_parameter(parameter, buffer, group.offsets[i - group.indices.start], like)
        if self._views:  # their strides follow the parameter's
            self._orders[i] = self._order(i)
            grad, self._views[i] = parameter.grad, self._orders[i].detach()
            if grad is not None:
                self._held[i] = parameter.grad = _move_grad(grad, self._views[i])

    def _order(self, i: int) -> Tensor:
        """Return a place in the buffer, with the strides of the parameter as it lies now."""
        group = self.groups[self._places[i]]
        return view_like(group.grad, group.offsets[i - group.indices.start], self.parameters[i])


def _bucket_by_name(
    buckets: Sequence[tuple[str, Sequence[str]]], known: set[str]
) -> dict[str, tuple[int, str]]:
    """Return number and label of the bucket, by parameter."""
    found: dict[str, tuple[int, str]] = {}
    for number, (label, names) in enumerate(buckets):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"gradient bucket {label!r} names the parameter {name!r}, which the model does "
                    "not have; give names as in named_parameters()"
                )
            if name in found:
                raise ConfigError(
                    f"parameter {name!r} is in the gradient buckets {found[name][1]!r} and "
                    f"{label!r}; name it in one"
                )
            found[name] = (number, label)
    return found


def _move_run(
    run: Sequence[tuple[int, weakref.ref[Parameter]]],
    held: list[Tensor | None],
    views: Sequence[Tensor],
    pointers: Sequence[int],
    _: Tensor,
) -> None:
    """Move the gradients of a run of parameters when that of the last one is there.

    It knows lists, not the buffers: a parameter and its hook must not keep one another alive.
    """
    members = [(i, parameter) for i, weak in run if (parameter := weak()) is not None]
    _move_fresh(members, held, views, pointers)


def _move_fresh(
    members: Iterable[tuple[int, Parameter]],
    held: list[Tensor | None],
    views: Sequence[Tensor],
    pointers: Sequence[int],
) -> None:
    """Move first gradients of a window into the buffers; leave all that is unusual alone."""
    found = [
        (i, parameter, grad)
        for i, parameter in members
        if held[i] is None
        and (grad := parameter.grad) is not None
        and grad.layout is torch.strided
        and grad.shape == views[i].shape  # else .data was replaced, which gather reports
        and grad.data_ptr() != pointers[i]  # else it lies there, perhaps with other strides
    ]
    if found:
        with torch.no_grad():  # backward may be recorded (create_graph)
            torch._foreach_copy_([views[i] for i, _, _ in found], [grad for _, _, grad in found])
        for i, parameter, _ in found:
            held[i] = parameter.grad = views[i]


@torch.no_grad()
def _move_grad(grad: Tensor, view: Tensor) -> Tensor:
    if grad is not view:
        view.copy_(grad.detach().clone())  # it may lie there already, with other strides
    return view
