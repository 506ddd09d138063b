"""The YAML of a pretraining run: every key, its default, its limits. No torch here."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evener.config.checks import (
    Name,
    NotBelowZero,
    NotNegative,
    Part,
    Positive,
    Section,
    Whole,
    asks_for,
)
from evener.config.runs import EvalConfig, JobConfig, ModelConfig, OptimizerConfig

BPE = "bpe"
"""The tokenizer that is trained on the corpus; a folder of that name is ``./bpe``."""


class DataConfig(Section):
    """Where the text comes from and how it is cut.

    Attributes:
        path: Text file, folder, or a list of them; the standard library's sources.
        seq_len: Tokens of one sample.
        text_key: Key or column of the text in JSON Lines and parquet.
        on_error: What a line or row without a text is: an error, or left out (``"skip"``).
        tokenizer: Tokenizer folder, or ``bpe``: trained here; byte-level without one.
        vocab_size: Ids of a tokenizer that is trained here (``bpe``).
        suffixes: File endings taken from folders.
        exclude: Globs of files to leave out.
        heldout_fraction: Part of the documents that is kept for the held-out loss.
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
                f"vocab_size is {self.vocab_size}, but the tokenizer is not trained here, so that "
                f"it has a size of its own; leave the key out, or set tokenizer to {BPE!r}"
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
        temperature: 0 takes the likeliest token.
    """

    prompt: str = "def "
    num_tokens: NotNegative = 160
    temperature: NotBelowZero = 0.6


class RunConfig(JobConfig):
    """Everything about one pretraining run.

    Attributes:
        data: Where the text comes from.
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
