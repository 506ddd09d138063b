"""The keys of a classification run: every key, its default, its limits. No torch here."""

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from evener.config.pretrain import (
    Beta,
    CheckpointConfig,
    MicroBatchSize,
    ModelConfig,
    NotNegative,
    Number,
    OptimizerConfig,
    Positive,
    Section,
    SinkPaths,
    Whole,
)

_AboveZero = Annotated[Number, Field(gt=0)]


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class LoraConfig(Section):
    """The low-rank adapter; what it is attached to stays frozen."""

    rank: Positive = 8
    alpha: _AboveZero = Field(default=16.0, description="the adapter is scaled by alpha / rank")
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    target_modules: list[str] | None = Field(
        default=None, description="names of linear layers; those usual for the model's family"
    )


class AdapterOptimizerConfig(OptimizerConfig):
    """AdamW over adapter and head; warm-up and cosine by committed samples."""

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: Annotated[Number, Field(ge=0)] = 0.01
    head_lr_ratio: _AboveZero = Field(default=1.0, description="learning rate of the head / lr")


class ClassifyConfig(Section):
    """What is trained, and how.

    Attributes:
        labels: Names of the classes, in the order of their indices; ``None`` takes those of the
            training data.
        lora: The adapter.
        optimizer: AdamW and its schedule.
        class_weights: A weight for each class, by index or by name, or ``"balanced"`` for weights
            in inverse proportion to the classes' numbers of training samples; ``None`` for 1 each.
        seq_len: Tokens of a text that the model sees; what is longer is cut at its end.
        end_tokens: End-of-text tokens after a text, where its tokenizer adds none. A small decoder
            sums a text up better over several positions than at a single one.
        micro_batch_size: Most samples of one forward and backward; ``"auto"`` is the equal share.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        non_finite: ``"raise"`` stops on a non-finite loss or gradient, ``"skip"`` leaves that
            update out.
        seed: Seed of the head, the adapter, the order of samples and dropout.
    """

    labels: list[str] | None = Field(default=None, description="class names; those of the data")
    lora: LoraConfig = LoraConfig()
    optimizer: AdapterOptimizerConfig = AdapterOptimizerConfig()
    class_weights: Literal["balanced"] | list[_AboveZero] | dict[str, _AboveZero] | None = None
    seq_len: Annotated[Whole, Field(ge=2)] = Field(default=128, description="tokens of one text")
    end_tokens: Positive = Field(
        default=1, description="end-of-text tokens after a text, where its tokenizer adds none"
    )
    micro_batch_size: MicroBatchSize = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    non_finite: Literal["raise", "skip"] = "raise"
    seed: NotNegative = 0

    @field_validator("labels")
    @classmethod
    def _different(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and (len(value) < 2 or len(set(value)) != len(value)):
            raise ValueError("give two or more different names")
        return value

    @field_validator("class_weights", mode="before")
    @classmethod
    def _known_weights(cls, value: object) -> object:
        if value is None or value == "balanced":
            return value
        if isinstance(value, dict):  # YAML takes the names of classes that are numbers for such
            value = {str(k) if _is_index(k) else k: weight for k, weight in value.items()}
        named = not isinstance(value, dict) or all(isinstance(key, str) for key in value)
        numbers = list(value.values()) if isinstance(value, dict) else value
        if named and isinstance(numbers, list) and all(_is_weight(number) for number in numbers):
            return value
        raise ValueError(
            "give 'balanced', a list with a number above 0 for each class, or names and numbers"
        )

    @model_validator(mode="after")
    def _room_for_text(self) -> "ClassifyConfig":
        if self.end_tokens >= self.seq_len:
            raise ValueError(
                f"end_tokens={self.end_tokens} leave no room for text in seq_len={self.seq_len}; "
                "give fewer end_tokens or a larger seq_len"
            )
        return self


class ClassifyDataConfig(Section):
    """Labelled texts, and what of them is held out."""

    path: str | None = Field(
        default=None, description="JSON Lines or CSV; functions of the standard library without one"
    )
    heldout_path: str | None = Field(default=None, description="held-out texts; a part of path")
    heldout_fraction: Annotated[Number, Field(gt=0, lt=1)] = Field(
        default=0.2, description="part of the training file that is held out"
    )
    text_key: Annotated[str, Field(min_length=1)] = "text"
    label_key: Annotated[str, Field(min_length=1)] = "label"
    group_key: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="texts that have this in common are all held out, or none of them"
    )
    tokenizer: str | None = Field(default=None, description="tokenizer folder; that of the model")


class ClassifyEvalConfig(Section):
    """When the held-out texts are classified, and when that ends the run."""

    every: NotNegative = Field(default=50, description="windows; 0: only at the end")
    metric: Literal["accuracy", "macro_f1", "loss"] = Field(
        default="accuracy", description="decides which adapter is the best"
    )
    patience: NotNegative = Field(
        default=0, description="evaluations without a better one that end the run; 0: never"
    )
    baseline: bool = Field(default=True, description="train a bag-of-words model to compare with")


class ClassifyModelConfig(ModelConfig):
    """The base model: a local folder, or a configuration to start from scratch with."""

    adapter: str | None = Field(
        default=None, description="folder of an adapter that this base was trained with, to go on"
    )


class ClassifyRunConfig(ClassifyConfig):
    """Everything about one classification run."""

    name: str | None = Field(default=None, description="run folder; the YAML's name")
    data: ClassifyDataConfig = ClassifyDataConfig()
    model: ClassifyModelConfig = ClassifyModelConfig()
    eval: ClassifyEvalConfig = ClassifyEvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fit_head: bool = Field(
        default=True, description="fit the head on the frozen base before the adapter is trained"
    )
    batch_size: Positive = Field(
        default=32, description="samples of one optimizer step, whole team"
    )
    max_steps: Positive | None = Field(default=None, description="optimizer steps; or give epochs")
    epochs: Positive = 3
    backend: Literal["auto", "gloo", "nccl", "cpu"] = "auto"
    devices: Literal["auto", "cpu", "cuda", "xpu", "mps", "accelerator"] = "auto"
    timeout_s: _AboveZero = 600.0
    tensorboard: bool = False
    sinks: SinkPaths = Field(
        default_factory=list,
        description="import paths of functions that make a Sink, such as tracking:make_sink",
    )

    @model_validator(mode="after")
    def _one_of_each(self) -> "ClassifyRunConfig":
        if self.model.path is not None and self.model.config:
            raise ValueError("model.path and model.config exclude one another; give one of them")
        if self.data.path is None and self.data.heldout_path is not None:
            raise ValueError("data.heldout_path needs data.path; give both, or none")
        return self
