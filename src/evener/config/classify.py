"""The keys of a classification run: every key, its default, its limits. No torch here."""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from evener.config.checks import (
    AboveZero,
    Beta,
    Name,
    NotBelowZero,
    NotNegative,
    Part,
    Positive,
    Section,
    Whole,
    asks_for,
)
from evener.config.runs import (
    EvalConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    Precision,
    TaskConfig,
)
from evener.errors import ConfigError


def _with_names(value: object) -> object:
    # YAML takes the names of classes that are numbers for such.
    if isinstance(value, Mapping):
        return {str(k) if type(k) is int else k: weight for k, weight in value.items()}
    return value


class LoraConfig(Section):
    """The low-rank adapter; what it is attached to stays frozen.

    Attributes:
        rank: Its rank.
        alpha: The adapter is scaled by ``alpha / rank``.
        dropout: Part of its inputs that is dropped in training.
        target_modules: Names of linear layers; those usual for the model's family.
    """

    rank: Positive = 8
    alpha: AboveZero = 16.0
    dropout: Beta = 0.05
    target_modules: list[str] | None = None


class AdapterOptimizerConfig(OptimizerConfig):
    """AdamW over adapter and head; warm-up and cosine by committed samples.

    Attributes:
        head_lr_ratio: Learning rate of the head / ``lr``.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: NotBelowZero = 0.01
    head_lr_ratio: AboveZero = 1.0


class ClassifyConfig(TaskConfig):
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
        max_grad_norm: 2-norm that averaged gradients are clipped to; ``None`` does not clip.
        micro_batch_size: Most samples of one forward and backward; ``"auto"`` is the equal share.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        non_finite: ``"raise"`` stops on a non-finite loss or gradient, ``"skip"`` leaves that
            update out.
        seed: Seed of the head, the adapter, the order of samples and dropout.
    """

    labels: list[str] | None = None
    lora: LoraConfig = LoraConfig()
    optimizer: AdapterOptimizerConfig = AdapterOptimizerConfig()
    class_weights: Annotated[
        Literal["balanced"] | list[AboveZero] | dict[str, AboveZero] | None,
        BeforeValidator(_with_names),
        asks_for(
            "give 'balanced', a list with a number above 0 for each class, or names and numbers"
        ),
    ] = None
    seq_len: Annotated[Whole, Field(ge=2)] = 128
    end_tokens: Positive = 1
    precision: Precision = "auto"
    non_finite: Literal["raise", "skip"] = "raise"

    @field_validator("labels")
    @classmethod
    def _different(cls, names: list[str] | None) -> list[str] | None:
        if names is not None and (len(names) < 2 or len(set(names)) != len(names)):
            raise ValueError("give two or more different names")
        return names

    @model_validator(mode="after")
    def _room_for_text(self) -> Self:
        if self.end_tokens >= self.seq_len:
            raise ValueError(
                f"end_tokens={self.end_tokens} leave no room for text in seq_len={self.seq_len}; "
                "give fewer end_tokens or a larger seq_len"
            )
        return self


class ClassifyDataConfig(Section):
    """Labelled texts, and what of them is held out.

    Attributes:
        path: JSON Lines or CSV; functions of the standard library without one.
        heldout_path: Held-out texts; a part of ``path``.
        heldout_fraction: Part of the training file that is held out.
        text_key: Key or column of the text.
        label_key: Key or column of the label.
        group_key: Texts that have this in common are all held out, or none of them.
        tokenizer: Tokenizer folder; that of the model.
    """

    path: str | None = None
    heldout_path: str | None = None
    heldout_fraction: Part = 0.2
    text_key: Name = "text"
    label_key: Name = "label"
    group_key: Name | None = None
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _trains_on_what_is_given(self) -> Self:
        if self.path is None and self.heldout_path is not None:
            raise ConfigError("data.heldout_path needs data.path; give both, or none")
        return self


class ClassifyEvalConfig(EvalConfig):
    """When the held-out texts are classified, and when that ends the run.

    Attributes:
        metric: Decides which adapter is the best.
        patience: Evaluations without a better one that end the run; 0: never.
        baseline: Train a bag-of-words model to compare with.
    """

    every: NotNegative = 50
    metric: Literal["accuracy", "macro_f1", "loss"] = "accuracy"
    patience: NotNegative = 0
    baseline: bool = True


class ClassifyModelConfig(ModelConfig):
    """The base model: a local folder, or a configuration to start from scratch with.

    Attributes:
        adapter: Folder of an adapter that this base was trained with, to continue from.
    """

    adapter: str | None = None


class ClassifyRunConfig(ClassifyConfig, JobConfig):
    """Everything about one classification run.

    Attributes:
        data: Labelled texts.
        model: The base model.
        eval: When the held-out texts are classified.
        fit_head: Fit the head on the frozen base before the adapter is trained.
    """

    data: ClassifyDataConfig = ClassifyDataConfig()
    model: ClassifyModelConfig = ClassifyModelConfig()
    eval: ClassifyEvalConfig = ClassifyEvalConfig()
    fit_head: bool = True
    epochs: Positive = 3
