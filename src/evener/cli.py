"""The command ``evener``: read options, and start ranks or become one.

It answers ``--help`` at once, so torch is imported by what a command runs, never here.
"""

import atexit
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import MISSING, fields, replace
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar, get_origin

import typer

import evener
from evener.config.options import (
    BenchOptions,
    ClassifyOptions,
    CoordinateOptions,
    DashboardOptions,
    DoctorOptions,
    JoinOptions,
    Keys,
    LaunchOptions,
    PlanOptions,
    PretrainOptions,
    ReportOptions,
    ScriptOptions,
    TaskOptions,
)
from evener.engine.emulate import EMULATE_SLOW, parse_emulation
from evener.errors import ConfigError
from evener.protocol.formation import Deadlines, read_team_limits
from evener.team.address import check_port
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


_Options = TypeVar("_Options")

#: By the field of a class of options: how the command line takes it, in the order of the help.
_TAKEN: Final = {
    "runs": typer.Argument(metavar="RUN...", help="Run folders; several are compared."),
    "page": typer.Option("-o", "--out", metavar="FILE", help="The page; report.html."),
    "trace": typer.Option(metavar="FILE", help="Write a Chrome trace, for Perfetto."),
    "numbers": typer.Option("--json", help="Print the numbers as JSON."),
    "address": typer.Argument(
        metavar="[ADDR]", help="HOST or HOST:PORT of the other machine, or to listen on."
    ),
    "listen": typer.Option("--listen", help="Answer other machines; on loopback without ADDR."),
    "token_file": typer.Option(metavar="FILE", help="File with the secret that both sides share."),
    "as_json": typer.Option("--json", help="Print facts and problems as JSON."),
    "folder": typer.Argument(metavar="[RUN|ROOT]", help="A run folder, or a folder of runs."),
    "bind": typer.Option(metavar="HOST[:PORT]", help="Address to listen on; loopback if left out."),
    "coordinator": typer.Argument(metavar="ADDR", help="HOST:PORT of the team's coordinator."),
    "program": typer.Argument(
        metavar="PROGRAM...", help="The team's program: a script, -m MODULE, pretrain or classify."
    ),
    "run": typer.Argument(metavar="[RUN]", help="Folder of a run that has measured the team."),
    "speeds": typer.Option(metavar="S,S", help="Samples per second of each rank alone."),
    "calibrate": typer.Option("--calibrate", help="Time this machine's devices."),
    "add": typer.Option(metavar="S,S", help="Samples per second of further ranks."),
    "params": typer.Option(metavar="N", help="Parameters that are trained, such as 350M."),
    "tokens": typer.Option(metavar="N", help="Tokens of a sample, for --calibrate."),
    "bandwidth": typer.Option(metavar="B", help="Bandwidth between ranks, such as 1Gbit."),
    "latency": typer.Option(metavar="T", help="Time until a message arrives, such as 0.1ms."),
    "batch_size": typer.Option(metavar="N", help="Samples of an optimizer step."),
    "local_batch_size": typer.Option(
        metavar="N", help="Samples of a local step in cadence and async; as --batch-size."
    ),
    "micro_batch_size": typer.Option(metavar="N", help="Most samples computed at once."),
    "anchor": typer.Option(metavar="N", help="Local steps of the slowest rank, to begin with."),
    "picture": typer.Option(metavar="FILE", help="Draw a picture: FILE.png or FILE.svg."),
    "script": typer.Argument(metavar="SCRIPT", help="A Python file."),
    "arguments": typer.Argument(metavar="ARGS", help="Arguments of the script."),
    "config": typer.Argument(metavar="RUN.YAML", help="Keys of the run."),
    "policies": typer.Option(metavar="NAMES", help="Policies to try."),
    "backends": typer.Option(metavar="NAMES", help="Averaging backends to try."),
    "minutes": typer.Option(metavar="M", help="Training time of each combination."),
    "rounds": typer.Option(metavar="R", help="Rounds into which that time is divided."),
    "nproc": typer.Option(metavar="N", help="Ranks to start here; one per GPU, or 1."),
    "emulate_slow": typer.Option(
        metavar="RANK:FACTOR", help="Slow a rank on purpose; may be repeated."
    ),
    "overrides": typer.Option("--set", metavar="KEY=VALUE", help="Set a key; may be repeated."),
    "resume": typer.Option("--resume", help="Continue from the newest complete checkpoint."),
    "allow": typer.Option(
        metavar="WHAT", help="Resume though data or precision differ; may be repeated."
    ),
    "predict": typer.Option(
        metavar="FILE", help="Classify the texts of FILE with the newest finished run."
    ),
    "out": typer.Option(metavar="DIR", help="Folder of runs."),
    "name": typer.Option(help="Name of the run."),
    "nnodes": typer.Option(
        "--nnodes", metavar="N", help="Machines of the run, N or MIN:MAX; start it on each."
    ),
    "node_rank": typer.Option(metavar="K", help="Number of this machine, 0 to N - 1."),
    "master_addr": typer.Option(metavar="HOST", help="Address of machine 0 that all can reach."),
    "port": typer.Option(
        metavar="P", help=f"Port of the rendezvous; a free one, or {DEFAULT_PORT} with --nnodes."
    ),
    "elastic": typer.Option(
        metavar="MIN:MAX", help="Elastic team: MIN workers are enough to continue."
    ),
    "max_failures": typer.Option(metavar="N", help="Stop when more workers have failed; 10."),
    "team": typer.Argument(metavar="MIN:MAX", help="Fewest and most workers."),
    "host": typer.Option(metavar="HOST", help="Address to listen on; not loopback: needs a token."),
    "timeout_s": typer.Option("--timeout-s", metavar="S", help="Longest wait for workers."),
    "host_lease_s": typer.Option(
        "--host-lease-s", metavar="S", help="A machine silent for so long is lost."
    ),
    "dashboard": typer.Option("--dashboard", help="Serve a dashboard during the run."),
    "demo": typer.Option("--demo", help="Train a small model on Python's own sources."),
    "quiet": typer.Option("--quiet", help="Print neither the team nor progress."),
}

#: Commands that a worker can run in place of a script.
_TASKS: Final = ("pretrain", "classify")

#: Options that take several names in one text, with commas between them.
_SEPARATED: Final = {"policies", "backends"}


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
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel PyTorch training on unequal devices."""


def _command(
    options: type[_Options], **settings: Any
) -> Callable[[Callable[[_Options, Sequence[str]], int]], None]:
    """Make a command of a function that takes options and the whole command line.

    The command's options are the fields of the class ``options`` that are in ``_TAKEN``.
    """
    known = {field.name: field for field in fields(options)}  # type: ignore[arg-type]
    parameters = [Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, taken in _TAKEN.items():
        if name in known:
            kind: Any = known[name].type
            default: Any = known[name].default
            if kind is Keys:
                kind = Path | None  # a command line names a file
            if get_origin(kind) is tuple:
                kind = list[str]
                default = default if default is MISSING else list(default)
            kind = Annotated[kind, taken]
            default = Parameter.empty if default is MISSING else default
            parameter = Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            parameters.append(parameter)

    def register(body: Callable[[_Options, Sequence[str]], int]) -> None:
        def run(context: typer.Context, **given: Any) -> None:
            for name, value in given.items():
                if name in _SEPARATED:
                    names = (part.strip() for text in value for part in text.split(","))
                    given[name] = tuple(filter(None, names))
                elif isinstance(value, list):
                    given[name] = tuple(value)
            raise typer.Exit(run_child(lambda: body(options(**given), context.obj)))

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        app.command(body.__name__, help=body.__doc__, **settings)(run)

    return register


@_command(PretrainOptions)
def pretrain(options: PretrainOptions, arguments: Sequence[str]) -> int:
    """Train a causal language model from scratch or from a checkpoint."""
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
    config = resolve_config(options, holds_runs=not options.node_rank)
    return _launch_task(options, nproc, config.timeout_s, arguments)


@_command(BenchOptions)
def bench(options: BenchOptions, _arguments: Sequence[str]) -> int:
    """Compare policies and backends on your configuration, and recommend one."""
    from evener.config.presets import resolve_config
    from evener.tasks.bench import run_bench

    place = DistributedTrainConfig.from_env()
    if place.launched_by != "alone":
        raise ConfigError(
            f"evener bench starts ranks by itself, but {place.launched_by} has started this "
            f"process as rank {place.rank} of {place.world_size}; run it alone, with --nproc"
        )
    parse_emulation(options.emulate_slow, _count_ranks(options.nproc))
    resolve_config(
        PretrainOptions(config=options.config, overrides=options.overrides, name="bench")
    )
    return 0 if run_bench(options).recommended else 1


@_command(ClassifyOptions)
def classify(options: ClassifyOptions, arguments: Sequence[str]) -> int:
    """Train a text classifier: a LoRA adapter on a frozen model, and a head for the classes."""
    from evener.tasks.classification.command import predict_file, run_classification

    place = DistributedTrainConfig.from_env()
    if options.predict is not None:
        return predict_file(options) if place.rank == 0 else 0
    if place.launched_by != "alone":
        _become_rank(options, place)
        return run_classification(options, place)
    from evener.config.presets import find_demo_base, needs_demo_base, resolve_classify

    nproc = _count_ranks(options.nproc, DEMO_NPROC if options.config is None else 1)
    config = resolve_classify(options, holds_runs=not options.node_rank)
    if needs_demo_base(config):
        if choose_nodes(options, config.timeout_s) is not None:
            raise ConfigError(
                "model.path is empty, for which each machine would train a base model of its own; "
                "with --nnodes, name the folder of a model that all machines have"
            )
        _check_emulation(options, nproc)
        if find_demo_base(options.out) is None:
            if config.devices not in ("auto", "cpu"):  # else it would be said after that training
                from evener.team.placement import check_devices

                check_devices(config.devices)
            if not options.quiet:
                print("there is no base model yet: pretraining the demo's first", file=sys.stderr)
            demo = ["pretrain", "--demo", "--set", "measure=false", "--out", str(options.out)]
            demo += ["--quiet"] if options.quiet else []
            from evener.team.launch import LaunchPlan, launch

            if code := launch([*_PYTHON, "evener", *demo], LaunchPlan(nproc=DEMO_NPROC)):
                return code
        base = find_demo_base(options.out)
        if base is None:
            raise ConfigError("the demo has left no checkpoint; name a base model with model.path")
        arguments = [*arguments, "--set", f"model.path={json.dumps(str(base))}"]
    return _launch_task(options, nproc, config.timeout_s, arguments)


@_command(ScriptOptions, context_settings={"allow_interspersed_args": False})
def launch(options: ScriptOptions, _arguments: Sequence[str]) -> int:
    """Run a training script as one rank per device of this host, or of several."""
    from evener.team.launch import launch

    parse_emulation(options.emulate_slow)
    if options.emulate_slow:
        # For Ddp.setup in the script's ranks.
        os.environ[EMULATE_SLOW] = ",".join(options.emulate_slow)
    if not options.script.is_file():
        raise ConfigError(f"{options.script} is not a file; give the path of a Python script")
    command = [*_PYTHON, "evener.team.script", str(options.script), *options.arguments]
    place = DistributedTrainConfig.from_env()
    if place.launched_by in ("torchrun", "slurm"):
        _refuse_launch_options(options, place)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(command[0], command)  # a rank already: become the script
    nodes = choose_nodes(options, DEFAULT_TIMEOUT_S, is_elastic=options.elastic is not None)
    plan = _plan(options, nodes, [str(options.script), *options.arguments])
    with _with_dashboard(Path("runs"), options, nodes):
        return launch(command, plan)


# The address comes before our options, so the program's own options have to pass through.
@_command(JoinOptions, context_settings={"ignore_unknown_options": True})
def join(options: JoinOptions, _arguments: Sequence[str]) -> int:
    """Add workers to a running elastic team, with the program of the team."""
    from evener.team.agent import MAX_FAILURES
    from evener.team.launch import LaunchPlan, launch

    program = options.program
    if program[0].endswith((".yaml", ".yml")):  # of a run
        program = ("pretrain", *program)
    is_task = program[0] in _TASKS
    if not (is_task or program[0] == "-m" or Path(program[0]).is_file()):
        raise ConfigError(
            f"{program[0]} is not a file; give what the team runs: a script, -m and a module, a "
            f"run's YAML, or one of {', '.join(_TASKS)}, with its arguments"
        )
    module = "evener" if is_task else "evener.team.script"
    plan = LaunchPlan(
        join=options.coordinator,
        nproc=options.nproc,
        token_file=options.token_file,
        max_failures=MAX_FAILURES if options.max_failures is None else options.max_failures,
    )
    return launch([*_PYTHON, module, *program], plan)


@_command(ReportOptions)
def report(options: ReportOptions, _arguments: Sequence[str]) -> int:
    """Write an HTML report of runs, which needs no server and no network."""
    from evener.run_report.writing import numbers_text, report, write_page, write_trace

    runs = [Path(run) for run in options.runs]
    if options.trace is not None:
        if len(runs) > 1:
            raise ConfigError(f"--trace takes one run, not {len(runs)}; write one for each")
        write_trace(runs[0], options.trace)
        print(f"{options.trace}: open it in https://ui.perfetto.dev", file=sys.stderr)
    wants_page = options.page is not None or not (options.numbers or options.trace)
    if wants_page or options.numbers:
        document = report(runs)
        if wants_page:
            print(write_page(document, options.page), file=sys.stderr)
        if options.numbers:
            print(numbers_text(document))
    return 0


@_command(CoordinateOptions)
def coordinator(options: CoordinateOptions, _arguments: Sequence[str]) -> int:
    """Decide who is in an elastic team; evener launch --elastic starts one by itself."""
    from evener.team.coordinator import CoordinatorOptions, coordinate
    from evener.team.token_files import read_token

    least, most = read_team_limits(options.team, "--elastic")
    return coordinate(
        CoordinatorOptions(
            host=options.host,
            port=0 if options.port is None else check_port(options.port, "--port"),
            least=least,
            most=most,
            token=read_token(options.token_file) or None,
            deadlines=Deadlines(timeout_s=options.timeout_s, host_lease_s=options.host_lease_s),
        )
    )


@_command(DoctorOptions)
def doctor(options: DoctorOptions, _arguments: Sequence[str]) -> int:
    """Find problems of this machine, of another one and of the link that stop or slow runs."""
    from evener.doctor.answering import answer_visitors, open_door
    from evener.doctor.diagnosis import diagnose
    from evener.doctor.examination import examine_host
    from evener.team.token_files import read_token

    token = read_token(options.token_file)
    if options.listen:
        facts = examine_host()  # before the door takes the port
        with closing(open_door(options.address, token)) as door:
            answer_visitors(door, facts, token)
        return 0
    diagnosis = diagnose(options.address, token)
    print(diagnosis.json_text() if options.as_json else diagnosis.for_people())
    return 1 if diagnosis.problems else 0


@_command(DashboardOptions)
def dashboard(options: DashboardOptions, _arguments: Sequence[str]) -> int:
    """Show runs in the browser, during and after training."""
    from evener.dashboard.shelf import Shelf
    from evener.team.token_files import read_token

    try:
        from evener.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"evener dashboard needs {error.name}: pip install 'evener[dashboard]'"
        ) from error
    if parent := os.environ.pop(DASHBOARD_OF, None):
        die_with(int(parent))
    serve(Shelf.at(options.folder), options.bind, read_token(options.token_file))
    return 0


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


@_command(PlanOptions)
def plan(options: PlanOptions, _arguments: Sequence[str]) -> int:
    """Predict a team's speed under each policy, and which devices are worth adding."""
    from evener.simulation.question import answer_plan, calibrated_team, check_options
    from evener.simulation.telling import document, text

    check_options(options)
    if options.picture is not None:
        from evener.simulation.chart import check_picture

        check_picture(options.picture)
    calibrated = None
    if options.calibrate:
        with loading_libraries():
            from evener.simulation.calibrated import time_devices
        calibrated = calibrated_team(options, time_devices())
    advice = answer_plan(options, calibrated)
    if options.picture is not None:
        from evener.simulation.chart import draw

        draw(advice, options.picture)
        print(f"{options.picture}: written", file=sys.stderr)
    if options.numbers:
        print(json.dumps(document(advice), allow_nan=False))
    else:
        # Names come from a file of events: they may hold what a terminal would obey.
        print("\n".join(map(printable, text(advice).split("\n"))), end="")
    return 0


def _count_ranks(given: int | None, least: int = 1) -> int:
    from evener.team.worker_processes import check_nproc

    nproc = max(least, local_devices()) if given is None else given
    check_nproc(nproc)
    return nproc


def _plan(
    options: LaunchOptions, nodes: Nodes | None, program: Sequence[str], nproc: int | None = None
) -> "LaunchPlan":
    """What the user said about workers, for the launcher.

    Args:
        options: Those of the command.
        nodes: The machines of the run.
        program: What workers run.
        nproc: Ranks of this host in a fixed team; by default, what the user said.
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
        nproc=options.nproc if is_elastic else nproc or _count_ranks(options.nproc),
        port=options.port,
        token_file=options.token_file,
        max_failures=MAX_FAILURES if options.max_failures is None else options.max_failures,
        program=program,
    )


def _launch_task(
    options: TaskOptions, nproc: int, timeout_s: float, arguments: Sequence[str]
) -> int:
    from evener.team.launch import launch

    nodes = choose_nodes(options, timeout_s, is_elastic=options.elastic is not None)
    if nodes is None:
        _check_emulation(options, nproc)
    plan = _plan(options, nodes, arguments, nproc)
    with _with_dashboard(options.out, options, nodes):
        return launch([*_PYTHON, "evener", *arguments], plan)


def _check_emulation(options: TaskOptions, nproc: int) -> None:
    world_size = (
        nproc if options.elastic is None else read_team_limits(options.elastic, "--elastic")[1]
    )
    parse_emulation(options.emulate_slow, world_size)


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
