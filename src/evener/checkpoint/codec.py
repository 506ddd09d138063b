"""Python values as JSON that reads back exactly: tuples, integer keys, tensors, infinities.

Plain JSON stays as it is. Whatever JSON cannot say becomes an object with one key that starts
with ``$``: ``{"$tuple": [...]}``, ``{"$map": [[key, value], ...]}``, ``{"$float": "nan"}`` and
``{"$tensor": name}``, where the tensor itself is stored elsewhere under that name.
"""

import json
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import torch

from evener.errors import CheckpointError


def encode(value: Any, *, path: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Turn a value into strict JSON.

    Args:
        value: Tensors, numbers, strings, booleans, ``None``, and lists, tuples or dicts of these.
        path: Where the value sits, such as ``state.0``; names it in errors and names its tensors.
        tensors: Receives the tensors that occur; ``None`` if none may occur.

    Returns:
        What ``json.dumps(..., allow_nan=False)`` accepts. Floats keep all bits (Python writes the
        shortest digits that read back as the same number).

    Raises:
        CheckpointError: A value of another type, named by its path.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.Tensor) and tensors is not None:
        while path in tensors:  # keys may hold dots, so that two paths read alike
            path += "'"
        tensors[path] = value
        return {"$tensor": path}
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": str(number)}
    if isinstance(value, list | tuple):
        items = [encode(item, path=f"{path}.{i}", tensors=tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = {
            key: encode(one, path=f"{path}.{key}", tensors=tensors) for key, one in value.items()
        }
        if all(isinstance(key, str) and not key.startswith("$") for key in pairs):
            return pairs
        return {"$map": [[encode(key, path=f"{path} (a key)"), one] for key, one in pairs.items()]}
    raise CheckpointError(
        f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold (nothing is "
        "pickled): keep numbers, strings, None, lists and dicts there, and tensors in states only"
    )


def decode(node: Any, *, tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
    """Undo :func:`encode`.

    Args:
        node: The JSON, as ``parse_json`` returns it.
        tensors: The tensors that the JSON names.
    """
    match node:
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(decode(item, tensors=tensors) for item in items)
        case {"$map": pairs}:
            return {decode(key): decode(item, tensors=tensors) for key, item in pairs}
        case {"$tensor": name}:
            return (tensors or {})[name]
        case dict():
            return {key: decode(item, tensors=tensors) for key, item in node.items()}
        case list():
            return [decode(item, tensors=tensors) for item in node]
    return node


def encode_document(name: str, document: Any) -> bytes:
    """Return a JSON document without tensors as the content of a file of a checkpoint.

    Args:
        name: The file's name, for errors.
        document: As ``value`` of ``encode``.

    Raises:
        CheckpointError: It holds a value of another type.
    """
    return json.dumps(encode(document, path=name), allow_nan=False).encode()
