"""The command ``evener``: reads options, and starts ranks or becomes one.

It answers ``--help`` at once, so torch is imported by what a command runs, never here.
"""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

import evener
from evener.config.options import ClassifyOptions, PretrainOptions
from evener.engine.emulate import EMULATE_SLOW, parse_emulation
from evener.errors import ConfigError
from evener.team.child import apply_threads, loading_libraries, run_child
from evener.team.environment import DistributedTrainConfig
from evener.team.host import local_devices
from evener.team.nodes import DEFAULT_PORT, DEFAULT_TIMEOUT_S, NodeOptions, choose_node
from evener.team.signals import end_in_silence

app = typer.Typer(
    name="evener",
    add_completion=False,
    no_args_is_help=True,
    # Plain help and plain tracebacks: rich would take longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

# Options that several commands have.
_Config = Annotated[Path | None, typer.Argument(metavar="RUN.YAML", help="Keys of the run.")]
_Nproc = Annotated[
    int | None, typer.Option(metavar="N", help="Ranks to start here; one per GPU, or 1.")
]
_EmulateSlow = Annotated[
    list[str] | None,
    typer.Option(metavar="RANK:FACTOR", help="Slow a rank on purpose; may be repeated."),
]
_Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key; may be repeated."),
]
_Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
]
_Out = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder that runs go to; ./runs.")]
_Name = Annotated[str | None, typer.Option(help="Name of the run.")]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print neither the team nor progress.")]
_Nnodes = Annotated[
    int | None,
    typer.Option("--nnodes", metavar="N", help="Machines of the run; start it on each."),
]
_NodeRank = Annotated[
    int | None, typer.Option(metavar="K", help="Number of this machine, 0 to N - 1.")
]
_MasterAddr = Annotated[
    str | None, typer.Option(metavar="HOST", help="Address of machine 0, for all to meet at.")
]
_Port = Annotated[
    int | None,
    typer.Option(
        metavar="P", help=f"Port to meet on; a free one, or {DEFAULT_PORT} with --nnodes."
    ),
]

# -P: a file in the current folder must not shadow a module of the library.
_PYTHON = (sys.executable, "-P", "-m")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; the process's own by default.

    Returns:
        The exit code: 0; 2 for bad options; 128 + n after a stop by signal n; else what failed.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(args=arguments, prog_name="evener", obj=arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        if argv is None:
            end_in_silence()
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        print(evener.__version__)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training on unequal devices."""


@app.command()
def pretrain(
    context: typer.Context,
    config: _Config = None,
    nproc: _Nproc = None,
    emulate_slow: _EmulateSlow = None,
    overrides: _Overrides = None,
    resume: _Resume = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT", help="Resume although it differs: data, precision; may be repeated."
        ),
    ] = None,
    out: _Out = None,
    name: _Name = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
    demo: Annotated[
        bool, typer.Option("--demo", help="Train a small model on Python's own sources.")
    ] = False,
    quiet: _Quiet = False,
) -> None:
    """Train a causal language model from scratch or from a checkpoint."""
    options = PretrainOptions(
        config=config,
        nproc=nproc,
        emulate_slow=tuple(emulate_slow or ()),
        overrides=tuple(overrides or ()),
        resume=resume,
        allow=tuple(allow or ()),  # type: ignore[arg-type]
        out=out,
        name=name,
        port=port,
        demo=demo,
        quiet=quiet,
    )
    nodes = NodeOptions(nnodes=nnodes, node_rank=node_rank, master_addr=master_addr)
    raise typer.Exit(run_child(lambda: _pretrain(options, nodes, context.obj)))


@app.command()
def bench(
    config: Annotated[Path, typer.Argument(metavar="RUN.YAML", help="Keys of the run.")],
    policies: Annotated[
        str, typer.Option(metavar="NAMES", help="Policies to try.")
    ] = "sync,cadence,async",
    backends: Annotated[
        str, typer.Option(metavar="NAMES", help="Averaging backends to try.")
    ] = "auto",
    minutes: Annotated[
        float, typer.Option(metavar="M", help="Training time of each combination.")
    ] = 2.0,
    rounds: Annotated[
        int, typer.Option(metavar="R", help="Turns in which that time is spent.")
    ] = 2,
    nproc: _Nproc = None,
    emulate_slow: _EmulateSlow = None,
    overrides: _Overrides = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder that the results go to.")] = Path(
        "runs"
    ),
    name: Annotated[str, typer.Option(help="Name of the results' folder.")] = "bench",
) -> None:
    """Try policies and backends on a configuration of one's own, and recommend one."""
    raise typer.Exit(
        run_child(
            lambda: _bench(
                config=config,
                policies=_names(policies),
                backends=_names(backends),
                minutes=minutes,
                rounds=rounds,
                nproc=nproc,
                emulate_slow=tuple(emulate_slow or ()),
                overrides=tuple(overrides or ()),
                out=out,
                name=name,
            )
        )
    )


@app.command()
def classify(
    context: typer.Context,
    config: _Config = None,
    nproc: _Nproc = None,
    emulate_slow: _EmulateSlow = None,
    overrides: _Overrides = None,
    resume: _Resume = False,
    predict: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Classify its texts with the newest finished run."),
    ] = None,
    out: _Out = None,
    name: _Name = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
    quiet: _Quiet = False,
) -> None:
    """Train a text classifier: a LoRA adapter on a frozen model, and a head for the classes."""
    options = ClassifyOptions(
        config=config,
        nproc=nproc,
        emulate_slow=tuple(emulate_slow or ()),
        overrides=tuple(overrides or ()),
        resume=resume,
        predict=predict,
        out=out,
        name=name,
        port=port,
        quiet=quiet,
    )
    nodes = NodeOptions(nnodes=nnodes, node_rank=node_rank, master_addr=master_addr)
    raise typer.Exit(run_child(lambda: _classify(options, nodes, context.obj)))


@app.command("launch", context_settings={"allow_interspersed_args": False})
def launch_script(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Handed to the script.")
    ] = None,
    nproc: _Nproc = None,
    emulate_slow: _EmulateSlow = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
) -> None:
    """Run a training script as one rank per device of this host, or of several."""
    command = (*_PYTHON, "evener.team.script", str(script), *(arguments or ()))
    slow = tuple(emulate_slow or ())
    nodes = NodeOptions(nnodes=nnodes, node_rank=node_rank, master_addr=master_addr)
    raise typer.Exit(run_child(lambda: _launch(script, command, nproc, nodes, port, slow)))


def _pretrain(options: PretrainOptions, nodes: NodeOptions, arguments: Sequence[str]) -> int:
    place = DistributedTrainConfig.from_env()
    if place.launched_by == "alone":
        return _launch_pretraining(options, nodes, arguments)
    if place.launched_by != "evener":
        _refuse_launch_options(place, options.nproc, nodes, options.port)
    with loading_libraries():
        apply_threads(place)
    # On its way out Python would look through all of torch for garbage: up to three seconds, of the
    # five that a rank has when it is told to stop.
    atexit.register(gc.freeze)
    from evener.tasks.pretraining import run_pretraining

    return run_pretraining(_with_demo_team(options, place.world_size))


def _bench(**values: Any) -> int:
    from evener.config.pretrain_presets import resolve_config
    from evener.tasks.bench import BenchOptions, run_bench
    from evener.team.ranks import check_nproc

    options = BenchOptions(**values)
    place = DistributedTrainConfig.from_env()
    if place.launched_by != "alone":
        raise ConfigError(
            f"evener bench starts ranks by itself, but {place.launched_by} has started this "
            f"process as rank {place.rank} of {place.world_size}; run it alone, with --nproc"
        )
    nproc = max(1, local_devices()) if options.nproc is None else options.nproc
    check_nproc(nproc)
    parse_emulation(options.emulate_slow, nproc)
    resolve_config(
        PretrainOptions(config=options.config, overrides=tuple(options.overrides), name="bench")
    )
    return 0 if run_bench(options).recommended else 1


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _classify(options: ClassifyOptions, nodes: NodeOptions, arguments: Sequence[str]) -> int:
    from evener.tasks.classification.command import predict_file, run_classification

    place = DistributedTrainConfig.from_env()
    if options.predict is not None:
        return predict_file(options) if place.rank == 0 else 0
    if place.launched_by == "alone":
        return _launch_classification(options, nodes, arguments)
    if place.launched_by != "evener":
        _refuse_launch_options(place, options.nproc, nodes, options.port)
    apply_threads(place)
    atexit.register(gc.freeze)  # as in _pretrain
    return run_classification(options)


def _launch_classification(
    options: ClassifyOptions, nodes: NodeOptions, arguments: Sequence[str]
) -> int:
    from evener.config import classify_presets as presets
    from evener.team.launch import launch
    from evener.team.ranks import check_nproc

    nproc = options.nproc
    if nproc is None:
        least = presets.DEFAULT_NPROC if options.config is None else 1
        nproc = max(least, local_devices())
    check_nproc(nproc)
    config = presets.resolve_classify(options, holds_runs=not nodes.node_rank)
    node = choose_node(nodes, options.port, config.timeout_s)
    if node is None:
        parse_emulation(options.emulate_slow, nproc)
    command = [*_PYTHON, "evener", *arguments]
    if presets.needs_demo_base(config):
        if node is not None:
            raise ConfigError(
                "model.path is empty, for which each machine would train a base model of its own; "
                "with --nnodes, name the folder of a model that all machines have"
            )
        parent = options.parent
        if presets.find_demo_base(parent) is None:
            if config.devices not in ("auto", "cpu"):  # else it would be said after that training
                from evener.team.placement import check_devices

                check_devices(config.devices)
            if not options.quiet:
                print("there is no base model yet: pretraining the demo's first", file=sys.stderr)
            demo = (*_PYTHON, "evener", *presets.demo_arguments(parent, quiet=options.quiet))
            if code := launch(demo, nproc=presets.DEFAULT_NPROC, store_waits=True):
                return code
        command += ["--set", presets.model_override(presets.find_demo_base(parent))]
    return launch(command, nproc=nproc, port=options.port, store_waits=True, node=node)


def _launch_pretraining(
    options: PretrainOptions, nodes: NodeOptions, arguments: Sequence[str]
) -> int:
    from evener.config.pretrain_presets import DEMO_NPROC, resolve_config
    from evener.team.launch import launch
    from evener.team.ranks import check_nproc

    nproc = options.nproc
    if nproc is None:
        nproc = DEMO_NPROC if options.demo else max(1, local_devices())
    # What can be known to be wrong is said once, before any rank starts.
    check_nproc(nproc)
    config = resolve_config(options, holds_runs=not nodes.node_rank)
    node = choose_node(nodes, options.port, config.timeout_s)
    if node is None:
        parse_emulation(options.emulate_slow, nproc)
    program = (*_PYTHON, "evener", *arguments)
    return launch(program, nproc=nproc, port=options.port, store_waits=True, node=node)


def _with_demo_team(options: PretrainOptions, world_size: int) -> PretrainOptions:
    from evener.config.pretrain_presets import DEMO_EMULATE_SLOW

    # The demo shows an uneven team, unless the user has put one together or is alone.
    if options.demo and not options.emulate_slow and world_size > 1:
        return replace(options, emulate_slow=DEMO_EMULATE_SLOW)
    return options


def _launch(
    script: Path,
    command: Sequence[str],
    nproc: int | None,
    nodes: NodeOptions,
    port: int | None,
    emulate_slow: Sequence[str],
) -> int:
    from evener.team.launch import launch

    parse_emulation(emulate_slow)
    if emulate_slow:
        os.environ[EMULATE_SLOW] = ",".join(emulate_slow)  # for Ddp.setup in the script's ranks
    if not script.is_file():
        raise ConfigError(f"{script} is no file; give the path of a Python script")
    place = DistributedTrainConfig.from_env()
    if place.launched_by in ("torchrun", "slurm"):
        _refuse_launch_options(place, nproc, nodes, port)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(command[0], list(command))  # a rank already: become the script
    nproc = max(1, local_devices()) if nproc is None else nproc
    return launch(command, nproc=nproc, port=port, node=choose_node(nodes, port, DEFAULT_TIMEOUT_S))


def _refuse_launch_options(
    place: DistributedTrainConfig, nproc: int | None, nodes: NodeOptions, port: int | None
) -> None:
    for option, value in {"--nproc": nproc, **nodes.given, "--port": port}.items():
        if value is not None:
            raise ConfigError(
                f"{option} is {value}, but {place.launched_by} has started this process as rank "
                f"{place.rank} of {place.world_size} already; leave {option} out"
            )
