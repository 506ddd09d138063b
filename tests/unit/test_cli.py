import sys
from pathlib import Path
from types import ModuleType

import pytest

from evener import cli
from evener.cli import DEMO_EMULATE_SLOW, DEMO_NPROC
from evener.config.options import PretrainOptions
from evener.team import launch
from evener.team.launch import LaunchPlan
from evener.team.nodes import Nodes

RANK_1_OF_2 = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    for name in (*RANK_1_OF_2, "EVENER_LAUNCHED", "EVENER_CHANNEL_FD", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def launched(monkeypatch):
    """The commands that would have been started, and the plans; nothing is."""
    calls = []

    def record(command, plan):
        calls.append((list(command), plan))
        return 42

    monkeypatch.setattr(launch, "launch", record)
    return calls


@pytest.fixture
def trained(monkeypatch):
    """Options that reached the task; no task runs."""
    calls = []
    task = ModuleType("evener.tasks.pretraining")
    task.run_pretraining = lambda options, environment: calls.append(options) or 0
    monkeypatch.setitem(sys.modules, "evener.tasks.pretraining", task)
    monkeypatch.setattr(cli, "apply_threads", lambda place: 1)
    return calls


def test_alone_pretrain_starts_ranks_with_the_same_command_line(launched):
    arguments = ["pretrain", "--nproc", "3", "--set", "seed=1", "--port", "1234", "--name", "x"]
    assert cli.main(arguments) == 42
    plan = LaunchPlan(nproc=3, port=1234, program=arguments)
    assert launched == [([sys.executable, "-P", "-m", "evener", *arguments], plan)]


@pytest.mark.parametrize(("flags", "nproc"), [([], 1), (["--demo"], DEMO_NPROC)])
def test_number_of_ranks_by_default(launched, flags, nproc):
    assert cli.main(["pretrain", *flags]) == 42
    assert launched[0][1].nproc == nproc


def test_a_rank_runs_the_task_with_what_the_user_gave(trained, monkeypatch):
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    Path("run.yaml").write_text("seed: 1\n")
    arguments = ["run.yaml", "--emulate-slow", "0:2", "--emulate-slow", "1:3", "--set", "seed=2"]
    arguments += ["--set", "epochs=3", "--resume", "--out", "o", "--name", "n", "--quiet"]
    assert cli.main(["pretrain", *arguments]) == 0
    assert trained == [
        PretrainOptions(
            config=Path("run.yaml"),
            emulate_slow=["0:2", "1:3"],
            overrides=["seed=2", "epochs=3"],
            resume=True,
            out=Path("o"),
            name="n",
            quiet=True,
        )
    ]


def test_a_rank_of_our_launcher_keeps_the_launchers_options(trained, monkeypatch):
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    # without the rest of what the launcher sets: this process shall not die with anybody
    monkeypatch.setenv("EVENER_LAUNCHED", "1")
    monkeypatch.setattr("evener.team.child.prepare_rank", lambda: None)
    assert cli.main(["pretrain", "--nproc", "2", "--port", "1234"]) == 0
    assert (trained[0].nproc, trained[0].port) == (2, 1234)


@pytest.mark.parametrize(
    ("world_size", "given", "expected"),
    [("2", [], DEMO_EMULATE_SLOW), ("1", [], ()), ("2", ["--emulate-slow", "0:2"], ["0:2"])],
)
def test_the_demo_has_an_uneven_team_unless_told_otherwise(
    trained, monkeypatch, world_size, given, expected
):
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, world_size)
    assert cli.main(["pretrain", "--demo", *given]) == 0
    assert trained[0].emulate_slow == expected


def test_a_classifier_asks_for_its_device_before_it_trains_a_base(launched, capsys):
    for kind in ("mps", "xpu"):
        assert cli.main(["classify", "--set", f"devices={kind}"]) == 2
        assert f"devices is '{kind}', but torch finds" in capsys.readouterr().err
    assert launched == []


def test_launch_hands_all_arguments_after_the_script_to_it(launched):
    Path("train.py").touch()
    assert cli.main(["launch", "--nproc", "2", "train.py", "--port", "1", "-x", "y"]) == 42
    program = [sys.executable, "-P", "-m", "evener.team.script"]
    command = [*program, "train.py", "--port", "1", "-x"]
    plan = LaunchPlan(nproc=2, program=["train.py", "--port", "1", "-x", "y"])
    assert launched == [([*command, "y"], plan)]


def test_join_runs_a_module_too(launched):
    """A script that was started as a module, and became a launcher, tells how to add a worker."""
    assert cli.main(["join", "127.0.0.1:29600", "--", "-m", "package.train", "--lr", "1"]) == 42
    program = [sys.executable, "-P", "-m", "evener.team.script"]
    plan = LaunchPlan(join="127.0.0.1:29600")
    assert launched == [([*program, "-m", "package.train", "--lr", "1"], plan)]


def test_join_takes_the_file_of_a_run(launched):
    assert cli.main(["join", "127.0.0.1:29600", "run.yaml", "--out", "o"]) == 42
    command = [sys.executable, "-P", "-m", "evener", "pretrain", "run.yaml", "--out", "o"]
    assert launched[0][0] == command


NODES = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "10.0.0.1"]


@pytest.mark.parametrize(
    ("arguments", "timeout_s"),
    [
        # The rank that is made slow may well be on the other machine.
        (["pretrain", *NODES, "--set", "timeout_s=7", "--emulate-slow", "5:3"], 7.0),
        (["classify", "run.yaml", *NODES, "--emulate-slow", "5:3"], 600.0),
        (["launch", *NODES, "train.py"], 600.0),
    ],
)
def test_one_machine_of_several(launched, arguments, timeout_s):
    Path("train.py").touch()
    Path("base").mkdir()
    Path("run.yaml").write_text("model: {path: base}\n")
    assert cli.main(arguments) == 42
    place = {"number": 1, "host": "10.0.0.1", "port": 29_500, "timeout_s": timeout_s}
    assert launched[0][1].nodes == Nodes(least=2, most=2, **place)


def test_each_machine_would_train_a_base_model_of_its_own(launched, capsys):
    assert cli.main(["classify", *NODES]) == 2
    assert "name the folder of a model that all machines have" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize("arguments", [["launch", "train.py"], ["pretrain"]])
@pytest.mark.parametrize("option", ["--nproc", "--port", "--nnodes", "--node-rank"])
def test_under_torchrun_the_team_is_settled(monkeypatch, capsys, arguments, option):
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    Path("train.py").touch()
    assert cli.main([arguments[0], option, "2", *arguments[1:]]) == 2
    assert capsys.readouterr().err == (
        f"error: {option} is 2, but torchrun started this process as rank 1 of 2 already; "
        f"leave {option} out\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["launch", "missing.py"], "missing.py is not a file"),
        (["pretrain", "--nnodes", "2", "--node-rank", "0"], "--master-addr is missing"),
        (["pretrain", "--nproc", "2", "--emulate-slow", "2:3"], "there is no rank 2"),
        (["pretrain", "--elastic", "1:2", "--emulate-slow", "2:3"], "in a team of 2"),
        (["pretrain", "missing.yaml"], "missing.yaml cannot be read"),
        (["pretrain", "broken.yaml"], "broken.yaml:3:5"),
        (["pretrain", "unknown.yaml"], "batchsize is 4: unknown key"),
        (["pretrain", "--demo", "unknown.yaml"], "--demo"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, words, capsys):
    Path("train.py").write_text("raise AssertionError('must not run')")
    Path("broken.yaml").write_text("batch_size: 4\noptimizer: {lr: 1\nseed: 1\n")
    Path("unknown.yaml").write_text("batchsize: 4\n")
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        ("pretrain", "--nprocs", 2),
        ("launch", "--nproc", 9999),
        ("launch", "--port", 70_000),
        ("join", "--max-failures", -1),
        ("coordinator", "--timeout-s", 0),
        ("coordinator", "--host-lease-s", 1),
    ],
)
def test_unknown_options_and_numbers_out_of_range_are_refused(command, option, value, capsys):
    assert cli.main([command, option, str(value)]) == 2
    assert option in capsys.readouterr().err


def test_an_unexpected_error_keeps_its_traceback(monkeypatch, capsys):
    def broken(command, *options):
        raise RuntimeError("a bug")

    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(launch, "launch", broken)
    assert cli.main(["pretrain"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: a bug\n")


def test_a_dashboard_is_served_while_ranks_run(launched, capfd):
    assert cli.main(["pretrain", "--demo", "--dashboard", "--out", "some/runs"]) == 42
    assert len(launched) == 1
    assert Path("some/runs").is_dir()
    # It may have been ended before it had begun; the test would find what is left of it.
    assert "Traceback" not in capfd.readouterr().err


def test_a_rank_of_another_launcher_serves_no_dashboard(monkeypatch, capsys):
    for name, value in RANK_1_OF_2.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["pretrain", "--demo", "--dashboard"]) == 2
    assert "--dashboard is True, but" in capsys.readouterr().err


def test_a_dashboard_needs_its_extra(launched, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["pretrain", "--demo", "--dashboard"]) == 2
    assert launched == []
    assert "pip install 'evener[dashboard]'" in capsys.readouterr().err
