"""A rank's training state beside the model's weights: one form for disk and for other ranks.

It is a *document* of plain values, and the tensors that it names, in groups: ``optimizer``,
``optimizer-1`` and so on, and ``registered``. A checkpoint holds it with the weights; a rank that
was away receives it with the flat buffers.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.sharded_update import ShardedUpdate
from evener.checkpoint import flatten_optimizer, unflatten_optimizer
from evener.checkpoint.codec import decode, encode
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.schedule import Schedule
from evener.errors import CheckpointError, ConfigError, UsageError
from evener.parsing import Fields

#: What a saved state calls the states of registered objects, and the group of their tensors.
REGISTERED: Final = "registered"

#: Tensors by name, and the document that puts them in their places.
OptimizerState = tuple[dict[str, Tensor], dict[str, Any]]

#: Tensors by group and name.
Groups = Mapping[str, Mapping[str, Tensor]]


class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""
        ...


class TrainingContent(NamedTuple):
    """A training state that was read, and is not loaded yet.

    Attributes:
        optimizers: The argument of each optimizer's ``load_state_dict``.
        schedule: State of each torch scheduler.
        registered: The argument of each registered object's ``load_state_dict``, by name.
    """

    optimizers: tuple[dict[str, Any], ...]
    schedule: list[Any]
    registered: dict[str, Any]


def stem_of(number: int) -> str:
    """Name of an optimizer's group of tensors."""
    return "optimizer" if number == 0 else f"optimizer-{number}"


def unpack(document: Any, groups: Groups) -> TrainingContent:
    """Undo ``TrainingState.collect``; further entries of the document are ignored.

    Raises:
        ValueError: The document lacks something, or holds something else.
        CheckpointError: It names a tensor that is not there.
    """
    state = Fields(document)
    registered = Fields(state.values.get(REGISTERED, {}), REGISTERED).values
    return TrainingContent(
        optimizers=tuple(
            unflatten_optimizer(groups.get(stem_of(number), {}), one)
            for number, one in enumerate(state.items("optimizers"))
        ),
        schedule=state.items("schedule"),
        registered={
            name: decode(one, tensors=groups.get(REGISTERED, {}))
            for name, one in registered.items()
        },
    )


class TrainingState:
    """What a rank trains with.

    Attributes:
        model: The model; its buffers travel.
        flat: Its trainable parameters, which travel, too. Frozen ones never change.
        buffers: Keeps the model's buffers equal.
        optimizers: Those that step the parameters.
        schedule: Their learning rates.
        sharded: Divides their state among ranks, where that is wanted.
        num_bytes: Tensors that ``send`` has sent last.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatBuffers,
        buffers: BufferAverager,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
        sharded: ShardedUpdate,
    ) -> None:
        self.model = model
        self.flat = flat
        self.buffers = buffers
        self.optimizers = optimizers
        self.schedule = schedule
        self.sharded = sharded
        #: Objects of the user, by name, in the order in which they were registered.
        self._registered: dict[str, Stateful] = {}
        #: Objects whose state other ranks receive, and checkpoints do not hold.
        self._carried: dict[str, Stateful] = {}
        #: Restored states whose objects have not been registered yet.
        self._waiting: dict[str, Any] = {}
        self.num_bytes = 0

    def register(self, name: str, stateful: Stateful) -> None:
        """Add an object whose state belongs to the run's; restore it where its state is waiting.

        Raises:
            ConfigError: The name is taken or impossible.
        """
        if not name or name in self._registered:
            raise ConfigError(
                f"{name!r} cannot be registered: a name is not empty and used once; registered are "
                f"{sorted(self._registered)}"
            )
        self._registered[name] = stateful
        if name in self._waiting:
            stateful.load_state_dict(self._waiting.pop(name))

    def carry(self, name: str, stateful: Stateful) -> None:
        """Add an object whose state ranks receive that were away, but that checkpoints lack."""
        self._carried[name] = stateful

    def copy_registered(self) -> dict[str, Any]:
        """Return copies of the states of registered objects, by name."""
        return {name: copy.deepcopy(one.state_dict()) for name, one in self._registered.items()}

    def load_registered(self, states: Mapping[str, Any]) -> None:
        """Put registered objects back into the states of ``copy_registered``."""
        for name, state in states.items():
            self._registered[name].load_state_dict(state)

    def check_identity(self) -> None:
        """Check that the model holds the parameters that are averaged and stepped, not others.

        Raises:
            UsageError: One has been replaced since the set-up.
        """
        now = dict(self.model.named_parameters(remove_duplicate=False))
        for name, parameter in zip(self.flat.names, self.flat.parameters, strict=True):
            if now.get(name, parameter) is not parameter:
                raise UsageError(
                    f"parameter {name!r} was replaced by another Parameter after the team was set "
                    "up, as load_state_dict(assign=True) does: no optimizer steps it, and it is "
                    "not averaged; load without assign, or before Ddp.setup and the optimizer are "
                    "made"
                )

    def own_states(self) -> list[OptimizerState]:
        """Return the states of the optimizers as they are on this rank."""
        return [flatten_optimizer(optimizer.state_dict()) for optimizer in self.optimizers]

    def collect(
        self, optimizers: Sequence[OptimizerState], *, travels: bool = False
    ) -> tuple[dict[str, Any], dict[str, Mapping[str, Tensor]]]:
        """Return the state as a document and the tensors that it names, which are no copies.

        Args:
            optimizers: The optimizers' states, which need not be those of this rank.
            travels: Whether it is for another rank, not for a checkpoint.
        """
        groups: dict[str, Mapping[str, Tensor]] = {
            stem_of(number): tensors for number, (tensors, _) in enumerate(optimizers)
        }
        registered_tensors: dict[str, Tensor] = {}
        registered = {
            name: encode(dict(one.state_dict()), path=name, tensors=registered_tensors)
            for name, one in {**self._registered, **(self._carried if travels else {})}.items()
        }
        if registered_tensors:
            groups[REGISTERED] = registered_tensors
        document: dict[str, Any] = {
            "schedule": self.schedule.state_dict(),
            "optimizers": [document for _, document in optimizers],
        }
        if registered:
            document[REGISTERED] = registered
        return document, groups

    def restore(self, content: TrainingContent) -> None:
        """Take a state over, which fits.

        Raises:
            CheckpointError: The state of a registered object is missing or refused.
        """
        # First load the parts that may be refused: loading a registered object runs the user's
        # code.
        self._waiting = self._restore_registered(content.registered)
        self.schedule.load_state_dict(content.schedule)
        for optimizer, state in zip(self.optimizers, content.optimizers, strict=True):
            optimizer.load_state_dict(state)

    def _restore_registered(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Hand out states; return those of objects that are not registered yet."""
        waiting = dict(states)
        for name in self._carried.keys() & waiting.keys():
            self._carried[name].load_state_dict(waiting.pop(name))
        for name in self._registered:
            if name not in waiting:
                raise CheckpointError(
                    f"the checkpoint holds no state of {name!r}, which is registered; it holds "
                    f"{sorted(map(str, states))}: register it after ddp.load, or resume with "
                    "another one"
                )
        for name, one in self._registered.items():
            try:
                one.load_state_dict(waiting.pop(name))
            except Exception as error:
                raise CheckpointError(
                    f"the checkpoint's state of {name!r} is refused by its load_state_dict "
                    f"({error!r}): resume with the object that it was written from, or from an "
                    "older checkpoint"
                ) from error
        return waiting

    def send(
        self,
        comm: Communicator,
        counters: dict[str, Any],
        receives: bool,
        source: int = 0,
        *,
        held: Iterable[tuple[str, Tensor]] | None = None,
    ) -> dict[str, Any]:
        """Bring ranks that were away up to the state of the others, bit for bit.

        All ranks of ``comm`` call it together. A rank takes the state over when all of it has
        arrived: one whose transfer breaks off keeps what it had.

        Args:
            comm: The ranks.
            counters: Further plain values of the rank that sends; those of others are ignored.
            receives: Whether this rank takes the state over; the others hold the same bits already.
            source: The rank that sends.
            held: What it takes over of the model, with what that is; by default, what changes. It
                is asked for when this rank trains what the others train.

        Returns:
            The ``counters`` of the rank that sends.

        Raises:
            UsageError: This rank takes over, and trains other parameters.
        """
        sends = comm.rank == source
        document, groups = self.collect(self.own_states(), travels=True) if sends else ({}, {})
        index = [
            [group, name, list(tensor.shape), str(tensor.dtype), tensor.device.type]
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        ]
        told = {"state": document, "counters": counters, "index": index}
        note = encode({**told, "trained": self.flat.describe()}, path="state")
        said = json.dumps(note).encode() if sends else b""
        note = decode(json.loads(comm.all_gather_bytes(said, what="state index")[source]))
        if receives:
            self.flat.follow(note["trained"])
        self.num_bytes = 0
        model = [
            (own, self._transfer(comm, own, source, receives, what=f"{what} of a recall"))
            for what, own in held or self.held()
        ]
        arrived: dict[str, dict[str, Tensor]] = {}
        for group, name, shape, dtype, kind in note["index"]:
            device = "cpu" if kind == "cpu" else self.flat.groups[0].data.device
            number = getattr(torch, dtype.removeprefix("torch."))
            tensor = torch.empty(shape, dtype=number, device=device)
            if sends:
                tensor.copy_(groups[group][name])
            what = "optimizer state of a recall"
            tensor = self._transfer(comm, tensor, source, receives, what=what)
            if receives:
                arrived.setdefault(group, {})[name] = tensor
        if receives:
            with torch.no_grad():
                for own, received in model:
                    own.copy_(received)
            self._take_over(unpack(note["state"], arrived))
        counters = note["counters"]
        return counters

    def _take_over(self, content: TrainingContent) -> None:
        try:
            self.restore(content)
        except ValueError as error:  # of torch
            raise UsageError(
                f"this worker cannot take over the optimizers of the team ({error}). It needs the "
                "parameter groups that they have by now: call add_param_group for all of them "
                "before Ddp.setup, or loop over range(n), in which it calls what the others called"
            ) from error

    def held(self) -> list[tuple[str, Tensor]]:
        """Return trainable parameters and buffers, as the model holds them."""
        held = [("parameters", group.data) for group in self.flat.groups]
        return held + [("buffers", buffer) for buffer in self.model.buffers()]

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Return the parameters that no rank trains: a rank that is new may have others."""
        return [("frozen parameters", parameter.detach()) for parameter in self.flat.outside]

    def _transfer(
        self, comm: Communicator, own: Tensor, source: int, receives: bool, *, what: str
    ) -> Tensor:
        travels = torch.empty_like(own.contiguous()) if receives else own.contiguous()
        comm.broadcast(travels, source, what=what)
        self.num_bytes += travels.nbytes
        return travels
