"""What the graph of a loss certainly says about its size. Reads autograd nodes, computes nothing.

The weight rule takes a loss for the mean over its units. A sum would train on something that
depends on how the batch is split. What is certainly a mean, or cannot be classified, is left alone.
"""

import gc
from typing import Any, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

_MOST_NODES: Final = 64
_EACH, _SUM = 0, 2
"""Values of ``_saved_reduction`` of torch's losses; 1 is a mean."""

_SAME: Final = ("Add", "Sub", "Neg", "ToCopy", "Clone", "View", "Squeeze", "Unsqueeze")


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


def has_sum(loss: Tensor, samples: int) -> bool:
    """Return whether a loss is a sum over its samples, or adds one up with others."""
    to_do: list[tuple[Any, float]] = [(loss.grad_fn, 1.0)]
    for _ in range(_MOST_NODES):
        if not to_do:
            break
        node, factor = to_do.pop()
        if node is None:
            continue
        children = [child for child, _ in node.next_functions]
        if _name(node) in _SAME:
            to_do += [(child, factor) for child in children]
        elif _name(node) == "Mul" and (number := _constant(node)):
            to_do += [(child, factor * number) for child in children]
        elif abs(factor) >= 1.0 and _is_sum(node, samples):  # a smaller one may be one over n
            return True
    return False


def _is_sum(node: Any, samples: int) -> bool:
    """Return whether a node adds up a loss of torch, absolute values or squares over samples."""
    of, number = next((pair for pair in node.next_functions if pair[0]), (None, 0))
    if of is None:
        return False
    is_total = _name(node) == "Sum"
    loss, reduction = (of, _EACH) if is_total else (node, _SUM)
    # Weights may make a mean of the sum.
    is_loss = getattr(loss, "_saved_reduction", None) == reduction
    is_loss = is_loss and getattr(loss, "_saved_weight", None) is None
    is_deviation = is_total and _name(of) in ("Abs", "Pow") and not _is_parameter(of)
    if not (is_loss or is_deviation):
        return False
    rows = next(iter(of._input_metadata[number].shape), 0)
    # Samples may have several rows, such as tokens.
    return rows == samples or (is_loss and rows > 0 and rows % samples == 0)


def _is_parameter(node: Any) -> bool:
    """Return whether a node is computed from a parameter alone, as in weight decay."""
    return getattr(node.next_functions[0][0], "variable", None) is not None


def _name(node: Any) -> str:
    """Return a node's name without its number, such as ``Sum`` of ``SumBackward0``."""
    name, found, _ = node.name().partition("Backward")
    return name if found else ""


def _constant(node: Any) -> float | None:
    """Return the number by which a node multiplies or divides; ``None`` if it is none."""
    if len([child for child, _ in node.next_functions if child is not None]) != 1:
        return None
    try:
        value = node._saved_other
    except (AttributeError, RuntimeError):  # not saved, or overwritten since
        return None
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None
