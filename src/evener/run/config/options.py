"""What the command line hands to a task, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Allowed = Literal["data", "precision"]
"""What a resume may change when the user says so."""

ALLOWED: tuple[Allowed, ...] = get_args(Allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions:
    """Options of ``evener classify``, as the user gave them; see ``PretrainOptions``.

    Attributes:
        config: The run's YAML file; ``None`` for the data set that every Python has.
        nproc: Local ranks asked for; ``None`` when the user did not say.
        emulate_slow: ``RANK:FACTOR`` texts.
        overrides: ``key=value`` texts of ``--set``.
        keys: Keys of the run where there is no file.
        has_samples: Samples are given from Python, instead of ``data.path``.
        resume: Go on from the newest complete checkpoint.
        out: Folder that runs go to.
        name: Name of the run.
        port: Port of the store.
        predict: File of texts to classify with a finished run, instead of training.
        quiet: Print neither the team nor the progress line.
    """

    config: Path | None = None
    nproc: int | None = None
    emulate_slow: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    keys: Mapping[str, Any] | None = None
    has_samples: bool = False
    resume: bool = False
    out: Path | None = None
    name: str | None = None
    port: int | None = None
    predict: Path | None = None
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainOptions:
    """Options of ``evener pretrain``, as the user gave them.

    Attributes:
        config: The run's YAML file; ``None`` leaves every key at its default.
        nproc: Local ranks asked for; ``None`` when the user did not say.
        emulate_slow: ``RANK:FACTOR`` texts, which ``windows.emulate.parse_emulation`` reads.
        overrides: ``key=value`` texts of ``--set``, in order; the last one wins.
        keys: Keys of the run where there is no file.
        resume: Go on from the newest complete checkpoint.
        allow: What may differ from that checkpoint's run: ``data``, ``precision``.
        out: Folder that runs go to; ``None`` for the configuration's.
        name: Name of the run; ``None`` for the configuration's.
        port: Port of the store; only the launcher reads it.
        demo: Train the small model on text that every Python has.
        quiet: Print neither the team nor the progress line.
    """

    config: Path | None = None
    nproc: int | None = None
    emulate_slow: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    keys: Mapping[str, Any] | None = None
    resume: bool = False
    allow: tuple[Allowed, ...] = ()
    out: Path | None = None
    name: str | None = None
    port: int | None = None
    demo: bool = False
    quiet: bool = False
