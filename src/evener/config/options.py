"""What the command line hands to a command, or a function to a task, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from evener.team.nodes import NodeOptions

Allowed = Literal["data", "precision"]
"""What a resume may change when the user says so."""

ALLOWED: tuple[Allowed, ...] = get_args(Allowed)

Keys = Mapping[str, Any] | str | Path | None
"""What ``pretrain`` and ``classify`` take: keys of a run, or a YAML file that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(NodeOptions):
    """What the user said about ranks; the launcher reads it.

    Attributes:
        nproc: Local ranks asked for; ``None`` when the user did not say.
        emulate_slow: ``RANK:FACTOR`` texts, which ``engine.emulate.parse_emulation`` reads.
        elastic: Fewest and most workers of an elastic team, as ``MIN:MAX``.
        max_failures: An elastic team stops when more workers than this have failed.
        token_file: What workers must know; on one machine it is made for the run by default.
        address: At which workers of other machines reach those of this one.
        dashboard: Serve a dashboard for as long as the ranks run.
    """

    nproc: int | None = None
    emulate_slow: Sequence[str] = ()
    elastic: str | None = None
    max_failures: int | None = None
    token_file: Path | None = None
    address: str | None = None
    dashboard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(LaunchOptions):
    """Options of a task, as the user gave them.

    Attributes:
        config: Keys of the run, or the YAML file that holds them.
        overrides: ``key=value`` texts of ``--set``, in order; the last one wins.
        resume: Continue from the newest complete checkpoint.
        out: Folder that runs go to.
        name: Name of the run; ``None`` for the configuration's.
        quiet: Print neither the team nor the progress line.
    """

    config: Keys = None
    overrides: Sequence[str] = ()
    resume: bool = False
    out: Path = Path("runs")
    name: str | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(TaskOptions):
    """Options of ``evener classify``; without a file and keys, names in the standard library.

    Attributes:
        has_samples: Samples are given from Python, instead of ``data.path``.
        predict: File of texts to classify with a finished run, instead of training.
    """

    has_samples: bool = False
    predict: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainOptions(TaskOptions):
    """Options of ``evener pretrain``; without a file and keys, every key has its default.

    Attributes:
        allow: What may differ from the checkpoint's run: ``data``, ``precision``.
        demo: Train the small model on text that every Python has.
    """

    allow: Sequence[Allowed] = ()
    demo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of ``evener bench``, as the user gave them.

    Attributes:
        config: The run's YAML file.
        policies: Policies to try, by name.
        backends: Averaging backends to try, by name.
        minutes: Training time of each combination, over all its rounds.
        rounds: In how many turns that time is spent.
        nproc: Local ranks asked for; ``None`` when the user did not say.
        emulate_slow: ``RANK:FACTOR`` texts.
        overrides: ``key=value`` texts of ``--set``.
        out: Folder that the bench's folder goes to.
        name: Its name.
    """

    config: Path
    policies: Sequence[str] = ("sync", "cadence", "async")
    backends: Sequence[str] = ("auto",)
    minutes: float = 2.0
    rounds: int = 2
    nproc: int | None = None
    emulate_slow: Sequence[str] = ()
    overrides: Sequence[str] = ()
    out: Path = Path("runs")
    name: str = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``evener plan``, as the user gave them.

    Attributes:
        run: Folder of a run that has measured the team.
        speeds: Samples per second of each rank alone, such as ``120,48``.
        calibrate: Time this machine's devices.
        add: Samples per second of further ranks.
        params: Parameters that are trained, such as ``350M``.
        tokens: Tokens of a sample, for a calibration.
        bandwidth: Between two ranks, such as ``1Gbit``.
        latency: Until a message arrives, such as ``0.1ms``.
        batch_size: Samples of an optimizer step.
        local_batch_size: The same of a local step in CADENCE and ASYNC; ``batch_size`` by default.
        micro_batch_size: Most samples in one forward and backward.
        anchor: Local steps of the slowest rank in a window, to begin with.
        picture: Where a picture goes.
        numbers: Print JSON.
    """

    run: Path | None = None
    speeds: str | None = None
    calibrate: bool = False
    add: str | None = None
    params: str | None = None
    tokens: int | None = None
    bandwidth: str | None = None
    latency: str | None = None
    batch_size: int | None = None
    local_batch_size: int | None = None
    micro_batch_size: int | None = None
    anchor: int | None = None
    picture: Path | None = None
    numbers: bool = False
