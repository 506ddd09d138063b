"""The YAML of a pretraining run: every key, its default, its limits. No torch here."""

import copy
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from evener.errors import ConfigError
from evener.parsing import short
from evener.planning.elche import ANCHOR, LEAST_OVERHEAD, MAX_ANCHOR, MOST_OVERHEAD
from evener.planning.guard import THRESHOLD
from evener.yaml_files import parse_yaml, read_yaml


def _no_bool(value: object) -> object:
    # YAML reads `yes` and `on` as true, which Python would take for 1.
    if isinstance(value, bool):
        raise ValueError("give a number")
    return value


_Schema = TypeVar("_Schema", bound=BaseModel)


def _whole_or_auto(value: object) -> object:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("give a whole number of samples from 1, or 'auto'")


def _speeds(value: object) -> object:
    speeds = list(value.values()) if isinstance(value, dict) else value
    ranks = list(value) if isinstance(value, dict) else [0]
    if (
        isinstance(speeds, list)
        and speeds
        and all(type(speed) in (int, float) and 0 < speed < math.inf for speed in speeds)
        and all(type(rank) is int and rank >= 0 for rank in ranks)
    ):
        return value
    raise ValueError("give a speed above 0 for each rank, such as [1, 0.33], or by rank: {1: 0.33}")


def _import_paths(value: object) -> object:
    if isinstance(value, list) and all(
        isinstance(path, str) and re.fullmatch(r"[\w.]+:\w+", path) for path in value
    ):
        return value
    raise ValueError("give a list of import paths, such as [my_package.tracking:make_sink]")


Whole = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Positive = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Whole, Field(ge=0)]
SpeedHint = Annotated[list[float] | dict[int, float], BeforeValidator(_speeds)]
SinkPaths = Annotated[list[str], BeforeValidator(_import_paths)]
MicroBatchSize = Annotated[int | Literal["auto"], BeforeValidator(_whole_or_auto)]


BPE = "bpe"
"""The tokenizer that is trained on the corpus; a folder of that name is ``./bpe``."""


class Section(BaseModel):
    """A group of keys; unknown ones are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class DataConfig(Section):
    """Where the text comes from and how it is cut."""

    path: str | list[str] | None = Field(
        default=None,
        description="text file, folder, or a list of them; the standard library's sources",
    )
    seq_len: Annotated[Whole, Field(ge=2)] = Field(default=256, description="tokens of one sample")
    text_key: Annotated[str, Field(min_length=1)] = Field(
        default="text", description="key or column of the text in JSON Lines and parquet"
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop", description="what a line or row without a text is: an error, or counted"
    )
    tokenizer: str | None = Field(
        default=None, description="tokenizer folder, or bpe: trained here; byte-level without one"
    )
    vocab_size: Annotated[Whole, Field(ge=257)] = Field(
        default=4096, description="ids of a tokenizer that is trained here (bpe)"
    )
    suffixes: list[str] | None = Field(default=None, description="file endings taken from folders")
    exclude: list[str] = Field(default_factory=list, description="globs of files to leave out")
    heldout_fraction: Annotated[Number, Field(gt=0, lt=1)] = Field(
        default=0.05, description="documents kept for the held-out loss"
    )
    cache: str | None = Field(default=None, description="folder of tokenised data; beside the runs")

    @field_validator("path", mode="before")
    @classmethod
    def _path_or_paths(cls, value: object) -> object:
        paths = value if isinstance(value, list) else [value]
        if value is None or (paths and all(isinstance(path, str) and path for path in paths)):
            return value
        raise ValueError("give the path of a text file or folder, or a list of them")

    @model_validator(mode="after")
    def _vocabulary_of_what_is_trained(self) -> "DataConfig":
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


class ModelConfig(Section):
    """A local model folder, or a configuration to start from scratch with."""

    path: str | None = Field(default=None, description="local folder to go on from")
    type: str = Field(default="llama", description="transformers model type")
    config: dict[str, Any] = Field(
        default_factory=dict, description="keys of that type's transformers configuration"
    )


class OptimizerConfig(Section):
    """AdamW and its schedule: linear warm-up, then cosine, both by committed tokens."""

    lr: Annotated[Number, Field(gt=0)] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[Number, Field(gt=0)] = 1e-8
    weight_decay: Annotated[Number, Field(ge=0)] = 0.1
    warmup: Fraction = Field(default=0.1, description="part of the run's tokens")
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate / lr")
    max_grad_norm: Annotated[Number, Field(gt=0)] | None = 1.0


class EvalConfig(Section):
    """When the held-out samples are evaluated, over all ranks."""

    every: NotNegative = Field(default=100, description="windows; 0: only at the end")


class HeldoutLossConfig(EvalConfig):
    """Held-out loss, over all ranks."""

    max_sequences: Positive | None = Field(default=None, description="of the held-out split; all")


class CheckpointConfig(Section):
    """When to save."""

    every: NotNegative = Field(default=200, description="windows; 0: only at the end")
    keep_last: Positive = 3
    retry_s: Annotated[Number, Field(ge=0)] = Field(
        default=600.0, description="seconds for which the run's last save is tried again"
    )


class SampleConfig(Section):
    """Text written by the model at the end."""

    prompt: str = "def "
    num_tokens: NotNegative = 160
    temperature: Annotated[Number, Field(ge=0)] = 0.6


class JobConfig(Section):
    """What every job of the driver (``tasks/job.py``) can be told."""

    name: str | None = Field(default=None, description="run folder; the YAML's name")
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    batch_size: Positive = Field(
        default=32,
        description="samples of one optimizer step: of the whole team in sync, else of a rank",
    )
    micro_batch_size: MicroBatchSize = "auto"
    max_steps: Positive | None = Field(default=None, description="optimizer steps; or give epochs")
    epochs: Positive = 1
    seed: NotNegative = 0
    policy: Literal["sync", "cadence", "async"] = "sync"
    speed_hint: SpeedHint | None = Field(
        default=None, description="speeds of the ranks, relative to one another; larger is faster"
    )
    anchor: Positive = Field(
        default=ANCHOR,
        description="local steps of the slowest rank between averages, to start from",
    )
    overhead_target: Annotated[Number, Field(ge=LEAST_OVERHEAD, le=MOST_OVERHEAD)] = Field(
        default=0.1, description="part of the time that averaging may take"
    )
    max_anchor: NotNegative = Field(
        default=MAX_ANCHOR, description="the anchor grows no further; 0: it does not grow"
    )
    max_batch_diff: NotNegative | None = Field(
        default=None, description="local steps by which a rank may lead another; no limit"
    )
    divergence_guard: Annotated[
        Literal["none", "level"], BeforeValidator(lambda v: v or "none")
    ] = "level"
    divergence_threshold: Annotated[Number, Field(gt=0)] = THRESHOLD
    lr_scale_ratio: Annotated[Number, Field(ge=0)] = Field(
        default=0.0, description="lr times 1 + (ranks - 1) times this; not in sync"
    )
    backend: Literal["auto", "gloo", "nccl", "cpu"] = "auto"
    devices: Literal["auto", "cpu", "cuda", "xpu", "mps", "accelerator"] = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    non_finite: Literal["raise", "skip"] = "raise"
    verify_every: NotNegative = Field(
        default=0,
        description="windows after which the ranks' weights are compared, and at the end; 0: never",
    )
    timeout_s: Annotated[Number, Field(gt=0)] = 600.0
    measure: bool = Field(
        default=False, description="measure each rank alone and an equal split, at the end"
    )
    tensorboard: bool = False
    sinks: SinkPaths = Field(
        default_factory=list,
        description="import paths of functions that make a Sink, such as tracking:make_sink",
    )


class RunConfig(JobConfig):
    """Everything about one pretraining run."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: HeldoutLossConfig = HeldoutLossConfig()
    sample: SampleConfig = SampleConfig()

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
    """Reads and checks the configuration of a pretraining run; see ``load_config``."""
    return load_config(RunConfig, path, overrides, base=base)


def load_config(
    schema: type[_Schema],
    path: Path | None,
    overrides: Iterable[str] = (),
    *,
    base: Mapping[str, Any] | None = None,
) -> _Schema:
    """Reads and checks a configuration.

    Args:
        schema: Its keys.
        path: YAML file; ``None`` takes ``base``, or all defaults.
        base: Keys to start from where there is no file.
        overrides: ``key=value`` with dots for sections, values in YAML, such as
            ``optimizer.lr=3e-4``.

    Raises:
        ConfigError: Names the file or key, the value, and what is allowed.
    """
    document = copy.deepcopy(dict(base or {})) if path is None else read_yaml(path)
    overridden = [_override(document, override) for override in overrides]
    source = "the configuration" if path is None else str(path)
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_explain(schema, error, source, overridden)) from None


def _override(document: dict[str, Any], override: str) -> str:
    """Puts a ``--set`` into the document; returns its key."""
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError(f"--set {override!r} is not key=value; write e.g. optimizer.lr=3e-4")
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        raise ConfigError(
            f"--set {key}: the value {short(text)} is not YAML; put text with special characters "
            "in quotes"
        ) from None
    place = document
    for section in sections:
        inner = place.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(
                f"--set {override!r}: {section!r} is {short(inner)}, a value and no section; leave "
                f"{last!r} out"
            )
        place = inner
    place[last] = value
    return key.strip()


# ── words for what pydantic finds ────────────────────────────────────────────────────────────────

#: Beginning of pydantic's error type -> what to do.
_REMEDIES = {
    "int_": "give a whole number",
    "float_": "give a number",
    "finite_number": "give a finite number",
    "bool_": "give true or false",
    "string_": "give text (quote it if it looks like something else)",
    "list_": "give a list, such as [a, b]",
    "tuple_": "give a list, such as [0.9, 0.95]",
    "missing": "a number is missing",
    "too_long": "there are too many",
    "dict_": "give keys and values",
    "model_": "give keys and values",
    "invalid_key": "keys are text",
    "greater_than_equal": "give {ge} or more",
    "greater_than": "give more than {gt}",
    "less_than_equal": "give {le} or less",
    "less_than": "give less than {lt}",
}


def _explain(
    schema: type[BaseModel], error: ValidationError, source: str, overridden: Sequence[str]
) -> str:
    """One line: for each problem where it is, the value, and what to do."""
    problems: dict[str, list[str]] = {}
    allowed: dict[str, str] = {}
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        key, value = ".".join(place), problem["input"]
        if problem["type"] == "extra_forbidden":
            fields = list(_section_at(schema, place[:-1]).model_fields)
            text = f"unknown key {key!r} (value {short(value)})"
            if close := difflib.get_close_matches(place[-1], fields, n=1):
                text += f", did you mean {close[0]!r}?"
            allowed[".".join(place[:-1])] = ", ".join(fields)
        elif not place:
            text = str(problem["msg"]).removeprefix("Value error, ")
        else:
            text = f"{key} is {_shown(value)}: {_remedy(problem)}"
        by_user = [
            o for o in overridden if f"{key}.".startswith(f"{o}.") or o.startswith(f"{key}.")
        ]
        lines = problems.setdefault(f"--set {by_user[-1]}" if by_user else source, [])
        lines.append(text)
    said = "; ".join(f"{where}: {'; '.join(lines)}" for where, lines in problems.items())
    for section, names in allowed.items():
        said += f"; allowed {f'in {section!r}' if section else 'keys'}: {names}"
    return said


def _remedy(problem: Mapping[str, Any]) -> str:
    kind, context = str(problem["type"]), problem.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"choose one of {str(context['expected']).replace(' or ', ', ')}"
    # The longest beginning decides, as `greater_than_equal` begins with `greater_than`.
    known = [start for start in _REMEDIES if kind.startswith(start)]
    if not known:
        return str(problem["msg"])
    return _REMEDIES[max(known, key=len)].format(**context)


def _shown(value: object) -> str:
    return "empty" if value is None else short(value)


def _section_at(section: type[BaseModel], place: Sequence[str]) -> type[BaseModel]:
    for name in place:
        annotation = section.model_fields[name].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        section = annotation
    return section
