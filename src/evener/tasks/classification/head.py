"""Fit the head on the outputs of the frozen base, before the adapter is trained.

With a random head the adapter would first adapt to random numbers, which distorts the base's
features. With a fitted head it learns the task from the first step on (linear probing, then
fine-tuning: Kumar et al., 2022).
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.ddp import Ddp
from evener.loop.arguments import in_evaluation
from evener.observe.numbers import human_bytes
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.classification.samples import Pair

_PIECE = 64
_DECAY = 1e-3
_ITERATIONS = 300

MOST_BYTES: Final = 2**28
"""Most memory of a rank for the features to which the head is fitted."""


def fit_head(
    ddp: Ddp,
    pipeline: ClassifyPipeline,
    data: list[Pair],
    say: Callable[[str], None],
    *,
    most_bytes: int = MOST_BYTES,
) -> bool:
    """Fit the head; all ranks call it together, before the first window.

    Each rank computes a part of the features, gathers those of all, and loads rank 0's head.

    Args:
        ddp: The team.
        pipeline: This rank's classifier, with an adapter that changes nothing yet.
        data: The training samples, the same on every rank.
        say: Called with a line that describes what is done.
        most_bytes: If the features of all samples, or their logits, need more memory, the head is
            fitted to as many samples as fit, drawn by the seed.

    Returns:
        Whether it was done: not with a head of several layers, and not if a rank was asked to stop.
    """
    head = find_head(pipeline.model)
    if head is None:
        return False
    count = min(len(data), max(1, most_bytes // (4 * max(head.in_features, head.out_features))))
    on = ""
    if count < len(data):
        data = random.Random(pipeline.config.seed).sample(data, count)
        on = f" on {count:,} samples, as the features of all take over {human_bytes(most_bytes)}"
    say(f"fitting the head to the frozen base{on} ...")
    features, filled = torch.empty(count, head.in_features), 0
    rows_of: Any = data  # torch's data sets are any objects with a length and items
    for samples in ddp.eval_loader(rows_of, batch_size=_PIECE, collate_fn=list):
        part = torch.zeros(len(samples), head.in_features)
        if not ddp.wants_stop():
            with ddp.emulated_slowness():
                part = features_of(pipeline, head, samples)
        rows = ddp.gather(part)
        features[filled : filled + len(rows)] = rows
        filled += len(rows)
    ddp.weighted_mean(0.0)  # agrees on a stop
    if ddp.stopping:
        return False
    if filled:  # with fewer samples than ranks, only the first one has rows
        _fit(head, features, torch.tensor([index for _, index in data]), pipeline)
    with torch.no_grad():
        for parameter in head.parameters():
            # Solvers round differently on different hardware.
            parameter.copy_(ddp.gather(parameter)[: len(parameter)])
    return True


def find_head(model: nn.Module) -> nn.Linear | None:
    """Return the trainable head, if it is one linear layer; a new pooler is not part of it."""
    heads = [
        module
        for name, module in model.named_modules()
        if ".modules_to_save." in f"{name}." and isinstance(module, nn.Linear)
        if ".pool" not in name
    ]
    return heads[0] if len(heads) == 1 else None


@torch.no_grad()
def features_of(pipeline: ClassifyPipeline, head: nn.Linear, samples: Sequence[Pair]) -> Tensor:
    """Return the head's input for each sample, ``(B, in_features)`` on the CPU, in ``eval()``."""
    batch = pipeline.collate(samples)
    given: list[Tensor] = []

    def catch(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        given.append(inputs[0].detach())

    handle = head.register_forward_pre_hook(catch)
    try:
        with in_evaluation(pipeline.model):
            pipeline.logits(batch)
    finally:
        handle.remove()
    found = given[0].float().cpu()
    if found.dim() == 3:  # decoders classify every position and use the last one
        found = found[torch.arange(len(samples)), batch["attention_mask"].sum(1) - 1]
    return found


def _fit(head: nn.Linear, features: Tensor, labels: Tensor, pipeline: ClassifyPipeline) -> None:
    """Fit by L-BFGS, with the loss weighted as in training; overwrites ``features``."""
    scale = features.std(0).clamp_min(1e-6)
    scaled = features.div_(scale)
    class_weights = torch.tensor([pipeline.weight_of([i]) for i in range(head.out_features)])
    weight = torch.zeros(head.out_features, head.in_features, requires_grad=True)
    bias = torch.zeros(head.out_features, requires_grad=head.bias is not None)
    trained = [tensor for tensor in (weight, bias) if tensor.requires_grad]
    optimizer = torch.optim.LBFGS(trained, max_iter=_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.linear(scaled, weight, bias), labels, weight=class_weights)
        loss = loss + _DECAY / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        head.weight.copy_(weight / scale)
        if head.bias is not None:
            head.bias.copy_(bias)
