"""The optimizer of a run, and its learning rate by the team's committed progress."""

import math
from typing import Literal

import torch
from torch import nn
from torch.optim import AdamW

from evener.config.runs import AdapterOptimizerConfig, OptimizerConfig
from evener.engine.results import Progress


def make_optimizer(model: nn.Module, settings: OptimizerConfig) -> AdamW:
    """Return AdamW over the trainable parameters, in two groups.

    With ``AdapterOptimizerConfig`` these are the adapter and the head, which has another learning
    rate. Otherwise they are matrices, and vectors (norms, biases), which have no weight decay.

    Args:
        model: Its trainable parameters are optimized.
        settings: The hyper-parameters.
    """
    of_adapter = isinstance(settings, AdapterOptimizerConfig)
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_first = ".lora_" in name if of_adapter else parameter.dim() >= 2
            groups[0 if is_first else 1].append(parameter)
    optimizer = AdamW([{"params": group} for group in groups], lr=settings.lr, fused=True)
    apply_settings(optimizer, settings)
    return optimizer


def apply_settings(optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> None:
    """Set the hyper-parameters of an optimizer of ``make_optimizer``.

    A checkpoint restores those with which it was written; the user's present ones take precedence.
    """
    lr_ratios, decays = (1.0, 1.0), (settings.weight_decay, 0.0)
    if isinstance(settings, AdapterOptimizerConfig):
        lr_ratios, decays = (1.0, settings.head_lr_ratio), (settings.weight_decay,) * 2
    for group, ratio, weight_decay in zip(optimizer.param_groups, lr_ratios, decays, strict=True):
        lr = settings.lr * ratio
        group.update(lr=lr, initial_lr=lr, betas=settings.betas, eps=settings.eps)
        group["weight_decay"] = weight_decay


class WarmupCosine:
    """Linear warm-up, then cosine, by the team's committed progress.

    Args:
        settings: Part of the run that is warm-up, and the last rate.
        counted: Unit of the run's length: ``"weight"`` (tokens of a language model), ``"samples"``
            or ``"steps"``.
        total: Length of the run, if it is known.
    """

    def __init__(
        self,
        settings: OptimizerConfig,
        counted: Literal["weight", "samples", "steps"],
        total: float = 1.0,
    ) -> None:
        self._warmup = settings.warmup
        self._least = settings.min_lr_ratio
        self._counted = counted
        self._total = total

    def set_total(self, total: float) -> None:
        """Set the length of the run."""
        self._total = max(1.0, total)

    def __call__(self, progress: Progress) -> float:
        """Return the factor of the base learning rate for the next update."""
        count: float = getattr(progress, self._counted)
        done = min(1.0, count / self._total)
        if done < self._warmup:
            return max(done / self._warmup, 1e-3)
        part = (done - self._warmup) / max(1e-9, 1 - self._warmup)
        return self._least + (1 - self._least) * 0.5 * (1 + math.cos(math.pi * part))
