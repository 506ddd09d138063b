"""The command ``evener``: read options, and start ranks or become one.

It answers ``--help`` at once, so torch is imported by what a command runs, never here.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from typer import Argument, Option

import evener
from evener.comm.addresses import parse_address
from evener.config.options import (
    BenchOptions,
    ClassifyOptions,
    LaunchOptions,
    PlanOptions,
    PretrainOptions,
    TaskOptions,
)
from evener.engine.emulate import EMULATE_SLOW, parse_emulation
from evener.errors import ConfigError
from evener.protocol.formation import Deadlines, read_team_limits
from evener.team.child import apply_threads, die_with, loading_libraries, run_child
from evener.team.environment import DistributedTrainConfig
from evener.team.host import local_devices
from evener.team.nodes import DEFAULT_PORT, DEFAULT_TIMEOUT_S, Nodes, choose_nodes
from evener.team.signals import end_in_silence
from evener.team.terminal import printable

if TYPE_CHECKING:
    from evener.team.launch import LaunchPlan

app = typer.Typer(
    name="evener",
    add_completion=False,
    no_args_is_help=True,
    # Plain help and plain tracebacks: rich would take longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


# -P: a file in the current folder must not shadow a module of the library.
_PYTHON: Final = (sys.executable, "-P", "-m")

#: Set by a launcher for the dashboard that ends with it: the launcher's process number.
DASHBOARD_OF: Final = "EVENER_DASHBOARD_OF"

#: So long a dashboard gets to end with the run, in seconds.
_DASHBOARD_END_S: Final = 5.0

#: Ranks of the pretraining demo, and of a classification without options.
DEMO_NPROC: Final = 2
#: How much slower the second rank of the demo is.
DEMO_EMULATE_SLOW: Final = ("1:3",)


#: Commands that a worker can run in place of a script.
_TASKS: Final = ("pretrain", "classify")

_Options = TypeVar("_Options")

# ── options that several commands have ──────────────────────────────────────────────────────────

_Texts = list[str] | None
_ConfigFile = Annotated[Path | None, Argument(metavar="RUN.YAML", help="Keys of the run.")]
_Overrides = Annotated[_Texts, Option("--set", metavar="KEY=VALUE", help="Set a key; repeatable.")]
_Resume = Annotated[bool, Option("--resume", help="Continue from the newest complete checkpoint.")]
_Out = Annotated[Path, Option(help="Folder of runs.")]
_Name = Annotated[str | None, Option(help="Name of the run.")]
_Quiet = Annotated[bool, Option("--quiet", help="Print neither the team nor progress.")]
_Json = Annotated[bool, Option("--json", help="Print a document in JSON.")]
_EmulateSlow = Annotated[
    _Texts, Option(metavar="RANK:FACTOR", help="Slow a rank on purpose; may be repeated.")
]
_Nproc = Annotated[int | None, Option(help="Ranks to start here; one per GPU, or 1.")]
_Nnodes = Annotated[
    str | None,
    Option(metavar="N", help="Machines of the run, N or MIN:MAX; start it on each."),
]
_NodeRank = Annotated[int | None, Option(help="Number of this machine, 0 to N - 1.")]
_MasterAddr = Annotated[str | None, Option(help="Address of machine 0 that all can reach.")]
_Port = Annotated[
    int | None, Option(help=f"Port of the rendezvous; a free one, or {DEFAULT_PORT} with --nnodes.")
]
_Elastic = Annotated[
    str | None, Option(metavar="MIN:MAX", help="Elastic team: MIN workers are enough to continue.")
]
_MaxFailures = Annotated[int | None, Option(help="Stop when more workers have failed; 10.")]
_TokenFile = Annotated[Path | None, Option(help="File with the secret that both sides share.")]
_Address = Annotated[
    str | None, Option(help="This machine's address, at which the others reach its workers.")
]
_Dashboard = Annotated[bool, Option("--dashboard", help="Serve a dashboard during the run.")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

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
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training on unequal devices."""


def _command(**settings: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a command of a function that returns the exit code; `run_child` reports its errors."""

    def register(body: Callable[..., int]) -> Callable[..., int]:
        @wraps(body)
        def run(**given: Any) -> None:
            raise typer.Exit(run_child(lambda: body(**given)))

        app.command(**settings)(run)
        return body

    return register


def _collect(kind: type[_Options], given: Mapping[str, Any]) -> _Options:
    """Return options from the parameters of a command that bear their names.

    Args:
        kind: A dataclass of options.
        given: The parameters; one that is ``None`` leaves the option's default.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{k: v for k, v in given.items() if k in names and v is not None})


def _split(texts: list[str]) -> list[str]:
    """Return the names in texts that have commas between them."""
    return [name for text in texts for part in text.split(",") if (name := part.strip())]


# ── tasks ─────────────────────────────────────────────────────────────────────────────────────────


@_command()
def pretrain(
    context: typer.Context,
    config: _ConfigFile = None,
    overrides: _Overrides = None,
    resume: _Resume = False,
    allow: Annotated[
        _Texts, Option(metavar="WHAT", help="What may differ: data, precision.")
    ] = None,
    out: _Out = Path("runs"),
    name: _Name = None,
    demo: Annotated[
        bool, Option("--demo", help="Train a small model on Python's sources.")
    ] = False,
    quiet: _Quiet = False,
    emulate_slow: _EmulateSlow = None,
    nproc: _Nproc = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
    elastic: _Elastic = None,
    max_failures: _MaxFailures = None,
    token_file: _TokenFile = None,
    address: _Address = None,
    dashboard: _Dashboard = False,
) -> int:
    """Train a causal language model from scratch or from a checkpoint."""
    options = _collect(PretrainOptions, locals())
    place = DistributedTrainConfig.from_env()
    if place.launched_by != "alone":
        _become_rank(options, place)
        from evener.tasks.pretraining import run_pretraining

        # The demo shows an unequal team, unless the user has chosen one or uses one rank.
        if options.demo and not options.emulate_slow and place.world_size > 1:
            options = replace(options, emulate_slow=DEMO_EMULATE_SLOW)
        return run_pretraining(options, place)
    from evener.config.presets import resolve_config

    # Report errors that can be known now once, before any rank starts.
    demo_nproc = DEMO_NPROC if options.demo else None
    nproc = _count_ranks(demo_nproc if options.nproc is None else options.nproc)
    checked = resolve_config(options, holds_runs=not options.node_rank)
    return _launch_task(options, nproc, checked.timeout_s, context.obj)


@_command()
def bench(
    config: Annotated[Path, Argument(metavar="RUN.YAML", help="Keys of the run.")],
    policies: Annotated[
        _Texts, Option(metavar="NAMES", help="Policies; sync,cadence,async.")
    ] = None,
    backends: Annotated[_Texts, Option(metavar="NAMES", help="Averaging backends; auto.")] = None,
    minutes: Annotated[
        float, Option(min=0.001, max=1e6, help="Training time of each combination.")
    ] = 2.0,
    rounds: Annotated[int, Option(min=1, help="Rounds into which that time is divided.")] = 2,
    nproc: _Nproc = None,
    emulate_slow: _EmulateSlow = None,
    overrides: _Overrides = None,
    out: _Out = Path("runs"),
    name: _Name = "bench",
) -> int:
    """Compare policies and backends on your configuration, and recommend one."""
    policies, backends = policies and _split(policies), backends and _split(backends)
    options = _collect(BenchOptions, locals())
    from evener.tasks.bench import check_options, run_bench

    place = DistributedTrainConfig.from_env()
    if place.launched_by != "alone":
        raise ConfigError(
            f"evener bench starts ranks by itself, but {place.launched_by} has started this "
            f"process as rank {place.rank} of {place.world_size}; run it alone, with --nproc"
        )
    parse_emulation(options.emulate_slow, _count_ranks(options.nproc))
    check_options(options)
    return 0 if run_bench(options).recommended else 1


@_command()
def classify(
    context: typer.Context,
    config: _ConfigFile = None,
    overrides: _Overrides = None,
    resume: _Resume = False,
    predict: Annotated[
        Path | None,
        Option(help="Classify these texts with the newest finished run, and print labels."),
    ] = None,
    out: _Out = Path("runs"),
    name: _Name = None,
    quiet: _Quiet = False,
    emulate_slow: _EmulateSlow = None,
    nproc: _Nproc = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
    elastic: _Elastic = None,
    max_failures: _MaxFailures = None,
    token_file: _TokenFile = None,
    address: _Address = None,
    dashboard: _Dashboard = False,
) -> int:
    """Train a text classifier: a LoRA adapter on a frozen model, and a head for the classes."""
    options, arguments = _collect(ClassifyOptions, locals()), context.obj
    from evener.tasks.classification.command import predict_file, run_classification

    place = DistributedTrainConfig.from_env()
    if options.predict is not None:
        return predict_file(options) if place.rank == 0 else 0
    if place.launched_by != "alone":
        _become_rank(options, place)
        return run_classification(options, place)
    from evener.config.presets import find_demo_base, needs_demo_base, resolve_classify
    from evener.team.launch import LaunchPlan
    from evener.team.launch import launch as launch_here

    nproc = _count_ranks(options.nproc, DEMO_NPROC if options.config is None else 1)
    checked = resolve_classify(options, holds_runs=not options.node_rank)
    if needs_demo_base(checked):
        if choose_nodes(options, checked.timeout_s) is not None:
            raise ConfigError(
                "model.path is empty, for which each machine would train a base model of its own; "
                "with --nnodes, name the folder of a model that all machines have"
            )
        _check_emulation(options, nproc)
        if find_demo_base(options.out) is None:
            if checked.devices not in ("auto", "cpu"):  # else it would be said after that training
                from evener.team.placement import check_devices

                check_devices(checked.devices)
            if not options.quiet:
                print("there is no base model yet: pretraining the demo's first", file=sys.stderr)
            demo = ["pretrain", "--demo", "--out", str(options.out)]
            demo += ["--quiet"] if options.quiet else []
            if code := launch_here([*_PYTHON, "evener", *demo], LaunchPlan(nproc=DEMO_NPROC)):
                return code
        base = find_demo_base(options.out)
        if base is None:
            raise ConfigError("the demo has left no checkpoint; name a base model with model.path")
        arguments = [*arguments, "--set", f"model.path={json.dumps(str(base))}"]
    return _launch_task(options, nproc, checked.timeout_s, arguments)


# ── looking at machines and runs ──────────────────────────────────────────────────────────────────


@_command()
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folders; several are compared.")],
    page: Annotated[Path | None, Option("-o", "--out", help="The page; report.html.")] = None,
    trace: Annotated[Path | None, Option(help="Write a Chrome trace, for Perfetto.")] = None,
    numbers: _Json = False,
) -> int:
    """Write an HTML report of runs, which needs no server and no network."""
    from evener.run_report.writing import numbers_text, report, write_page, write_trace

    if trace is not None:
        if len(runs) > 1:
            raise ConfigError(f"--trace takes one run, not {len(runs)}; write one for each")
        write_trace(runs[0], trace)
        print(f"{trace}: open it in https://ui.perfetto.dev", file=sys.stderr)
    wants_page = page is not None or not (numbers or trace)
    if wants_page or numbers:
        document = report(runs)
        if wants_page:
            print(write_page(document, page), file=sys.stderr)
        if numbers:
            print(numbers_text(document))
    return 0


@_command()
def doctor(
    address: Annotated[
        str | None,
        Argument(metavar="[HOST[:PORT]]", help="The machine that listens, or where to listen."),
    ] = None,
    listen: Annotated[
        bool, Option("--listen", help="Wait for another machine; on loopback without HOST.")
    ] = False,
    token_file: _TokenFile = None,
    as_json: _Json = False,
) -> int:
    """Find problems of this machine, of another one and of the link that stop or slow runs."""
    from evener.doctor.diagnosis import diagnose
    from evener.team.wire import read_team_token, read_token

    token = read_token(token_file) or read_team_token(os.environ) or b""
    diagnosis = diagnose(address, token, listens=listen)
    print(diagnosis.json_text() if as_json else diagnosis.for_people())
    return 1 if diagnosis.problems else 0


@_command()
def dashboard(
    folder: Annotated[
        Path, Argument(metavar="[RUN|ROOT]", help="A run folder, or a folder of runs.")
    ] = Path("runs"),
    bind: Annotated[
        str | None,
        Option(metavar="HOST[:PORT]", help="Address to listen on; loopback if left out."),
    ] = None,
    token_file: _TokenFile = None,
) -> int:
    """Show runs in the browser, during and after training."""
    from evener.dashboard.shelf import Shelf
    from evener.team.wire import read_token

    try:
        from evener.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"evener dashboard needs {error.name}: pip install 'evener[dashboard]'"
        ) from error
    if parent := os.environ.pop(DASHBOARD_OF, None):
        die_with(int(parent))
    serve(Shelf.at(folder), bind, read_token(token_file))
    return 0


@_command()
def plan(
    run: Annotated[
        Path | None, Argument(metavar="[RUN]", help="Folder of a run that has measured the team.")
    ] = None,
    speeds: Annotated[
        str | None, Option(metavar="S,S", help="Samples per second of each rank alone.")
    ] = None,
    add: Annotated[str | None, Option(metavar="S,S", help="Samples/s of further ranks.")] = None,
    params: Annotated[
        float | None, Option(min=1, max=1e15, help="Parameters that are trained, such as 350e6.")
    ] = None,
    bandwidth: Annotated[
        float | None, Option(metavar="GBIT", min=1e-6, help="Gbit/s between ranks.")
    ] = None,
    latency: Annotated[
        float | None, Option(metavar="MS", min=0, help="Milliseconds of a message; 0.1.")
    ] = None,
    batch_size: Annotated[
        int | None, Option(min=1, max=10**9, help="Samples of an optimizer step.")
    ] = None,
    local_batch_size: Annotated[
        int | None,
        Option(min=1, max=10**9, help="Of a local step in cadence and async; as --batch-size."),
    ] = None,
    micro_batch_size: Annotated[
        int | None, Option(min=1, help="Most samples computed at once.")
    ] = None,
    anchor: Annotated[
        int | None, Option(min=1, max=10_000, help="First local steps of the slowest rank.")
    ] = None,
    numbers: _Json = False,
) -> int:
    """Predict a team's speed under each policy, and which devices are worth adding."""
    options = _collect(PlanOptions, locals())
    from evener.simulation.question import answer_plan
    from evener.simulation.telling import document, text

    advice = answer_plan(options)
    if options.numbers:
        print(json.dumps(document(advice), allow_nan=False))
    else:
        # Names come from a file of events: they may hold what a terminal would obey.
        print("\n".join(map(printable, text(advice).split("\n"))), end="")
    return 0


# ── teams: launch, coordinator, join, and what starts ranks ───────────────────────────────────────


@_command(context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[Path, Argument(metavar="SCRIPT", help="A Python file.")],
    arguments: Annotated[_Texts, Argument(metavar="ARGS", help="Its arguments.")] = None,
    emulate_slow: _EmulateSlow = None,
    nproc: _Nproc = None,
    nnodes: _Nnodes = None,
    node_rank: _NodeRank = None,
    master_addr: _MasterAddr = None,
    port: _Port = None,
    elastic: _Elastic = None,
    max_failures: _MaxFailures = None,
    token_file: _TokenFile = None,
    address: _Address = None,
    dashboard: _Dashboard = False,
) -> int:
    """Run a training script as one rank per device of this host, or of several."""
    options = _collect(LaunchOptions, locals())
    from evener.team.launch import launch as launch_here

    parse_emulation(options.emulate_slow)
    if options.emulate_slow:
        # For Ddp.setup in the script's ranks.
        os.environ[EMULATE_SLOW] = ",".join(options.emulate_slow)
    if not script.is_file():
        raise ConfigError(f"{script} is not a file; give the path of a Python script")
    command = [*_PYTHON, "evener.team.script", str(script), *(arguments or ())]
    place = DistributedTrainConfig.from_env()
    if place.launched_by in ("torchrun", "slurm"):
        _refuse_launch_options(options, place)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(command[0], command)  # a rank already: become the script
    nodes = choose_nodes(options, DEFAULT_TIMEOUT_S, is_elastic=options.elastic is not None)
    plan = _plan(options, nodes, [str(script), *(arguments or ())])
    with _with_dashboard(Path("runs"), options, nodes):
        return launch_here(command, plan)


# The address comes before our options, so the program's own options have to pass through.
@_command(context_settings={"ignore_unknown_options": True})
def join(
    coordinator: Annotated[
        str, Argument(metavar="ADDR", help="HOST:PORT of the team's coordinator.")
    ],
    program: Annotated[
        list[str],
        Argument(
            metavar="PROGRAM",
            help="The team's program: a script, -m MODULE, a run's YAML, pretrain or classify.",
        ),
    ],
    nproc: _Nproc = 1,
    max_failures: _MaxFailures = None,
    token_file: _TokenFile = None,
    address: _Address = None,
) -> int:
    """Add workers to a running elastic team, with the program of the team."""
    from evener.team.agent import MAX_FAILURES
    from evener.team.launch import LaunchPlan
    from evener.team.launch import launch as launch_here

    if program[0].endswith((".yaml", ".yml")):  # of a run
        program = ["pretrain", *program]
    is_task = program[0] in _TASKS
    if not (is_task or program[0] == "-m" or Path(program[0]).is_file()):
        raise ConfigError(
            f"{program[0]} is not a file; give what the team runs: a script, -m and a module, a "
            f"run's YAML, or one of {', '.join(_TASKS)}, with its arguments"
        )
    plan = LaunchPlan(
        join=coordinator,
        nproc=nproc,
        token_file=token_file,
        address=address,
        max_failures=MAX_FAILURES if max_failures is None else max_failures,
    )
    module = "evener" if is_task else "evener.team.script"
    return launch_here([*_PYTHON, module, *program], plan)


@_command()
def coordinator(
    team: Annotated[str, Argument(metavar="MIN:MAX", help="Fewest and most workers.")] = "1:64",
    bind: Annotated[
        str, Option(metavar="HOST[:PORT]", help="Where to listen; not on loopback: needs a token.")
    ] = "127.0.0.1",
    token_file: _TokenFile = None,
    ledger: Annotated[
        Path | None, Option(help="File from which a restarted coordinator continues.")
    ] = None,
    timeout_s: Annotated[float, Option(help="Longest wait for workers.")] = DEFAULT_TIMEOUT_S,
    host_lease_s: Annotated[
        float, Option(help="A machine silent for so long is lost.")
    ] = Deadlines().host_lease_s,
    patience_s: Annotated[
        float, Option(help="Longest wait of workers for a coordinator that does not answer.")
    ] = Deadlines().patience_s,
) -> int:
    """Decide who is in an elastic team; evener launch starts one by itself."""
    from evener.team.coordinator import coordinate
    from evener.team.coordinator_options import CoordinatorOptions
    from evener.team.wire import read_token

    least, most = read_team_limits(team, "MIN:MAX")
    host, port = parse_address(bind, "--bind", may_bind=True)
    return coordinate(
        CoordinatorOptions(
            host=host,
            port=port or 0,
            least=least,
            most=most,
            token=read_token(token_file) or None,
            deadlines=Deadlines(
                timeout_s=timeout_s, host_lease_s=host_lease_s, patience_s=patience_s
            ),
            ledger=ledger,
        )
    )


def _plan(
    options: LaunchOptions, nodes: Nodes | None, program: Sequence[str], nproc: int | None = None
) -> "LaunchPlan":
    """Return what the user said about workers, for the launcher.

    Args:
        options: Those of the command.
        nodes: The machines of the run.
        program: What workers run.
        nproc: Ranks of this host in a team of several, or a fixed one; by default, what the user
            said.
    """
    from evener.team.agent import MAX_FAILURES
    from evener.team.launch import LaunchPlan

    is_elastic = options.elastic is not None or (nodes is not None and not nodes.are_fixed)
    if options.max_failures is not None and not is_elastic:
        raise ConfigError(
            f"--max-failures is {options.max_failures}, but the team is not elastic; give "
            "--elastic MIN:MAX, or leave --max-failures out"
        )
    return LaunchPlan(
        elastic=options.elastic or "",
        nodes=nodes,
        # On one machine an elastic team begins with as many as it may have.
        nproc=options.nproc
        if is_elastic and nodes is None
        else nproc or _count_ranks(options.nproc),
        port=options.port,
        token_file=options.token_file,
        address=options.address,
        max_failures=MAX_FAILURES if options.max_failures is None else options.max_failures,
        program=program,
    )


def _launch_task(
    options: TaskOptions, nproc: int, timeout_s: float, arguments: Sequence[str]
) -> int:
    from evener.team.launch import launch as launch_here

    nodes = choose_nodes(options, timeout_s, is_elastic=options.elastic is not None)
    if nodes is None:
        _check_emulation(options, nproc)
    plan = _plan(options, nodes, arguments, nproc)
    with _with_dashboard(options.out, options, nodes):
        return launch_here([*_PYTHON, "evener", *arguments], plan)


def _check_emulation(options: TaskOptions, nproc: int) -> None:
    world_size = (
        nproc if options.elastic is None else read_team_limits(options.elastic, "--elastic")[1]
    )
    parse_emulation(options.emulate_slow, world_size)


def _count_ranks(given: int | None, least: int = 1) -> int:
    from evener.team.worker_processes import check_nproc

    nproc = max(least, local_devices()) if given is None else given
    check_nproc(nproc)
    return nproc


def _become_rank(options: TaskOptions, place: DistributedTrainConfig) -> None:
    if place.launched_by != "evener":
        _refuse_launch_options(options, place)
    with loading_libraries():
        apply_threads(place)
    # On its way out Python would look through all of torch for garbage: up to three seconds, of the
    # five that a rank has when it is told to stop.
    atexit.register(gc.freeze)


def _refuse_launch_options(options: LaunchOptions, place: DistributedTrainConfig) -> None:
    given = {
        "--nproc": options.nproc,
        **options.given,
        "--port": options.port,
        "--elastic": options.elastic,
        "--dashboard": options.dashboard or None,
    }
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{option} is {value}, but {place.launched_by} has started this process as rank "
                f"{place.rank} of {place.world_size} already; leave {option} out"
            )


@contextmanager
def _with_dashboard(folder: Path, options: LaunchOptions, nodes: Nodes | None) -> Iterator[None]:
    """Serve a dashboard of the runs in a folder during the block, if it is wanted.

    Of several machines the first one serves it: rank 0 writes the events there.
    """
    if not options.dashboard or (nodes is not None and nodes.number):
        yield
        return
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ConfigError("--dashboard needs more packages: pip install 'evener[dashboard]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder of runs {folder} cannot be made: {error}; choose another with --out"
        ) from None
    process = subprocess.Popen(
        [*_PYTHON, "evener", "dashboard", str(folder)],
        env={**os.environ, DASHBOARD_OF: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the run, which takes a while to end
    )
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DASHBOARD_END_S)
        process.kill()  # as where a disk that it reads does not answer; else it has ended
