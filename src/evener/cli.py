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
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, replace
from functools import wraps
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from itertools import chain
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from typer import Argument, Option
from typer.core import TyperGroup

import evener
from evener.comm.addresses import parse_address
from evener.config.keys import Keys
from evener.config.options import (
    BenchOptions,
    ClassifyOptions,
    Json,
    LaunchOptions,
    PlanOptions,
    PretrainOptions,
    TaskOptions,
    TokenFile,
    WorkerOptions,
)
from evener.engine.emulate import EMULATE_SLOW, parse_emulation
from evener.errors import ConfigError
from evener.protocol.formation import Deadlines, read_team_limits
from evener.team.child import apply_threads, die_with, loading_libraries, run_child
from evener.team.environment import DistributedTrainConfig, read_machines
from evener.team.host import local_devices
from evener.team.nodes import DEFAULT_TIMEOUT_S, Nodes, choose_nodes
from evener.team.signals import end_in_silence
from evener.team.terminal import answer, printable

if TYPE_CHECKING:
    from evener.team.launch import LaunchPlan

#: What commands are for, in the order of ``--help``.
_RUN: Final = "Run"
_LOOK: Final = "Look at runs"
_CHECK: Final = "Check and compare"


class _Commands(TyperGroup):
    """The commands of ``evener --help``, by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for purpose in (_RUN, _LOOK, _CHECK):
            rows = [
                (name, command.get_short_help_str(limit=100))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", None) == purpose
            ]
            with formatter.section(purpose):
                formatter.write_dl(rows)


app = typer.Typer(
    name="evener",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    # Plain help and plain tracebacks: rich would take longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


# -P: a file in the current folder must not shadow a module of the library.
_PYTHON: Final = (sys.executable, "-P", "-m")

#: Set by a launcher for its dashboard: the launcher's process id; the dashboard ends with it.
DASHBOARD_OF: Final = "EVENER_DASHBOARD_OF"

#: Longest time for a dashboard to end after the run, in seconds.
_DASHBOARD_END_S: Final = 5.0

#: Longest of the deadlines that users may choose, in seconds.
_MOST_S: Final = 1e9
#: Ranks of the pretraining demo, and of a classification without options.
DEMO_NPROC: Final = 2
#: How much slower the second rank of the demo is.
DEMO_EMULATE_SLOW: Final = ("1:3",)


_Launch = TypeVar("_Launch", bound=LaunchOptions)

#: Commands that a worker can run in place of a script.
_TASKS: Final = ("pretrain", "classify")


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


def _command(
    purpose: str, example: str, **settings: Any
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a command from a function that returns the exit code; `run_child` reports its errors.

    A parameter ``options`` is a class of ``config.options``, whose fields are the command's.

    Args:
        purpose: The group in ``evener --help``.
        example: A command line, without ``evener``, for its own ``--help``.
        **settings: For ``Typer.command``.
    """
    settings |= {"rich_help_panel": purpose, "epilog": f"Example: evener {example}"}

    def register(body: Callable[..., int]) -> Callable[..., int]:
        parameters = dict(signature(body).parameters)
        kind = parameters.pop("options").annotation if "options" in parameters else None
        declared = [] if kind is None else [*_parameters_of(kind)]

        @wraps(body)
        def run(**given: Any) -> None:
            own = {each.name: given.pop(each.name) for each in declared}
            if kind is not None:
                given["options"] = kind(**{n: v for n, v in own.items() if v is not None})
            raise typer.Exit(run_child(lambda: body(**given)))

        run.__signature__ = Signature([*parameters.values(), *declared])  # type: ignore[attr-defined]
        app.command(**settings)(run)
        return body

    return register


def _parameters_of(kind: type[Any]) -> Iterator[Parameter]:
    """Yield a parameter for each option of a class, its own before those of its bases."""
    hints, known = get_type_hints(kind, include_extras=True), {f.name: f for f in fields(kind)}
    for name in dict.fromkeys(
        chain.from_iterable(vars(one).get("__annotations__", ()) for one in kind.__mro__)
    ):
        if get_origin(hints[name]) is not Annotated:
            continue  # for Python alone
        given, shown = get_args(hints[name])
        default = known[name].default
        if get_origin(given) is Sequence:  # without any, the class has its default
            given, default = list[str] | None, None
        yield Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if default is MISSING else default,
            annotation=Annotated[Path | None if given == Keys else given, shown],
        )


def _split(texts: Sequence[str]) -> list[str]:
    """Return the names in texts, in which commas separate them."""
    return [name for text in texts for part in text.split(",") if (name := part.strip())]


def _show(text: str) -> None:
    """Print text with names from an event file, which may contain control characters."""
    encoding = sys.stdout.encoding or "utf-8"  # an old one lacks signs such as "×"
    shown = "\n".join(map(printable, text.split("\n")))
    answer(shown.encode(encoding, "replace").decode(encoding))


# ── tasks ─────────────────────────────────────────────────────────────────────────────────────────


@_command(_RUN, "pretrain run.yaml --nproc 2")
def pretrain(context: typer.Context, options: PretrainOptions) -> int:
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

    options = _with_machines(options)
    # Report errors that can be known now once, before any rank starts.
    demo_nproc = DEMO_NPROC if options.demo else None
    nproc = _count_ranks(demo_nproc if options.nproc is None else options.nproc)
    checked = resolve_config(options)
    return _launch_task(options, nproc, checked.timeout_s, context.obj)


@_command(_CHECK, "bench run.yaml --nproc 2 --minutes 5")
def bench(options: BenchOptions) -> int:
    """Compare policies and backends on your configuration, and recommend one."""
    options = replace(options, policies=_split(options.policies), backends=_split(options.backends))
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


@_command(_RUN, "classify run.yaml --nproc 2")
def classify(context: typer.Context, options: ClassifyOptions) -> int:
    """Train a text classifier: a LoRA adapter on a frozen model, and a head for the classes."""
    arguments = context.obj
    from evener.tasks.classification.command import predict_file, run_classification

    place = DistributedTrainConfig.from_env()
    if options.predict is not None:
        return predict_file(options) if place.rank == 0 else 0
    if place.launched_by != "alone":
        _become_rank(options, place)
        return run_classification(options, place)
    options = _with_machines(options)
    from evener.config.presets import find_demo_base, needs_demo_base, resolve_classify
    from evener.team.launch import LaunchPlan
    from evener.team.launch import launch as launch_here

    nproc = _count_ranks(options.nproc, DEMO_NPROC if options.config is None else 1)
    checked = resolve_classify(options)
    if needs_demo_base(checked):
        if _choose_nodes(options, checked.timeout_s) is not None:
            raise ConfigError(
                "model.path is empty, for which each machine would train a base model of its own; "
                "with --nnodes, name the folder of a model that all machines have"
            )
        _check_emulation(options, nproc)
        if find_demo_base(options.out) is None:
            if checked.devices not in ("auto", "cpu"):  # otherwise only after that training
                from evener.team.placement import check_devices

                check_devices(checked.devices)
            if not options.quiet:
                print("the base model is missing: pretraining the demo first", file=sys.stderr)
            demo = ["pretrain", "--demo", "--out", str(options.out)]
            demo += ["--quiet"] if options.quiet else []
            if code := launch_here([*_PYTHON, "evener", *demo], LaunchPlan(nproc=DEMO_NPROC)):
                return code
        base = find_demo_base(options.out)
        if base is None:
            raise ConfigError("the demo wrote no checkpoint; name a base model with model.path")
        arguments = [*arguments, "--set", f"model.path={json.dumps(str(base))}"]
    return _launch_task(options, nproc, checked.timeout_s, arguments)


# ── looking at machines and runs ──────────────────────────────────────────────────────────────────


@_command(_LOOK, "report runs/first runs/second -o both.html")
def report(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run folders; several are compared.")],
    page: Annotated[Path | None, Option("-o", "--out", help="The page; report.html.")] = None,
    trace: Annotated[Path | None, Option(help="Write a Chrome trace, for Perfetto.")] = None,
    numbers: Json = False,
) -> int:
    """Write an HTML report of runs; it needs no server and no network."""
    from evener.run_report.writing import report, verdict_lines, write_page, write_trace

    if trace is not None:
        if len(runs) > 1:
            raise ConfigError(f"--trace takes one run, not {len(runs)}; write one for each")
        write_trace(runs[0], trace)
        print(f"{trace}: open it in https://ui.perfetto.dev", file=sys.stderr)
    wants_page = page is not None or not (numbers or trace)
    if wants_page or numbers:
        document = report(runs)
        if wants_page:
            print(write_page(document, runs, page), file=sys.stderr)
            if not numbers:
                _show("\n".join(verdict_lines(document)))
        if numbers:
            answer(json.dumps(document, allow_nan=False))
    return 0


@_command(_CHECK, "doctor")
def doctor(
    address: Annotated[
        str | None,
        Argument(metavar="[HOST[:PORT]]", help="The machine that listens, or where to listen."),
    ] = None,
    listen: Annotated[
        bool, Option("--listen", help="Wait for another machine; on loopback without HOST.")
    ] = False,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Find what stops or slows runs on this machine, on another one and on their link."""
    from evener.doctor.diagnosis import diagnose
    from evener.team.wire import read_team_token, read_token

    token = read_token(token_file) or read_team_token(os.environ) or b""
    diagnosis = diagnose(address, token, listens=listen)
    answer(diagnosis.json_text() if as_json else diagnosis.for_people())
    return 1 if diagnosis.problems else 0


@_command(_LOOK, "dashboard runs")
def dashboard(
    folder: Annotated[
        Path, Argument(metavar="[RUN|ROOT]", help="A run folder, or a folder of runs.")
    ] = Path("runs"),
    bind: Annotated[
        str | None,
        Option(metavar="HOST[:PORT]", help="Address to listen on; loopback if left out."),
    ] = None,
    token_file: TokenFile = None,
) -> int:
    """Show runs in the browser, during and after training."""
    from evener.dashboard.run_index import RunIndex
    from evener.team.wire import read_token

    try:
        from evener.dashboard.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"evener dashboard needs {error.name}: pip install 'evener[dashboard]'"
        ) from error
    if parent := os.environ.pop(DASHBOARD_OF, None):
        die_with(int(parent))
    serve(RunIndex.at(folder), bind, read_token(token_file))
    return 0


@_command(_CHECK, "plan --speeds 10,4 --params 35e6 --bandwidth 1")
def plan(options: PlanOptions) -> int:
    """Predict a team's speed under each policy, and which devices are worth adding."""
    from evener.simulation.advice_text import document, text
    from evener.simulation.question import answer_plan

    advice = answer_plan(options)
    if options.numbers:
        answer(json.dumps(document(advice), allow_nan=False))
    else:
        _show(text(advice).rstrip("\n"))
    return 0


# ── teams: launch, coordinator, join, and what starts ranks ───────────────────────────────────────


@_command(_RUN, "launch --nproc 2 train.py", context_settings={"allow_interspersed_args": False})
def launch(
    script: Annotated[Path, Argument(metavar="SCRIPT", help="A Python file.")],
    options: LaunchOptions,
    arguments: Annotated[list[str] | None, Argument(metavar="ARGS", help="Its arguments.")] = None,
) -> int:
    """Start a training script once for each device of this host, or of several."""
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
    options = _with_machines(options)
    nodes = _choose_nodes(options, DEFAULT_TIMEOUT_S)
    plan = _plan(options, nodes, [str(script), *(arguments or ())])
    with _with_dashboard(Path("runs"), options, nodes):
        return launch_here(command, plan)


# The address comes before our options, so options after the program belong to the program.
@_command(
    _RUN,
    "join 192.168.1.10:29600 --token-file token train.py",
    context_settings={"ignore_unknown_options": True},
)
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
    options: WorkerOptions,
) -> int:
    """Add workers to a running elastic team, with the program of the team."""
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
        nproc=options.nproc,
        token_file=options.token_file,
        address=options.address,
        max_failures=options.max_failures,
    )
    module = "evener" if is_task else "evener.team.script"
    return launch_here([*_PYTHON, module, *program], plan)


@_command(_RUN, "coordinator 1:4 --bind 192.168.1.10:29600 --token-file token")
def coordinator(
    team: Annotated[str, Argument(metavar="MIN:MAX", help="Fewest and most workers.")] = "1:64",
    bind: Annotated[
        str, Option(metavar="HOST[:PORT]", help="Where to listen; not on loopback: needs a token.")
    ] = "127.0.0.1",
    token_file: TokenFile = None,
    ledger: Annotated[
        Path | None, Option(help="File from which a restarted coordinator continues.")
    ] = None,
    timeout_s: Annotated[
        float, Option(min=1, max=_MOST_S, help="Longest wait for workers.")
    ] = DEFAULT_TIMEOUT_S,
    host_lease_s: Annotated[
        float,
        Option(
            min=Deadlines().lease_s,
            max=_MOST_S,
            help="Longest silence of a machine before it is lost.",
        ),
    ] = Deadlines().host_lease_s,
    patience_s: Annotated[
        float,
        Option(
            min=1,
            max=_MOST_S,
            help="Longest wait of workers for a coordinator that does not answer.",
        ),
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
    """Return the user's options about workers, for the launcher.

    Args:
        options: The options of the command.
        nodes: The machines of the run.
        program: What workers run.
        nproc: Ranks of this host in a team of several hosts, or in a fixed one; by default, as the
            user asked.
    """
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
        # On one machine an elastic team begins with the most workers that it may have.
        nproc=options.nproc
        if is_elastic and nodes is None
        else nproc or _count_ranks(options.nproc),
        port=options.port,
        token_file=options.token_file,
        address=options.address,
        max_failures=options.max_failures,
        program=program,
    )


def _launch_task(
    options: TaskOptions, nproc: int, timeout_s: float, arguments: Sequence[str]
) -> int:
    from evener.team.launch import launch as launch_here

    nodes = _choose_nodes(options, timeout_s)
    if nodes is None:
        _check_emulation(options, nproc)
    plan = _plan(options, nodes, arguments, nproc)
    with _with_dashboard(options.out, options, nodes):
        return launch_here([*_PYTHON, "evener", *arguments], plan)


def _with_machines(options: _Launch) -> _Launch:
    """Return the options with the environment's machines, unless the user names machines."""
    if options.nnodes is not None:
        return options
    named = read_machines(os.environ)
    return replace(options, **{n: v for n, v in named.items() if getattr(options, n) is None})


def _choose_nodes(options: LaunchOptions, timeout_s: float) -> Nodes | None:
    is_elastic = options.elastic is not None
    given = options.nnodes, options.node_rank, options.master_addr, options.port
    return choose_nodes(*given, timeout_s=timeout_s, is_elastic=is_elastic)


def _check_emulation(options: TaskOptions, nproc: int) -> None:
    world_size = (
        nproc if options.elastic is None else read_team_limits(options.elastic, "--elastic")[1]
    )
    parse_emulation(options.emulate_slow, world_size)


def _count_ranks(given: int | None, least: int = 1) -> int:
    return max(least, local_devices()) if given is None else given


def _become_rank(options: TaskOptions, place: DistributedTrainConfig) -> None:
    if place.launched_by != "evener":
        _refuse_launch_options(options, place)
    with loading_libraries():
        apply_threads(place)
    # At exit Python's garbage collector would traverse all of torch: up to three seconds, of the
    # five that a rank has to stop.
    atexit.register(gc.freeze)


def _refuse_launch_options(options: LaunchOptions, place: DistributedTrainConfig) -> None:
    for name in ("nproc", "nnodes", "node_rank", "master_addr", "port", "elastic", "dashboard"):
        option, value = f"--{name.replace('_', '-')}", getattr(options, name)
        if value not in (None, False):
            raise ConfigError(
                f"{option} is {value}, but {place.launched_by} started this process as rank "
                f"{place.rank} of {place.world_size} already; leave {option} out"
            )


@contextmanager
def _with_dashboard(folder: Path, options: LaunchOptions, nodes: Nodes | None) -> Iterator[None]:
    """Serve a dashboard of the runs in a folder during the block, if it is wanted.

    With several machines, the first one serves it, since rank 0 writes the events there.
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
        start_new_session=True,  # Ctrl-C in the terminal stops the run, which takes a while to end
    )
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DASHBOARD_END_S)
        process.kill()  # it may hang, for example on a disk that does not answer
