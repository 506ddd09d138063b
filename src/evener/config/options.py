"""What the command line or a function hands to a task, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Allowed = Literal["data", "precision"]
"""What a resume may change when the user says so."""

ALLOWED: tuple[Allowed, ...] = get_args(Allowed)

Keys = Mapping[str, Any] | str | Path | None
"""What ``pretrain`` and ``classify`` take: keys of a run, or a YAML file that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Options of a task, as the user gave them.

    Attributes:
        config: The run's YAML file; ``None`` where there is none.
        nproc: Local ranks asked for; ``None`` when the user did not say.
        emulate_slow: ``RANK:FACTOR`` texts, which ``windows.emulate.parse_emulation`` reads.
        overrides: ``key=value`` texts of ``--set``, in order; the last one wins.
        keys: Keys of the run where there is no file.
        resume: Go on from the newest complete checkpoint.
        out: Folder that runs go to.
        name: Name of the run; ``None`` for the configuration's.
        port: Port of the store; only the launcher reads it.
        quiet: Print neither the team nor the progress line.
    """

    config: Path | None = None
    nproc: int | None = None
    emulate_slow: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    keys: Mapping[str, Any] | None = None
    resume: bool = False
    out: Path | None = None
    name: str | None = None
    port: int | None = None
    quiet: bool = False

    @property
    def parent(self) -> Path:
        """The folder that runs go to."""
        return self.out or Path("runs")

    def run_name(self, key: str | None, default: str) -> str:
        """Return ``--name``, else the key, else the file's name, else ``default``."""
        stem = self.config.stem if self.config is not None else default
        return (key or stem) if self.name is None else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(TaskOptions):
    """Options of ``evener classify``; without a file and keys, the standard library's functions.

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

    allow: tuple[Allowed, ...] = ()
    demo: bool = False


def file_or_keys(given: Keys) -> dict[str, Any]:
    """Return ``config`` or ``keys`` of ``TaskOptions``, whichever was given."""
    return {"config": Path(given)} if isinstance(given, str | Path) else {"keys": given}
