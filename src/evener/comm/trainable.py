"""Which parameters of a model are trained, and whether flat buffers can hold them."""

import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import UninitializedParameter

from evener.devices import kind_of
from evener.errors import ConfigError


def choose_trainable(parameters: Iterable[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """Return the trainable parameters, each of them once.

    Raises:
        ConfigError: One has no values yet.
    """
    chosen: dict[int, tuple[str, Parameter]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad and id(parameter) not in chosen:
            if isinstance(parameter, UninitializedParameter) or parameter.is_meta:
                raise ConfigError(
                    f"parameter {name!r} has no values yet (it is lazy, or on the meta device): "
                    "materialise the model, for lazy modules with one batch, before Ddp.setup"
                )
            chosen[id(parameter)] = (name, parameter)
    return list(chosen.values())


def refuse_overlap(chosen: Sequence[tuple[str, Parameter]]) -> None:
    """Refuse parameters that are tied by shared memory: they would come apart unnoticed.

    Raises:
        ConfigError: Names two of them.
    """
    spans = sorted(
        (_memory_of(p), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in chosen
        if p.numel() and is_dense(p)
    )
    for (memory, _, stop, name), (other_memory, start, _, other) in itertools.pairwise(spans):
        if memory == other_memory and start < stop:
            raise ConfigError(
                f"parameters {name!r} and {other!r} share memory without being one Parameter: tie "
                "them by assigning the same Parameter object to both"
            )


def _memory_of(tensor: Tensor) -> tuple[str, int]:
    """Return what its ``data_ptr()`` is a place in: a device's memory, or its own storage."""
    whole = kind_of(tensor.device).has_addresses
    return str(tensor.device), 0 if whole else tensor.untyped_storage().data_ptr()


def is_dense(tensor: Tensor) -> bool:
    """Return whether its elements fill ``numel`` places of memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
