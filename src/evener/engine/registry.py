"""Objects of the user whose state belongs to that of the run."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch

from evener.checkpoint.codec import encode
from evener.errors import CheckpointError, ConfigError

REGISTERED: Final = "registered"
"""What a saved state calls the objects' states, and their tensors."""


class Stateful(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes a state over."""
        ...


class Registry:
    """The registered objects, by name, in the order in which they were registered."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        #: Restored states whose objects have not been registered yet.
        self._waiting: dict[str, Any] = {}

    def add(self, name: str, stateful: Stateful) -> None:
        """Adds an object, and restores it where its state is waiting.

        Raises:
            ConfigError: The name is taken or impossible.
        """
        if not name or name in self._objects:
            raise ConfigError(
                f"{name!r} cannot be registered: a name is not empty and used once; registered are "
                f"{sorted(self._objects)}"
            )
        self._objects[name] = stateful
        if name in self._waiting:
            stateful.load_state_dict(self._waiting.pop(name))

    def collect(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """All states as JSON, and the tensors that it names."""
        tensors: dict[str, torch.Tensor] = {}
        states = {
            name: encode(dict(one.state_dict()), path=name, tensors=tensors)
            for name, one in self._objects.items()
        }
        return states, tensors

    def restore(self, states: Mapping[str, Any]) -> None:
        """Hands out states that ``collect`` gave; what is not registered yet waits until it is.

        Args:
            states: By name, what ``load_state_dict`` takes.

        Raises:
            CheckpointError: The state of a registered object is missing or refused.
        """
        waiting = dict(states)
        for name in self._objects:
            if name not in waiting:
                raise CheckpointError(
                    f"the checkpoint holds no state of {name!r}, which is registered; it holds "
                    f"{sorted(map(str, states))}: register it after ddp.load, or resume with "
                    "another one"
                )
        for name, one in self._objects.items():
            try:
                one.load_state_dict(waiting.pop(name))
            except Exception as error:
                raise CheckpointError(
                    f"the checkpoint's state of {name!r} is refused by its load_state_dict "
                    f"({error!r}): resume with the object that it was written from, or from an "
                    "older checkpoint"
                ) from error
        self._waiting = waiting
