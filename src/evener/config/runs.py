"""The keys that runs of all tasks have. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from evener.config.checks import (
    AboveZero,
    Beta,
    Fraction,
    MicroBatchSize,
    NotBelowZero,
    NotNegative,
    Number,
    Positive,
    Section,
)
from evener.config.settings import LOCAL_OPTIONS, DdpConfig, TrainingOptions
from evener.errors import ConfigError

_LEAST_EVALUATED = 64

Precision = Literal["auto", "fp32", "bf16", "fp16"]


class ModelConfig(Section):
    """A local model folder, or a configuration to start from scratch with.

    Attributes:
        path: Local folder to continue from.
        type: Model type of transformers.
        config: Keys of that type's transformers configuration.
    """

    path: str | None = None
    type: str = "llama"
    config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _saved_or_new(self) -> Self:
        if self.path is not None and self.config:
            raise ConfigError("model.path and model.config exclude one another; give one of them")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule: linear warm-up, then cosine, both by committed tokens or samples.

    Attributes:
        lr: Base learning rate.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of matrices; none on norms and biases.
        warmup: Part of the run in which the learning rate rises.
        min_lr_ratio: Last learning rate / ``lr``.
    """

    lr: AboveZero = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: AboveZero = 1e-8
    weight_decay: NotBelowZero = 0.1
    warmup: Fraction = 0.1
    min_lr_ratio: Fraction = 0.1


class EvalConfig(Section):
    """When the held-out samples are evaluated, over all ranks.

    Attributes:
        every: Windows; 0: only at the end.
        time_fraction: Most of a run's time that evaluations take, estimated; 1: no limit.
    """

    every: NotNegative = 100
    time_fraction: Annotated[Number, Field(gt=0, le=1)] = 0.05

    def num_samples(self, count: int, batch_size: int) -> int:
        """Return how many held-out samples are evaluated in the course of a run.

        The clock has no say in it, so that the number is the same on every machine and when a run
        resumes. A sample is evaluated in about a third of the time in which it is trained on, as
        the forward pass is a third of the work. Fewer than 64 would say little.

        Args:
            count: All held-out samples.
            batch_size: Samples of a window, at least.
        """
        if not self.every or self.time_fraction == 1:
            return count
        ratio = self.time_fraction / (1 - self.time_fraction)
        return min(count, max(_LEAST_EVALUATED, round(3 * ratio * self.every * batch_size)))


class CheckpointConfig(Section):
    """When to save.

    Attributes:
        every: Optimizer steps; the first save is at the start. 0: only at the end.
        keep_last: Checkpoints kept.
        retry_s: Seconds for which the run's last save is tried again, if it fails; 0: once.
    """

    every: NotNegative = 200
    keep_last: Positive = 3
    retry_s: NotBelowZero = 600.0


class TaskConfig(Section):
    """What all tasks let the user say of their computation.

    Attributes:
        max_grad_norm: 2-norm that averaged gradients are clipped to; ``None`` does not clip. It may
            stand in the section ``optimizer``, too, as it did in earlier versions.
        micro_batch_size: Most samples of one forward and backward; ``"auto"`` is the equal share.
        seed: Seed of new weights, of the order of samples and of what is held out.
    """

    max_grad_norm: AboveZero | None = 1.0
    micro_batch_size: MicroBatchSize = "auto"
    seed: NotNegative = 0

    @model_validator(mode="before")
    @classmethod
    def _take_norm_from_optimizer(cls, keys: Any) -> Any:
        section = keys.get("optimizer") if isinstance(keys, Mapping) else None
        if not isinstance(section, Mapping) or "max_grad_norm" not in section:
            return keys
        if "max_grad_norm" in keys:
            raise ValueError("optimizer.max_grad_norm means max_grad_norm, which is given as well")
        rest = dict(section)
        return {**keys, "max_grad_norm": rest.pop("max_grad_norm"), "optimizer": rest}


class JobConfig(TaskConfig, TrainingOptions):
    """What every job of the driver can be told.

    Attributes:
        name: Run folder; the YAML's name.
        eval: When to evaluate the held-out samples.
        checkpoint: When to save.
        batch_size: Samples of one optimizer step: of the whole team in SYNC, else of a rank.
        max_steps: Optimizer steps; or give ``epochs``.
        epochs: Passes over the data, where there is no ``max_steps``.
        policy: When ranks average, and what; see ``ApplyPolicy``.
        backend: How ranks exchange; see ``AverageBackend``.
        devices: What ranks compute on.
        measure: Measure each rank alone, all side by side, and an equal split, at the end.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        tensorboard: Write TensorBoard files.
        events_mb: Most MB of the run's event files together; then the oldest but the first goes.
        sinks: Import paths of functions that make a ``Sink``, such as ``tracking:make_sink``.
    """

    name: str | None = None
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    batch_size: Positive = 32
    max_steps: Positive | None = None
    epochs: Positive = 1
    policy: Literal["sync", "cadence", "async"] = "sync"
    backend: Literal["auto", "gloo", "nccl", "cpu"] = "auto"
    devices: Literal["auto", "cpu", "cuda", "xpu", "mps", "accelerator"] = "auto"
    measure: bool = False
    precision: Precision = "auto"
    tensorboard: bool = False
    events_mb: Positive = 1024
    sinks: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(default_factory=list)

    @field_validator("anchor", "max_anchor", "max_batch_diff", "verify_every", mode="before")
    @classmethod
    def _whole_with_exponent(cls, value: object) -> object:
        # YAML reads `1e2` as a float.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @property
    def idle_options(self) -> list[str]:
        """Options that were given and have no effect with the policy.

        A file may hold them: ``--set`` changes its policy.
        """
        return [n for n in LOCAL_OPTIONS if self.policy == "sync" and n in self.model_fields_set]

    def ddp_config(
        self, *, emulate_slow: Mapping[int, float], stop_when: Callable[[], bool], quiet: bool
    ) -> DdpConfig:
        """Return the options of the run's team; those without effect in SYNC are left out."""
        left_out = LOCAL_OPTIONS if self.policy == "sync" else ()
        names = {option.name for option in fields(TrainingOptions)}.difference(left_out)
        shared: dict[str, Any] = {name: getattr(self, name) for name in names}
        return DdpConfig(**shared, emulate_slow=emulate_slow, stop_when=stop_when, quiet=quiet)
