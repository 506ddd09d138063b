"""The YAML of a pretraining run: every key, its default, its limits. No torch here."""

import copy
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from evener.errors import ConfigError

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class DataConfig(_Section):
    """Where the text comes from and how it is cut."""

    path: str | list[str] | None = Field(
        default=None,
        description="text file, folder, or a list of them; the standard library's sources",
    )
    seq_len: Annotated[int, Field(ge=2)] = Field(default=256, description="tokens of one sample")
    tokenizer: str | None = Field(
        default=None, description="tokenizer folder; byte-level without one"
    )
    suffixes: list[str] | None = Field(default=None, description="file endings taken from folders")
    exclude: list[str] = Field(default_factory=list, description="globs of files to leave out")
    heldout_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05, description="documents kept for the held-out loss"
    )
    cache: str | None = Field(default=None, description="folder of tokenised data; beside the runs")

    @property
    def paths(self) -> list[str]:
        """The sources as a list; empty for the standard library."""
        if self.path is None:
            return []
        return [self.path] if isinstance(self.path, str) else list(self.path)


class ModelConfig(_Section):
    """A local model folder, or a configuration to start from scratch with."""

    path: str | None = Field(default=None, description="local folder to go on from")
    type: str = Field(default="llama", description="transformers model type")
    config: dict[str, Any] = Field(
        default_factory=dict, description="keys of that type's transformers configuration"
    )


class OptimizerConfig(_Section):
    """AdamW and its schedule: linear warm-up, then cosine, both by committed tokens."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    warmup: Fraction = Field(default=0.1, description="part of the run's tokens")
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate / lr")
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class EvalConfig(_Section):
    """Held-out loss, over all ranks."""

    every: Annotated[int, Field(ge=0)] = Field(
        default=100, description="windows; 0: only at the end"
    )
    max_sequences: Positive | None = Field(default=None, description="of the held-out split; all")


class CheckpointConfig(_Section):
    """When to save."""

    every: Annotated[int, Field(ge=0)] = Field(
        default=200, description="windows; 0: only at the end"
    )
    keep_last: Positive = 3


class SampleConfig(_Section):
    """Text written by the model at the end."""

    prompt: str = "def "
    num_tokens: Annotated[int, Field(ge=0)] = 160
    temperature: Annotated[float, Field(ge=0)] = 0.6


class RunConfig(_Section):
    """Everything about one pretraining run."""

    name: str | None = Field(default=None, description="run folder; the YAML's name")
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sample: SampleConfig = SampleConfig()
    batch_size: Positive = Field(
        default=32, description="samples of one optimizer step, whole team"
    )
    micro_batch_size: int | Literal["auto"] = "auto"
    max_steps: Positive | None = Field(default=None, description="optimizer steps; or give epochs")
    epochs: Positive = 1
    seed: Annotated[int, Field(ge=0)] = 0
    policy: Literal["sync", "cadence", "async"] = "sync"
    backend: Literal["auto", "gloo", "nccl", "cpu"] = "auto"
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    non_finite: Literal["raise", "skip"] = "raise"
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    measure: bool = Field(default=False, description="measure solo and equal-split speeds first")
    tensorboard: bool = False

    @field_validator("micro_batch_size", mode="before")
    @classmethod
    def _whole_or_auto(cls, value: object) -> object:
        if value == "auto" or (isinstance(value, int) and value >= 1):
            return value
        raise ValueError("give a whole number of samples from 1, or 'auto'")

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value != "sync":
            raise ValueError(f"policy {value!r} is not there yet; allowed: 'sync'")
        return value

    @model_validator(mode="after")
    def _one_model(self) -> "RunConfig":
        if self.model.path is not None and self.model.config:
            raise ValueError("model.path and model.config exclude one another; give one of them")
        return self


def load_run_config(
    path: Path | None,
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Reads and checks a run's configuration.

    Args:
        path: YAML file; ``None`` takes ``base``, or all defaults.
        base: Keys to start from where there is no file.
        overrides: ``key=value`` with dots for sections, values in YAML, such as
            ``optimizer.lr=3e-4``.

    Raises:
        ConfigError: Names the file or key, the value, and what is allowed.
    """
    document = copy.deepcopy(dict(base or {})) if path is None else _read_yaml(path)
    for override in overrides:
        _override(document, override)
    return validate(document, str(path) if path else "the configuration")


def validate(document: Mapping[str, Any], source: str) -> RunConfig:
    """Checks a configuration that has been read; see ``load_run_config``."""
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(error, source)) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    try:
        document = yaml.load(text, Loader=_NumberLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{place}: broken YAML: {problem}; mend the file") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds a {type(document).__name__}; give keys and values, such as "
            "'batch_size: 32'"
        )
    return document


class _NumberLoader(yaml.SafeLoader):
    """YAML 1.1 reads ``3e-4`` as text; people mean the number."""


_NumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _override(document: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r} is not key=value; write e.g. optimizer.lr=3e-4")
    try:
        value = yaml.load(text, Loader=_NumberLoader)
    except yaml.YAMLError:
        raise ConfigError(f"--set {key}: the value {text!r} is not YAML") from None
    *sections, last = key.strip().split(".")
    place = document
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {override!r}: {section!r} is a value, not a section")
        place = inner
    place[last] = value


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for problem in error.errors():
        place = [str(p) for p in problem["loc"]]
        key = ".".join(place) or "the file"
        if problem["type"] == "extra_forbidden":
            allowed = ", ".join(_section_at(place[:-1]).model_fields)
            lines.append(f"unknown key {key!r} (value {problem['input']!r}); allowed: {allowed}")
        elif not place:
            lines.append(str(problem["msg"]).removeprefix("Value error, "))
        else:
            reason = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{key} is {problem['input']!r}: {reason[:1].lower()}{reason[1:]}")
    return f"{source}: " + "; ".join(dict.fromkeys(lines))


def _section_at(place: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = RunConfig
    for name in place:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    return section
