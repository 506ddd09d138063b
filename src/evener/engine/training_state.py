"""A rank's training state beside the model's weights: one form for disk and for other ranks.

It is a *document* of plain values, and the tensors that it names. A checkpoint holds it with the
weights; a rank that was away receives it with the flat buffers.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.averaging.outer import OuterStep
from evener.averaging.sharded_update import ShardedUpdate
from evener.checkpoint.codec import decode, encode
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.schedule import Schedule
from evener.errors import CheckpointError, ConfigError, UsageError

#: What ``optimizer.state_dict()`` returns.
OptimizerState = dict[str, Any]


class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return its state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take a state over."""
        ...


class TrainingContent(NamedTuple):
    """A training state as plain values and tensors.

    Attributes:
        optimizers: The argument of each optimizer's ``load_state_dict``.
        schedule: State of each torch scheduler.
        registered: The argument of each registered object's ``load_state_dict``, by name.
        outer: State of the outer optimizer, of ``OuterStep.state_dict``; empty without one.
    """

    optimizers: Sequence[OptimizerState]
    schedule: list[Any]
    registered: dict[str, Any]
    outer: dict[str, Any]


def unpack(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> TrainingContent:
    """Undo ``TrainingState.collect``; further entries of the document are ignored.

    Raises:
        LookupError: The document lacks something.
        CheckpointError: It names a tensor that is not there.
    """
    return TrainingContent(*(decode(document[k], tensors=tensors) for k in TrainingContent._fields))


@dataclass(eq=False)
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
        outer: Steps the consensus of CADENCE and ASYNC, where that is not only averaged.
    """

    model: nn.Module
    flat: FlatBuffers
    buffers: BufferAverager
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    sharded: ShardedUpdate
    num_bytes: int = 0
    outer: OuterStep | None = None
    #: Objects of the user, by name, in the order in which they were registered.
    _registered: dict[str, Stateful] = field(default_factory=dict)
    #: Restored states whose objects have not been registered yet.
    _waiting: dict[str, Any] = field(default_factory=dict)

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
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def collect(
        self, optimizers: Sequence[OptimizerState]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state as a document and the tensors that it names, which are no copies.

        Args:
            optimizers: The optimizers' states, which need not be those of this rank.
        """
        registered = {name: dict(one.state_dict()) for name, one in self._registered.items()}
        outer = self.outer.state_dict() if self.outer else {}
        content = TrainingContent(list(optimizers), self.schedule.state_dict(), registered, outer)
        tensors: dict[str, Tensor] = {}
        document = {
            key: encode(value, path=key, tensors=tensors)
            for key, value in content._asdict().items()
        }
        return document, tensors

    def restore(self, content: TrainingContent) -> None:
        """Take a state over, which fits.

        Raises:
            CheckpointError: The state of a registered object is missing or refused.
        """
        # First load the parts that may be refused: loading a registered object runs the user's
        # code.
        states = content.registered
        missing = self._registered.keys() - states.keys()
        if missing:
            raise CheckpointError(
                f"the checkpoint holds no state of {min(missing)!r}, which is registered; it holds "
                f"{sorted(map(str, states))}: register it after ddp.load, or resume with another "
                "one"
            )
        for name, one in self._registered.items():
            try:
                one.load_state_dict(states[name])
            except Exception as error:
                raise CheckpointError(
                    f"the checkpoint's state of {name!r} is refused by its load_state_dict "
                    f"({error!r}): resume with the object that it was written from, or from an "
                    "older checkpoint"
                ) from error
        self._waiting = {name: one for name, one in states.items() if name not in self._registered}
        self.schedule.load_state_dict(content.schedule)
        for optimizer, state in zip(self.optimizers, content.optimizers, strict=True):
            optimizer.load_state_dict(state)
        if self.outer is not None:
            self.outer.load_state_dict(content.outer)

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
        tensors: dict[str, Tensor] = {}
        text = b""
        if comm.rank == source:
            document, tensors = self.collect(self.own_states())
            index = [[n, [*t.shape], str(t.dtype), t.device.type] for n, t in tensors.items()]
            note = [document, encode(counters, path="counters"), index, self.flat.describe()]
            text = json.dumps(note).encode()
        notes = comm.all_gather_bytes(text, what="state index")
        document, counters, index, trained = json.loads(notes[source])
        if receives:
            self.flat.follow(trained)
        self.num_bytes = 0
        model = [
            (own, self._transfer(comm, torch.empty_like(own) if receives else own, source, what))
            for what, own in held or self.held()
        ]
        for name, shape, dtype, kind in index:
            if comm.rank != source:
                device = "cpu" if kind == "cpu" else self.flat.groups[0].data.device
                number = getattr(torch, dtype.removeprefix("torch."))
                tensors[name] = torch.empty(shape, dtype=number, device=device)
            tensors[name] = self._transfer(comm, tensors[name], source, "optimizer state")
        if receives:
            with torch.no_grad():
                for own, received in model:
                    own.copy_(received)
            self._take_over(unpack(document, tensors))
        found: dict[str, Any] = decode(counters)
        return found

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

    def _transfer(self, comm: Communicator, tensor: Tensor, source: int, what: str) -> Tensor:
        travels = tensor.contiguous()
        comm.broadcast(travels, source, what=f"{what} of the team's state")
        self.num_bytes += travels.nbytes
        return travels
