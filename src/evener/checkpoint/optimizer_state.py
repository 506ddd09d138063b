"""Optimizer state as tensors and JSON, bit for bit, without pickling."""

from collections.abc import Mapping
from typing import Any

import torch

from evener.checkpoint.codec import decode, encode
from evener.errors import CheckpointError


def flatten_optimizer(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Split ``optimizer.state_dict()`` into tensors and JSON.

    Args:
        state_dict: ``{"state": {index: {...}}, "param_groups": [...]}``; values may be tensors,
            numbers (also infinite), strings, ``None``, and nested lists, tuples and dicts, as in
            L-BFGS. A tensor learning rate is a tensor like any other.

    Returns:
        The tensors under dotted names such as ``state.0.exp_avg`` (the optimizer's own, not
        copies: pass them through ``copy_to_cpu``), and a JSON document that refers to them.

    Raises:
        CheckpointError: The state holds an object of another type; the message has its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    document = {key: encode(value, path=key, tensors=tensors) for key, value in state_dict.items()}
    return tensors, document


def unflatten_optimizer(tensors: Mapping[str, torch.Tensor], document: Any) -> dict[str, Any]:
    """Undo :func:`flatten_optimizer`; the result goes to ``optimizer.load_state_dict``.

    Raises:
        CheckpointError: The document is no optimizer state, or names a tensor that is missing.
    """
    if not isinstance(document, dict) or not {"state", "param_groups"} <= document.keys():
        raise CheckpointError(
            "the optimizer document of this checkpoint has no 'state' and 'param_groups': "
            "it was not written by flatten_optimizer"
        )
    return {key: decode(value, tensors=tensors) for key, value in document.items()}
