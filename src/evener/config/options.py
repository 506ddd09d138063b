"""Options of the command line, each declared once: default, limits and help.

``cli.py`` makes commands of these classes; Python functions with the same purpose create them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from typer import Argument, Option

from evener.comm.addresses import LARGEST_PORT
from evener.config.keys import Allowed, Keys
from evener.team.nodes import DEFAULT_PORT, MAX_NPROC

_CONFIG: Final = Argument(metavar="RUN.YAML", help="Keys of the run.")
_Nproc = Annotated[
    int | None, Option(min=1, max=MAX_NPROC, help="Ranks to start here; one per GPU, or 1.")
]
_EmulateSlow = Annotated[
    Sequence[str], Option(metavar="RANK:FACTOR", help="Slow a rank on purpose; may be repeated.")
]
_Overrides = Annotated[
    Sequence[str], Option("--set", metavar="KEY=VALUE", help="Set a key; repeatable.")
]
_Out = Annotated[Path, Option(help="Folder of runs.")]
#: For commands that serve or join.
TokenFile = Annotated[Path | None, Option(help="File with the secret that both sides share.")]
Json = Annotated[bool, Option("--json", help="Print a document in JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of an agent's workers."""

    nproc: _Nproc = None
    max_failures: Annotated[
        int | None, Option(min=0, help="Stop when more workers have failed; 10.")
    ] = None
    token_file: TokenFile = None
    address: Annotated[
        str | None, Option(help="This machine's address, at which the others reach its workers.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions(WorkerOptions):
    """Options of a team; without ``nnodes`` it is only on this machine."""

    nnodes: Annotated[
        str | None, Option(metavar="N", help="Machines of the run, N or MIN:MAX; start it on each.")
    ] = None
    node_rank: Annotated[int | None, Option(help="Number of this machine, 0 to N - 1.")] = None
    master_addr: Annotated[str | None, Option(help="Address of node 0 that all can reach.")] = None
    port: Annotated[
        int | None,
        Option(
            min=1,
            max=LARGEST_PORT,
            help=f"Port of the rendezvous; a free one, or {DEFAULT_PORT} with --nnodes.",
        ),
    ] = None
    elastic: Annotated[
        str | None,
        Option(metavar="MIN:MAX", help="Elastic team: MIN workers are enough to continue."),
    ] = None
    emulate_slow: _EmulateSlow = ()
    dashboard: Annotated[bool, Option("--dashboard", help="Serve a dashboard during the run.")] = (
        False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions(LaunchOptions):
    """Options of a task."""

    config: Annotated[Keys, _CONFIG] = None
    overrides: _Overrides = ()
    resume: Annotated[
        bool, Option("--resume", help="Continue from the newest complete checkpoint.")
    ] = False
    out: _Out = Path("runs")
    name: Annotated[str | None, Option(help="Name of the run; that of the file.")] = None
    quiet: Annotated[bool, Option("--quiet", help="Print neither the team nor progress.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyOptions(TaskOptions):
    """Options of ``evener classify``; without a file and keys, it runs the demo.

    Attributes:
        has_samples: Whether samples are given from Python, instead of ``data.path``.
    """

    has_samples: bool = False
    predict: Annotated[
        Path | None,
        Option(help="Classify these texts with the newest finished run, and print labels."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainOptions(TaskOptions):
    """Options of ``evener pretrain``; without a file and keys, every key has its default."""

    allow: Annotated[
        Sequence[Allowed], Option(metavar="WHAT", help="What may differ: data, precision.")
    ] = ()
    demo: Annotated[bool, Option("--demo", help="Train a small model on Python's sources.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of ``evener bench``."""

    config: Annotated[Path, _CONFIG]
    policies: Annotated[
        Sequence[str], Option(metavar="NAMES", help="Policies; sync,cadence,async.")
    ] = ("sync", "cadence", "async")
    backends: Annotated[
        Sequence[str], Option(metavar="NAMES", help="Averaging backends; auto.")
    ] = ("auto",)
    minutes: Annotated[
        float, Option(min=0.001, max=1e6, help="Training time of each combination.")
    ] = 2.0
    rounds: Annotated[int, Option(min=1, help="Rounds into which that time is divided.")] = 2
    nproc: _Nproc = None
    emulate_slow: _EmulateSlow = ()
    overrides: _Overrides = ()
    out: _Out = Path("runs")
    name: Annotated[str, Option(help="Name of the folder with its runs.")] = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of ``evener plan``."""

    run: Annotated[
        Path | None, Argument(metavar="[RUN]", help="Folder of a run that has measured the team.")
    ] = None
    speeds: Annotated[
        str | None, Option(metavar="S,S", help="Samples per second of each rank alone.")
    ] = None
    add: Annotated[str | None, Option(metavar="S,S", help="Samples/s of further ranks.")] = None
    params: Annotated[
        float | None, Option(min=1, max=1e15, help="Parameters that are trained, such as 350e6.")
    ] = None
    bandwidth: Annotated[
        float | None, Option(metavar="GBIT", min=1e-6, help="Gbit/s between ranks.")
    ] = None
    latency: Annotated[
        float | None, Option(metavar="MS", min=0, help="Milliseconds of a message; 0.1.")
    ] = None
    batch_size: Annotated[
        int | None, Option(min=1, max=10**9, help="Samples of an optimizer step.")
    ] = None
    local_batch_size: Annotated[
        int | None,
        Option(
            min=1,
            max=10**9,
            help="Of a local step in cadence and async; a rank's part of --batch-size.",
        ),
    ] = None
    micro_batch_size: Annotated[
        int | None, Option(min=1, help="Most samples computed at once.")
    ] = None
    anchor: Annotated[
        int | None, Option(min=1, max=10_000, help="First local steps of the slowest rank.")
    ] = None
    numbers: Json = False
