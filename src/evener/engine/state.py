"""A rank's training state beside the model's weights: one form for disk and for other ranks.

It is a *document* of plain values, and the tensors that it names, in groups: ``optimizer``,
``optimizer-1`` and so on, and ``registered``. A checkpoint holds it with the weights; a rank that
was away receives it with the flat buffers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evener.averaging.buffers import BufferAverager
from evener.checkpoint import unflatten_optimizer
from evener.checkpoint.codec import decode, encode
from evener.comm.base import Communicator
from evener.comm.flat import FlatBuffers
from evener.engine.moments import OptimizerState, own_state
from evener.engine.registry import REGISTERED, Registry
from evener.engine.schedule import Schedule
from evener.errors import UsageError
from evener.parsing import Fields

#: Tensors by group and name.
Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class TrainingContent:
    """A training state that was read, and has changed nothing yet.

    Attributes:
        optimizers: What each optimizer's ``load_state_dict`` takes.
        schedule: State of each torch scheduler.
        registered: What the ``load_state_dict`` of each registered object takes, by name.
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
        registry: Objects of the user whose state belongs to the run's.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: FlatBuffers,
        buffers: BufferAverager,
        optimizers: Sequence[Optimizer],
        schedule: Schedule,
    ) -> None:
        self.model = model
        self.flat = flat
        self.buffers = buffers
        self.optimizers = optimizers
        self.schedule = schedule
        self.registry = Registry()

    def check_identity(self) -> None:
        """The model must hold the parameters that are averaged and stepped, not others instead.

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
        return [own_state(optimizer) for optimizer in self.optimizers]

    def collect(
        self, optimizers: Sequence[OptimizerState]
    ) -> tuple[dict[str, Any], dict[str, Mapping[str, Tensor]]]:
        """Return the state as a document and the tensors that it names, which are no copies.

        Args:
            optimizers: The optimizers' states, which need not be those of this rank.
        """
        groups: dict[str, Mapping[str, Tensor]] = {
            stem_of(number): tensors for number, (tensors, _) in enumerate(optimizers)
        }
        registered, tensors = self.registry.collect()
        if tensors:
            groups[REGISTERED] = tensors
        document = {
            "schedule": self.schedule.state_dict(),
            "optimizers": [document for _, document in optimizers],
            REGISTERED: registered,
        }
        return document, groups

    def restore(self, content: TrainingContent) -> None:
        """Take a state over, which fits.

        Raises:
            CheckpointError: A registered object refuses its state.
        """
        # What may be refused comes first: the code of registered objects is the user's.
        self.registry.restore(content.registered)
        self.schedule.load_state_dict(content.schedule)
        for optimizer, state in zip(self.optimizers, content.optimizers, strict=True):
            optimizer.load_state_dict(state)

    @torch.no_grad()
    def send(
        self, comm: Communicator, counters: dict[str, Any], receives: bool, source: int = 0
    ) -> dict[str, Any]:
        """Bring ranks that were away up to the state of the others, bit for bit.

        All ranks of ``comm`` call it together.

        Args:
            comm: The ranks.
            counters: Further plain values of the rank that sends; those of others are ignored.
            receives: Whether this rank takes the state over; the others hold the same bits already.
            source: The rank that sends.

        Returns:
            The ``counters`` of the rank that sends.
        """
        sends = comm.rank == source
        document, groups = self.collect(self.own_states()) if sends else ({}, {})
        index = [
            [group, name, list(tensor.shape), str(tensor.dtype), tensor.device.type]
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        ]
        note = encode({"state": document, "counters": counters, "index": index}, path="state")
        said = json.dumps(note).encode() if sends else b""
        note = decode(json.loads(comm.all_gather_bytes(said, what="state index")[source]))
        for flat in self.flat.groups:
            comm.broadcast(flat.data, source, what="parameters of a recall")
        for buffer in self.model.buffers():
            whole = buffer.contiguous()
            comm.broadcast(whole, source, what="buffers of a recall")
            if receives:
                buffer.copy_(whole)
        arrived: dict[str, dict[str, Tensor]] = {}
        for group, name, shape, dtype, kind in note["index"]:
            if sends:
                tensor = groups[group][name].contiguous()
            else:
                device = torch.device("cpu") if kind == "cpu" else self.flat.groups[0].data.device
                number = getattr(torch, dtype.removeprefix("torch."))
                tensor = torch.empty(shape, dtype=number, device=device)
            comm.broadcast(tensor, source, what="optimizer state of a recall")
            if receives:
                arrived.setdefault(group, {})[name] = tensor
        if receives:
            self.restore(unpack(note["state"], arrived))
        received: dict[str, Any] = note["counters"]
        return received
