"""What the graph of a loss certainly says about its size. Reads autograd nodes, computes nothing.

The weight rule takes a loss for the mean over its units. A sum would train on something that
depends on how the batch is split. What is certainly a mean, or cannot be told, is left alone.
"""

import gc
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

_MOST_NODES: Final = 64
_MEAN, _SUM = 1, 2
"""Values of a node's ``_saved_reduction``; 0 is a loss for each element."""

_PLUS: Final = ("Add", "Sub", "Neg")
_SAME: Final = ("ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze")
_BY_ELEMENT: Final = (
    *_PLUS,
    *_SAME,
    *("Abs", "Pow", "Exp", "Expm1", "Log", "Log1P", "Sqrt", "Clamp"),
    *("Sigmoid", "Tanh", "Relu", "LogSigmoid", "Softplus", "LogSoftmax"),
)
_LAYERS: Final = {"Mm": (0, 1), "Addmm": (1, 2), "Convolution": (0, 1)}
"""Places of input and weight among what a layer's output is computed from."""


def find_grad_scale(loss: Tensor) -> float | None:
    """Return the scale by which a ``GradScaler`` has multiplied a loss, if one has."""
    node = loss.grad_fn
    scale = _constant(node) if node is not None and _name(node) == "Mul" else None
    if scale is None or scale <= 1.0:
        return None
    # By type(): isinstance would ask lazy modules and proxies for their class.
    scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler)]
    is_known = any(one.is_enabled() and one.get_scale() == scale for one in scalers)
    return scale if is_known else None


def find_divisor(loss: Tensor) -> float | None:
    """Return the whole number that a mean was divided by, if that may be for accumulation."""
    node = loss.grad_fn
    if node is None or _name(node) != "Div" or (number := _constant(node)) is None:
        return None
    mean = node.next_functions[0][0]
    is_half = number == 2 and _name(mean) in ("Mean", "MseLoss")  # half a squared error
    is_mean = _name(mean) == "Mean" or _reduction(mean) == _MEAN
    return number if is_mean and number > 1 and number.is_integer() and not is_half else None


def has_sum(loss: Tensor, samples: int) -> bool:
    """Return whether a loss is certainly a sum over its samples, or adds one up with others."""
    to_do: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for _ in range(_MOST_NODES):
        if not to_do:
            break
        node, factor = to_do.pop()
        if node is None:
            continue
        name = _name(node)
        if name == "Sum" or _reduction(node) == _SUM:
            # A small factor may be one over n, and weights may make a mean of the sum.
            if abs(factor) >= 1.0 and not _has_weight(node) and _is_of_rows(node, samples):
                return True
        elif name == "Mul" and (number := _constant(node)):
            to_do += [(child, factor * number) for child, _ in node.next_functions]
        elif name in (*_PLUS, *_SAME):
            to_do += [(child, factor) for child, _ in node.next_functions]
    return False


def _is_of_rows(total: Any, samples: int) -> bool:
    """Return whether a node sums over the rows that a layer has computed of each sample.

    Not if something on the way could have made a mean of them: weights, divisions, other means.
    """
    has_rows = False
    for node, shape in _inputs(total):
        name = _name(node)
        is_by_row = shape[:1] == (samples,)
        has_rows |= is_by_row
        if name in _LAYERS:
            return has_rows and _is_layer(node, *_LAYERS[name])
        if name == "Mul":
            (one, _), (other, _) = node.next_functions
            is_passed = one is other  # a square
        elif name == "Sum":
            is_passed = is_by_row  # over what is not the batch
        else:
            is_passed = name in _BY_ELEMENT or _reduction(node) == 0
        if not is_passed:
            break
    return False


def _inputs(node: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield the nodes that a node is computed from, one after the other, and their shapes."""
    for _ in range(_MOST_NODES):
        node, number = next((pair for pair in node.next_functions if pair[0]), (None, 0))
        if node is None:
            return
        yield node, tuple(node._input_metadata[number].shape)


def _is_layer(node: Any, data: int, weight: int) -> bool:
    """Return whether a layer's weight is a parameter and its input is none."""
    functions = node.next_functions
    return _is_parameter(functions[weight][0]) and not _is_parameter(functions[data][0])


def _is_parameter(node: Any) -> bool:
    while node is not None and _name(node) in ("T", "Transpose", "ToCopy"):
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name()


def _name(node: Any) -> str:
    """Return a node's name without its number, such as ``Sum`` of ``SumBackward0``."""
    name, found, _ = node.name().partition("Backward")
    return name if found else ""


def _reduction(node: Any) -> int | None:
    return getattr(node, "_saved_reduction", None)


def _has_weight(node: Any) -> bool:
    return getattr(node, "_saved_weight", None) is not None


def _constant(node: Any) -> float | None:
    """Return the number by which a node multiplies or divides; ``None`` if it is none."""
    if len([child for child, _ in node.next_functions if child is not None]) != 1:
        return None
    try:
        value = node._saved_other
    except (AttributeError, RuntimeError):  # not saved, or overwritten since
        return None
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None
