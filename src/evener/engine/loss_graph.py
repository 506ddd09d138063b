"""Whether a loss is a sum over its micro-batch, as far as its graph and its size show.

The weight rule takes a loss for the mean over its units. A sum would train on something that
depends on how the batch is split. What is certainly a mean, or cannot be told, is left alone.
"""

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from evener.engine.share import checked_weight
from evener.errors import UsageError
from evener.planning.report import Report

#: Windows of which losses are looked at.
WINDOWS: Final = 3

_BY_SPLIT: Final = "the gradient depends on how the batch is split over ranks and micro-batches"
_REMEDY: Final = (
    "ddp.backward(loss, reduction='sum') has the gradient of the sum over the whole batch, as one "
    "process has it (Ddp.builder: reduction='sum'). If it is a mean after all, give "
    "reduction='mean'"
)

_MOST_NODES: Final = 64
_PLUS: Final = ("Add", "Sub", "Neg")
_SAME_VALUE: Final = ("ToCopy", "Clone", "View", "Squeeze", "Unsqueeze", "Alias")
_LEADING: Final = ("ToCopy", "Clone", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ReshapeAlias")
_BY_ELEMENT: Final = (
    *_PLUS,
    *("Abs", "Pow", "Exp", "Expm1", "Log", "Log1P", "Sqrt", "Clamp"),
    *("Sigmoid", "Tanh", "Relu", "LogSigmoid", "Softplus", "LogSoftmax"),
)
_LAYERS: Final = {"Mm": (0, 1), "Addmm": (1, 2), "Convolution": (0, 1)}
"""Places of input and weight among what a layer's output is computed from."""


class LossWatch:
    """Looks at the losses of a rank's first windows.

    Args:
        warn: Warns the user, once for each text.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._sizes = LossSizes()
        self._window: object = None
        self._num_windows = 0
        self._are_means = True
        self._is_suspected = False
        #: Factors of losses that are not the scale of a ``GradScaler``.
        self._factors: set[float] = set()

    def look(
        self,
        loss: Tensor,
        *,
        window: object,
        samples: int,
        weight: float | None,
        reduction: str | None,
    ) -> None:
        """Look at a loss, unless the first windows are over.

        Args:
            loss: As it was given to ``ddp.backward``.
            window: Another object for each window.
            samples: Those of the micro-batch.
            weight: As given to ``ddp.backward``, and so is ``reduction``.
            reduction: If it was given, only the scale of a ``GradScaler`` is looked for.

        Raises:
            UsageError: The loss is certainly a sum, or a ``GradScaler`` has scaled it.
        """
        if window is not self._window:
            self._window, self._num_windows = window, self._num_windows + 1
        if self._num_windows > WINDOWS:
            return
        if (scale := self._find_grad_scale(loss)) is not None:
            raise UsageError(
                f"the loss given to ddp.backward is {scale:g} times too large: a GradScaler has "
                "scaled it, and ddp.step() would not undo that. Remove the GradScaler and call "
                "ddp.backward(loss); with precision='fp16' evener scales losses by itself"
            )
        if reduction is not None:
            return
        terms = _find_terms(loss.grad_fn)
        self._are_means &= bool(terms) and all(_is_mean(node) for node, _ in terms)
        if samples > 1 and any(_is_sum_over(node, factor, samples) for node, factor in terms):
            raise UsageError(
                f"the loss given to ddp.backward is a sum over the {samples} samples of its "
                f"micro-batch, or has one in it, which would count as their mean: {_BY_SPLIT}. "
                f"Remedy: {_REMEDY}"
            )
        count = None if weight is None else checked_weight(weight)
        if (number := _find_divisor(loss)) is not None and number not in (count, samples):
            self._warn(
                f"the loss is divided by {number:g} before ddp.backward. If that is for gradient "
                "accumulation, remove it: a window's gradient is the mean over all its units "
                "already, and would come out too small; otherwise nothing is wrong"
            )

    def follow(self, reports: Sequence[Report]) -> None:
        """Look at the reports of a window, if the graphs of losses were not clear."""
        if self._are_means or self._is_suspected or not self._sizes.follow(reports):
            return
        self._is_suspected = True
        self._warn(
            "the loss given to ddp.backward is proportional to the size of its micro-batch, in "
            f"each of {WINDOWS} windows. If it is a sum over the samples, {_BY_SPLIT}. Remedy: "
            f"{_REMEDY}"
        )

    def _find_grad_scale(self, loss: Tensor) -> float | None:
        factor = _find_factor(loss)
        if factor is None or factor in self._factors:
            return None
        self._factors.add(factor)
        # By type(): isinstance would ask lazy modules and proxies for their class.
        scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler)]
        is_scale = any(one.is_enabled() and one.get_scale() == factor for one in scalers)
        return factor if is_scale else None


def _find_divisor(loss: Tensor) -> float | None:
    """Return the whole number that a mean was divided by, if that may be for accumulation.

    Not if the division belongs to the loss: the mean of ``n`` terms, or half a squared error; and
    not if a sum was divided, which makes a mean of it.
    """
    node = _skip(loss.grad_fn, _SAME_VALUE)
    if node is None or _name(node) != "Div" or (number := _constant(node)) is None:
        return None
    nodes = [term for term, _ in _find_terms(node.next_functions[0][0])]
    is_half = number == 2 and all(map(_is_squared_error, nodes))
    has_sum = any(map(_is_sum, nodes))
    if (
        not nodes
        or has_sum
        or is_half
        or len(nodes) == number
        or number <= 1
        or number != math.floor(number)
    ):
        return None
    return number


def _find_factor(loss: Tensor) -> float | None:
    """Return the number above 1 that a loss was multiplied by last, if it was."""
    node = _skip(loss.grad_fn, _SAME_VALUE)
    if node is None or _name(node) != "Mul":
        return None
    factor = _constant(node, on_device=True)
    return factor if factor is not None and factor > 1.0 else None


class LossSizes:
    """Finds losses that follow the size of their micro-batches, by the reports of windows.

    A mean does not depend on it, but for noise. Windows count in which micro-batches of one rank
    are at least twice as large as those of another.
    """

    def __init__(self) -> None:
        self._exponents: list[float] = []

    def follow(self, reports: Sequence[Report]) -> bool:
        """Look at a window; return whether the losses of ``WINDOWS`` of them have followed."""
        found = [
            (report.weight / report.micro_batches, report.loss_sum / report.weight)
            for report in reports
            if report.weight and report.loss_sum > 0.0 and report.micro_batches
        ]
        (least, lower), (most, upper) = min(found, default=(1, 1)), max(found, default=(1, 1))
        if len(self._exponents) == WINDOWS or most < 2 * least:
            return False
        self._exponents.append(math.log(upper / lower) / math.log(most / least))
        if not 0.5 < self._exponents[-1] < 1.5:
            self._exponents = [0.0] * WINDOWS  # one that does not is enough
        return len(self._exponents) == WINDOWS and 0.75 < sum(self._exponents) / WINDOWS < 1.25


def _find_terms(root: Any) -> list[tuple[Any, float]]:
    """Return the nodes that a scalar adds up, with their constant factors.

    None if there are too many; a factor is 0 where something was divided.
    """
    found: list[tuple[Any, float]] = []
    to_do: list[tuple[Any, float]] = [(root, 1.0)]
    for _ in range(_MOST_NODES):
        if not to_do:
            return found
        node, factor = to_do.pop()
        if (node := _skip(node, _SAME_VALUE)) is None:
            continue
        name, children = _name(node), [child for child, _ in node.next_functions if child]
        if name in _PLUS:
            to_do += [(child, factor) for child in children]
        elif name in ("Mul", "Div") and (number := _constant(node)):
            # A division may be that by the number of units.
            to_do.append((children[0], factor * number if name == "Mul" else 0.0))
        else:
            found.append((node, factor))
    return []


def _is_mean(node: Any) -> bool:
    return _name(node) == "Mean" or getattr(node, "_saved_reduction", None) == 1


def _is_sum_over(node: Any, factor: float, samples: int) -> bool:
    """Return whether a term is certainly a sum over samples: a small factor may be one over n."""
    return (
        abs(factor) >= 1.0
        and _is_sum(node)
        and not _has_weight(node)
        and _is_of_batch(node, samples)
    )


def _is_sum(node: Any) -> bool:
    return _name(node) == "Sum" or getattr(node, "_saved_reduction", None) == 2


def _summed(node: Any) -> tuple[Any, int]:
    """Return the node of what another one has reduced, and the number of that output."""
    return next(((child, number) for child, number in node.next_functions if child), (None, 0))


def _shape(node: Any, number: int) -> tuple[int, ...]:
    return tuple(node._input_metadata[number].shape)


def _is_of_batch(node: Any, samples: int) -> bool:
    """Return whether a node sums over the rows that a layer has computed of each sample.

    Not if something on the way could have made a mean of them: weights, divisions, other means.
    """
    has_rows = False
    for _ in range(_MOST_NODES):
        node, number = _summed(node)
        if node is None:
            return False
        name, shape = _name(node), _shape(node, number)
        has_rows |= shape[:1] == (samples,)
        if name in _LAYERS:
            return has_rows and _is_layer(node, *_LAYERS[name])
        by_element = name in _BY_ELEMENT or getattr(node, "_saved_reduction", None) == 0
        if name == "Mul":
            (one, _), (other, _) = node.next_functions
            by_element = one is other  # a square
        elif name == "Sum":
            by_element = shape[:1] == (samples,)  # over what is not the batch
        if not (by_element or name in _LEADING):
            return False
    return False


def _is_layer(node: Any, data: int, weight: int) -> bool:
    """Return whether a layer's weight is a parameter and its input is none."""

    def is_parameter(child: Any) -> bool:
        while child is not None and _name(child) in ("T", "Transpose", "ToCopy"):
            child = child.next_functions[0][0]
        return child is not None and "AccumulateGrad" in child.name()

    return is_parameter(node.next_functions[weight][0]) and not is_parameter(
        node.next_functions[data][0]
    )


def _is_squared_error(node: Any) -> bool:
    child = node.next_functions[0][0] if _name(node) == "Mean" else node
    return child is not None and _name(child) in ("MseLoss", "Pow")


def _has_weight(node: Any) -> bool:
    """Return whether a loss of torch has weighted its samples, perhaps to a mean."""
    return getattr(node, "_saved_weight", None) is not None


def _skip(node: Any, names: Sequence[str]) -> Any:
    while node is not None and _name(node) in names:
        node = node.next_functions[0][0]
    return node


def _name(node: Any) -> str:
    """Return a node's name without its number, such as ``Sum`` of ``SumBackward0``."""
    name, found, _ = node.name().partition("Backward")
    return name if found else ""


def _constant(node: Any, *, on_device: bool = False) -> float | None:
    """Return the number by which a node multiplies or divides; ``None`` if it is none.

    Args:
        node: It may be one of a tensor and a tensor.
        on_device: Wait for a number that lies on an accelerator.
    """
    children = [child for child, _ in node.next_functions]
    if len(children) == 2 and (all(children) or (_name(node) == "Div" and children[1])):
        return None
    with suppress(RuntimeError):  # saved, and overwritten since
        for name in ("_saved_other", "_saved_self"):
            value = getattr(node, name, None)
            if isinstance(value, Tensor) and value.numel() == 1 and (value.is_cpu or on_device):
                return float(value)
            if isinstance(value, int | float):
                return float(value)
    return None
