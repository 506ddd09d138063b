"""The scripts that newcomers write first, with default options: they end as one plain process.

Each file of ``programs/`` is started as its author would start it. It leaves ``model.pt``, and what
it prints is compared, too. The plain process runs the same file over ``helpers/plain_evener.py``.
"""

import contextlib
import io
import json
import re
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import ConfigError
from helpers.launched import Ended, Sandbox
from helpers.markdown import blocks
from helpers.newcomers import BEGIN, LOOPS
from helpers.ranks import Rank, be_script, launch_variables, run_ranks, run_ranks_to_end
from helpers.source import ROOT

PROGRAMS = Path(__file__).parent / "programs"

#: Float32 sums in another order, over some twenty steps of SGD.
SUMS = 1e-5
#: The same, divided by the small roots of Adam.
ADAM = 1e-3
#: Each micro-batch rounds its products to eight bits by itself.
BF16 = 1e-2


@dataclass(frozen=True)
class Program:
    """How a script is started, and how near to the plain process its parameters end.

    Attributes:
        tolerance: Relative error of all parameters together.
        arguments: Its command line.
        typed: What it reads from standard input.
        launched_ranks: On so many ranks it is launched, as the launcher takes part in what it is
            about. All others are forked, on three ranks.
    """

    tolerance: float = SUMS
    arguments: tuple[str, ...] = ()
    typed: str = ""
    launched_ranks: int = 0


SAME = {
    "script_ends": Program(launched_ranks=2),
    "main_guard": Program(ADAM),
    "tries_three_batches": Program(),
    "sys_exit": Program(launched_ranks=2),
    "sys_exit_in_loop": Program(launched_ranks=2),
    "asks_for_input": Program(typed="2\n", launched_ranks=1),
    "iterable_dataset": Program(),
    "own_dataloader": Program(launched_ranks=2),
    "argparse_options": Program(arguments=("--hidden", "8", "--lr", "0.05"), launched_ranks=2),
    "config": Program(ADAM),
    "logger": Program(),
    "saves_checkpoints": Program(ADAM),
    "evaluates_on_rank_0": Program(),
    "gan": Program(ADAM),
    "early_stopping": Program(),
    "lr_scheduler": Program(),
    "lr_by_epoch": Program(),
    "clips_gradients": Program(),
    "accumulates": Program(ADAM),
    "bf16_autocast": Program(BF16),
    "collects_metrics": Program(),
}


@pytest.fixture
def sandbox(tmp_path: Path):
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def run_plain(_: Rank, script: str, folder: str, program: Program) -> tuple[str, dict[str, Any]]:
    """What the script prints and saves without evener."""
    from helpers import plain_evener

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setitem(sys.modules, "evener", plain_evener)
        patch.setattr(sys, "argv", [script, *program.arguments])
        patch.setattr(sys, "stdin", io.StringIO(program.typed))
        with contextlib.suppress(SystemExit):
            runpy.run_path(script, run_name="__main__")
    return printed.getvalue(), torch.load(Path(folder) / "model.pt")


def plain(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    folder.mkdir()
    [result] = run_ranks(run_plain, 1, str(PROGRAMS / f"{name}.py"), str(folder), SAME[name])
    return result


def script_of(sandbox: Sandbox, name: str) -> Path:
    """The file of a program."""
    if name not in LOOPS:
        return PROGRAMS / f"{name}.py"
    script = sandbox.folder / f"{name}.py"
    script.write_text(BEGIN + LOOPS[name])
    return script


def start(sandbox: Sandbox, name: str, world_size: int, *arguments: str, **options: Any) -> Any:
    """Starts a program as its author does: plainly, or as so many ranks."""
    script = script_of(sandbox, name)
    if world_size == 1:
        return sandbox.start(sys.executable, script, *arguments, **options)
    return sandbox.evener("launch", "--nproc", world_size, script, *arguments, **options)


def end(sandbox: Sandbox, name: str, world_size: int) -> Ended:
    program = SAME.get(name, Program())
    if not program.typed:
        return start(sandbox, name, world_size, *program.arguments).end()
    typed = sandbox.folder / "typed"
    typed.write_text(program.typed)
    with typed.open() as stdin:
        return start(sandbox, name, world_size, *program.arguments, stdin=stdin).end()


def fork(sandbox: Sandbox, name: str, world_size: int, *, code: int) -> str:
    """Runs a program as the launcher's ranks do, without importing torch; what all ranks print."""
    command = [str(script_of(sandbox, name)), *SAME.get(name, Program()).arguments]
    with contextlib.chdir(sandbox.folder):
        ranks = run_ranks_to_end(be_script, world_size, *command)
    out = "".join(rank.output for rank in ranks)
    assert {rank.value if rank.returned else rank.exit_code for rank in ranks} == {code}, out
    return out


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Relative error of all parameters together."""
    assert found.keys() == expected.keys()
    theirs = torch.cat([expected[name].double().flatten() for name in expected])
    ours = torch.cat([found[name].double().flatten() for name in expected])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", SAME)
def test_a_program_ends_as_one_plain_process(name: str, sandbox: Sandbox, tmp_path: Path) -> None:
    printed, expected = plain(name, tmp_path / "plain")
    program = SAME[name]
    if not program.launched_ranks:
        out = fork(sandbox, name, 3, code=0)
        assert set(printed.splitlines()) <= set(out.splitlines())
    else:
        ended = end(sandbox, name, program.launched_ranks)
        assert ended.code == 0, ended.err
        assert ended.out == printed
        assert "Traceback" not in ended.err
    found = torch.load(sandbox.folder / "model.pt")
    assert distance(found, expected) <= program.tolerance


def test_each_rank_prints_whole_lines_that_name_it(sandbox: Sandbox) -> None:
    ended = end(sandbox, "prints", 2)
    assert ended.code == 0, ended.err
    by_rank: dict[bool, list[str]] = {False: [], True: []}
    for line in ended.out.splitlines():
        by_rank[line.startswith("[rank 1] ")].append(line.removeprefix("[rank 1] "))
    seen = []
    for rank, lines in enumerate(by_rank.values()):
        first, *losses, last = lines
        assert first == f"hello from rank {rank} of 2"
        assert all(re.fullmatch(r"epoch [01] loss \d\.\d{4}", line) for line in losses)
        found = re.fullmatch(rf"rank {rank} has seen (\d+) samples", last)
        assert found, last
        seen.append(int(found[1]))
    assert sum(seen) == 2 * 96


def test_an_exception_is_shown_once_with_its_line(sandbox: Sandbox) -> None:
    ended = end(sandbox, "exception", 2)
    assert ended.code == 1
    assert ended.err.count("ValueError: a target is missing") == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert re.search(r'exception\.py", line \d+, in check', ended.err)
    assert "PeerLostError" not in ended.err


def test_an_exit_with_a_message_is_a_failure(sandbox: Sandbox) -> None:
    ended = end(sandbox, "exits_with_a_message", 2)
    assert ended.code == 1
    assert "it has not learned enough" in ended.err
    assert "Traceback" not in ended.err


def test_input_is_asked_for_by_the_first_rank_alone(sandbox: Sandbox) -> None:
    ended = end(sandbox, "asks_for_input", 2)
    assert ended.code == 1
    assert ended.err.count("EOFError: EOF when reading a line") == 1
    assert "only the first rank that a launcher starts has its standard input" in ended.err
    assert "read the value from an argument or an environment variable" in ended.err


HABITS = {
    "clips_by_hand": "clip with DdpConfig(max_grad_norm=...)",
    "steps_by_hand": "remove it: ddp.step() steps the optimizers",
    "accumulates_by_hand": "To accumulate gradients, give ddp.loader the batch_size",
    "saves_on_one_rank": "neither `if ddp.rank == 0` nor a counter of the loop",
    "saves_a_large_optimizer": "gathering optimizer state (optimizer.state_dict)",
}


@pytest.mark.parametrize(("name", "remedy"), HABITS.items(), ids=HABITS)
def test_a_habit_that_cannot_work_is_refused_with_its_remedy(
    name: str, remedy: str, sandbox: Sandbox
) -> None:
    out = fork(sandbox, name, 2, code=1)
    assert remedy in out
    assert re.search(rf"{name}\.py:\d+", out)
    assert "Traceback" not in out


def test_early_stopping_on_one_rank_is_named(sandbox: Sandbox) -> None:
    ended = end(sandbox, "stops_on_rank_0", 2)
    assert ended.code == 1
    assert ended.out.startswith("stopped in epoch ")
    assert re.search(r"rank 0 \(pid \d+\) ended with exit code 0 while others were at", ended.err)
    assert "decide by a number that is the same on every rank" in ended.err
    assert "Traceback" not in ended.err


def test_help_and_a_missing_option_are_those_of_argparse(sandbox: Sandbox) -> None:
    """Each rank prints them; those of rank 0 are not marked."""
    asked = start(sandbox, "argparse_options", 2, "--help").end()
    assert asked.code == 0, asked.err
    of_rank_0 = [line for line in asked.out.splitlines() if not line.startswith("[rank")]
    assert of_rank_0.count("Trains a small network.") == 1
    wrong = start(sandbox, "argparse_options", 2).end()
    assert wrong.code == 2
    assert "the following arguments are required: --hidden" in wrong.err
    assert "Traceback" not in wrong.err


def press_ctrl_c(sandbox: Sandbox, name: str) -> Ended:
    """Interrupts a program once each of two ranks has trained an epoch."""
    running = start(sandbox, name, 2)
    for _ in range(2):
        assert b"is training" in running.process.stdout.readline()
    running.press_ctrl_c()
    return running.end()


def test_ctrl_c_ends_all_ranks_quietly(sandbox: Sandbox) -> None:
    ended = press_ctrl_c(sandbox, "trains_for_ever")
    assert ended.code == 130
    assert "Traceback" not in ended.err


def test_a_script_that_catches_ctrl_c_saves_what_it_has(sandbox: Sandbox) -> None:
    ended = press_ctrl_c(sandbox, "saves_when_interrupted")
    assert (ended.code, "saved" in ended.out) == (0, True), ended.err
    assert ended.out.count("interrupted") == 2
    assert torch.load(sandbox.folder / "model.pt").keys() == {"weight", "bias"}


def test_what_a_tracker_logs(sandbox: Sandbox, tmp_path: Path) -> None:
    plain("logger", tmp_path / "plain")
    assert end(sandbox, "logger", 2).code == 0
    ours, theirs = (
        [json.loads(line) for line in (folder / "linear.jsonl").read_text().splitlines()]
        for folder in (sandbox.folder, tmp_path / "plain")
    )
    steps = [row["step"] for row in ours]
    # Ranks may be parked after six windows, and a parked rank is not told of commits: the script
    # asks for rank 0, not for the main process.
    assert steps[:6] == [*range(6)]
    assert steps == sorted(set(steps))
    assert len(theirs) == 12
    for mine in ours:
        assert mine == pytest.approx(theirs[mine["step"]], rel=SUMS)


def test_a_script_of_checkpoints_resumes_on_another_number_of_ranks(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    _, expected = plain("saves_checkpoints", tmp_path / "plain")
    sandbox.environ["EPOCHS"] = "2"
    assert end(sandbox, "saves_checkpoints", 2).code == 0
    del sandbox.environ["EPOCHS"]
    assert end(sandbox, "saves_checkpoints", 3).code == 0
    found = torch.load(sandbox.folder / "model.pt")
    assert distance(found, expected) <= ADAM


def run_cells(rank: Rank, script: str, is_plain: bool) -> dict[str, Any]:
    """Runs the cells of a notebook one after the other, as its kernel does; gives its model."""
    from helpers import plain_evener

    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        for variable in launch_variables(rank):
            patch.delenv(variable)
        if is_plain:
            patch.setitem(sys.modules, "evener", plain_evener)
        cells = [cell.partition("\n") for cell in Path(script).read_text().split("# %%")]
        codes = {title.strip(): compile(code, "<cell>", "exec") for title, _, code in cells}
        for title, code in codes.items():
            fails = pytest.raises(NameError) if "fails" in title else contextlib.nullcontext()
            with fails:
                exec(code, names)
        if not is_plain:
            with pytest.raises(ConfigError, match="make the model and its optimizers again"):
                exec(codes["setup"], names)
    state: dict[str, Any] = names["model"].state_dict()
    return state


def test_a_notebook_whose_cells_run_in_one_process() -> None:
    script = str(PROGRAMS / "notebook.py")
    [found] = run_ranks(run_cells, 1, script, False)
    [expected] = run_ranks(run_cells, 1, script, True)
    assert distance(found, expected) <= SUMS


def test_the_script_of_the_readme_does_what_the_readme_shows(sandbox: Sandbox) -> None:
    text = (ROOT / "README.md").read_text()
    [block] = (b for b in blocks(text) if b.note == ("file", "train.py"))
    script = sandbox.script(block.text)
    shown = re.search(r"^loss \S+ after \d+ steps; shares \[\d+, \d+\]$", text, re.MULTILINE)
    assert shown, "the README says what to expect"
    printed = []
    for world_size in (1, 2):
        ended = sandbox.evener("launch", "--nproc", world_size, script).end()
        assert ended.code == 0, ended.err
        printed.append(ended.out.strip())
    losses = [float(text.split()[1]) for text in (*printed, shown[0])]
    assert losses[0] == pytest.approx(losses[1], abs=0.002)
    assert losses[0] == pytest.approx(losses[2], abs=0.02), "as shown, on other processors too"
    assert printed[0].endswith("shares [1024]")
    shares = [int(share) for share in re.findall(r"\d+", printed[1].partition("[")[2])]
    assert min(shares) > 0
