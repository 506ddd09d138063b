"""The keys of a run, for all tasks: defaults and limits. No torch here."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from evener.config.checks import (
    AboveZero,
    Beta,
    Fraction,
    MicroBatchSize,
    Name,
    NotBelowZero,
    NotNegative,
    Number,
    Part,
    Positive,
    Section,
    Whole,
    asks_for,
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
        """Return how many held-out samples each evaluation during a run uses.

        The number does not depend on measured times, so it is the same on every machine and when a
        run resumes. Evaluating a sample takes about a third of the time of training on it, as the
        forward pass is a third of the work. Fewer than 64 samples would be too noisy.

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
    """The keys of all tasks that concern the computation.

    Attributes:
        max_grad_norm: 2-norm that averaged gradients are clipped to; ``None`` does not clip.
        micro_batch_size: Most samples of one forward and backward; ``"auto"`` is the equal share.
        seed: Seed of new weights, of the order of samples and of what is held out.
    """

    max_grad_norm: AboveZero | None = 1.0
    micro_batch_size: MicroBatchSize = "auto"
    seed: NotNegative = 0


class JobConfig(TaskConfig, TrainingOptions):
    """The keys of every job.

    Attributes:
        name: Run folder; the YAML's name.
        eval: When to evaluate the held-out samples.
        checkpoint: When to save.
        batch_size: Samples of one optimizer step: of the whole team in SYNC, else of a rank.
        max_steps: Optimizer steps; or give ``epochs``.
        epochs: Passes over the data, if ``max_steps`` is not given.
        policy: When ranks average, and what; see ``ApplyPolicy``.
        backend: How ranks exchange; see ``AverageBackend``.
        devices: What ranks compute on.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        tensorboard: Write TensorBoard files.
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
    precision: Precision = "auto"
    tensorboard: bool = False
    sinks: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(default_factory=list)

    @field_validator("anchor", "max_anchor", "max_batch_diff", "verify_every", mode="before")
    @classmethod
    def _whole_with_exponent(cls, value: object) -> object:
        # YAML reads `1e2` as a float.
        return int(value) if isinstance(value, float) and value.is_integer() else value

    @property
    def idle_options(self) -> list[str]:
        """Return the options that were given and have no effect with the policy.

        A file may contain them, since ``--set`` can change its policy.
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


# ── pretraining ───────────────────────────────────────────────────────────────────────────────────

BPE = "bpe"
"""The tokenizer that is trained on the corpus; a folder of that name is ``./bpe``."""


class DataConfig(Section):
    """The source of the text, and how it is cut into samples.

    Attributes:
        path: Text file, folder, or a list of them; the standard library's sources.
        seq_len: Tokens of one sample.
        text_key: Key or column of the text in JSON Lines and parquet.
        on_error: What to do with a line or row without a text: ``"stop"`` or ``"skip"``.
        tokenizer: Tokenizer folder, or ``bpe`` to train one; byte-level if left out.
        vocab_size: Ids of the tokenizer that ``bpe`` trains.
        suffixes: File name suffixes that are read from folders.
        exclude: Globs of files to leave out.
        heldout_fraction: Fraction of the documents that is held out for evaluation.
        cache: Folder of tokenised data; beside the runs.
    """

    path: Annotated[
        Name | Annotated[list[Name], Field(min_length=1)] | None,
        asks_for("give the path of a text file or folder, or a list of them"),
    ] = None
    seq_len: Annotated[Whole, Field(ge=2)] = 256
    text_key: Name = "text"
    on_error: Literal["stop", "skip"] = "stop"
    tokenizer: str | None = None
    vocab_size: Annotated[Whole, Field(ge=257)] = 4096
    suffixes: list[str] | None = None
    exclude: list[str] = Field(default_factory=list)
    heldout_fraction: Part = 0.05
    cache: str | None = None

    @model_validator(mode="after")
    def _vocabulary_of_what_is_trained(self) -> Self:
        if "vocab_size" in self.model_fields_set and self.tokenizer != BPE:
            raise ValueError(
                f"vocab_size is {self.vocab_size}, but the tokenizer is not trained by this run "
                f"and has its own size; leave the key out, or set tokenizer to {BPE!r}"
            )
        return self

    @property
    def paths(self) -> list[str]:
        """The sources as a list; empty for the standard library."""
        if self.path is None:
            return []
        return [self.path] if isinstance(self.path, str) else list(self.path)


class HeldoutLossConfig(EvalConfig):
    """Held-out loss, over all ranks.

    Attributes:
        max_sequences: Samples of the held-out split; all.
    """

    max_sequences: Positive | None = None


class SampleConfig(Section):
    """Text written by the model at the end.

    Attributes:
        prompt: Its beginning.
        num_tokens: Its length; 0: none.
        temperature: 0 chooses the likeliest token.
    """

    prompt: str = "def "
    num_tokens: NotNegative = 160
    temperature: NotBelowZero = 0.6


class RunConfig(JobConfig):
    """Everything about one pretraining run.

    Attributes:
        data: The source of the text.
        model: What is trained.
        optimizer: AdamW and its schedule, by committed tokens.
        eval: Held-out loss.
        sample: Text written by the model at the end.
    """

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: HeldoutLossConfig = HeldoutLossConfig()
    sample: SampleConfig = SampleConfig()


# ── classification ────────────────────────────────────────────────────────────────────────────────


def _with_names(value: object) -> object:
    # YAML reads class names that consist of digits as numbers.
    if isinstance(value, Mapping):
        return {str(k) if type(k) is int else k: weight for k, weight in value.items()}
    return value


class LoraConfig(Section):
    """The low-rank adapter; the layers that it is attached to stay frozen.

    Attributes:
        rank: Its rank.
        alpha: The adapter is scaled by ``alpha / rank``.
        dropout: Fraction of its inputs that is dropped in training.
        target_modules: Names of linear layers, or ``"all-linear"``; peft's choice for the model's
            family.
    """

    rank: Positive = 8
    alpha: AboveZero = 16.0
    dropout: Beta = 0.05
    target_modules: list[str] | Literal["all-linear"] | None = None


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
        seq_len: Most tokens of a text; longer texts are truncated at their end.
        end_tokens: End-of-text tokens after a text, if its tokenizer adds none. With a small
            decoder, several positions represent a text better than a single one.
        max_grad_norm: 2-norm that averaged gradients are clipped to; ``None`` does not clip.
        micro_batch_size: Most samples of one forward and backward; ``"auto"`` is the equal share.
        precision: ``"auto"``, ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        non_finite: ``"raise"`` stops on a non-finite loss or gradient, ``"skip"`` skips that
            update.
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
    """Labelled texts, and which of them are held out.

    Attributes:
        path: JSON Lines or CSV; by default, names in the standard library.
        heldout_path: Held-out texts; by default, a part of ``path``.
        heldout_fraction: Fraction of the training file that is held out.
        text_key: Key or column of the text.
        label_key: Key or column of the label.
        group_key: Key or column; texts with the same value are all held out, or none of them.
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
        metric: The metric by which the best adapter is chosen.
        patience: Evaluations without improvement after which the run ends; 0: never.
        baseline: Train a bag-of-words model to compare with.
    """

    every: NotNegative = 50
    metric: Literal["accuracy", "macro_f1", "loss"] = "accuracy"
    patience: NotNegative = 0
    baseline: bool = True


class ClassifyModelConfig(ModelConfig):
    """The base model: a local folder, or a configuration to start from scratch with.

    Attributes:
        adapter: Folder of an adapter of this base model, to continue from.
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
