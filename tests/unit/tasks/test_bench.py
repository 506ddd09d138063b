"""The order of trials, what is skipped and written, bad options; the trials are faked."""

import itertools
import json
import signal

import numpy as np
import pytest

from evener.errors import ConfigError
from evener.observe.comparison import Trial
from evener.tasks.bench import BenchOptions, Pretrain, check_options, run_bench
from helpers.event_cases import to_line


def options(tmp_path, **changes) -> BenchOptions:
    values = {
        "config": tmp_path / "run.yaml",
        "policies": ["sync", "cadence"],
        "backends": ["gloo", "nccl"],
        "minutes": 0.5,
        "rounds": 3,
        "nproc": 2,
        "emulate_slow": (),
        "overrides": (),
        "out": tmp_path / "runs",
        "name": "bench",
    }
    return BenchOptions(**{**values, **changes})


def result(policy: str, backend: str) -> Trial:
    times = np.arange(1.0, 5.0)
    return Trial(
        policy=policy,
        backend=backend,
        unit="tokens",
        speed=10.0,
        elapsed_s=times,
        units=10 * times,
        losses=np.array([3.0, 2.0, 1.5, 1.2 if policy == "sync" else 1.4]),
    )


def test_rounds_take_turns_and_go_back_and_forth(tmp_path, capsys):
    seen = []

    def run_trial(name, policy, backend, seconds):
        assert seconds == 10.0  # half a minute in three rounds
        seen.append(name)
        if backend == "nccl":
            return "backend is 'nccl', but there is no GPU"
        if name == "cadence-gloo-3":
            return "ended with code 1"
        return result(policy, backend)

    comparison = run_bench(options(tmp_path), run_trial)
    assert seen == [
        *("sync-gloo-1", "sync-nccl-1", "cadence-gloo-1", "cadence-nccl-1"),
        *("cadence-gloo-2", "sync-gloo-2"),
        *("sync-gloo-3", "cadence-gloo-3"),
    ]
    # What failed in its last round is not compared by its first two.
    assert [c.name for c in comparison.candidates] == ["sync/gloo"]
    assert comparison.skipped["cadence/gloo"] == "ended with code 1"
    said = capsys.readouterr().err
    assert "round 1 of 3: sync/nccl skipped: backend is 'nccl', but there is no GPU" in said
    assert "recommended: sync/gloo" in said
    folder = tmp_path / "runs" / "bench"
    written = json.loads((folder / "bench.json").read_text())
    assert written["recommended"] == "sync/gloo"
    assert written["skipped"] == dict(comparison.skipped)
    assert (folder / "bench.txt").read_text() in said


def test_a_second_bench_takes_a_folder_of_its_own(tmp_path):
    for _ in range(2):
        run_bench(options(tmp_path), lambda _n, p, b, _s: result(p, b))
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"bench", "bench-2"}


def test_ctrl_c_tells_what_has_been_measured(tmp_path):
    def run_trial(name, policy, backend, seconds):
        if name == "sync-nccl-1":
            raise KeyboardInterrupt
        return result(policy, backend)

    with pytest.raises(KeyboardInterrupt):
        run_bench(options(tmp_path), run_trial)
    written = json.loads((tmp_path / "runs" / "bench" / "bench.json").read_text())
    assert written["recommended"] == "sync/gloo"


TIMES = {"compute_s": 1.0, "wait_s": 0.0, "sync_s": 0.0}
RANK = {"rank": 0, "member": "m", "samples": 4, "weight": 4.0, "loss": 1.5, **TIMES}
PLACE = {"window": 0, "generation": 0, "epoch": 0, "committed": [[0, 4]]}
WINDOW = {"type": "window", "t": 2.0, **PLACE, "ranks": [RANK]}


@pytest.mark.parametrize(
    ("code", "log", "events", "expected"),
    [
        (2, "evener: ...\nerror: backend is 'nccl', but no\n", [], "backend is 'nccl', but no"),
        (1, "Traceback\n", [WINDOW], "ended with code 1; see "),
        (-9, "", [], "ended with code -9; see "),
        (0, "", [], "no window was committed in its time; give more --minutes, or see "),
        (0, "", [WINDOW], None),
        (128 + signal.SIGTERM, "warning", [WINDOW], None),
    ],
)
def test_what_came_of_a_trial(tmp_path, code, log, events, expected):
    (tmp_path / "runs").mkdir()
    trials = Pretrain(options(tmp_path), tmp_path)
    run = tmp_path / "trials" / "sync-gloo-1"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    started = {"type": "run_started", "t": 1.0, "window": 0, "unit": "tokens", "members": ["m"]}
    (run / "events.jsonl").write_bytes(b"".join(to_line(event) for event in (started, *events)))
    path = tmp_path / "log"
    path.write_text(log)
    found = trials.read("sync-gloo-1", "sync", "gloo", path, code)
    assert not (run / "checkpoints").exists()
    if expected is None:
        assert isinstance(found, Trial)
        assert (found.units, found.losses) == ([4.0], [1.5])
    else:
        assert isinstance(found, str)
        assert found.startswith(expected)


def test_a_trial_runs_the_users_configuration_with_one_policy_and_one_backend(tmp_path):
    (tmp_path / "runs").mkdir()
    chosen = options(tmp_path, overrides=["policy=async", "batch_size=4"], emulate_slow=["1:3"])
    command = Pretrain(chosen, tmp_path).command("sync-gloo-1", "sync", "gloo")
    assert command[5] == str(tmp_path / "run.yaml")
    keys = [value for option, value in itertools.pairwise(command) if option == "--set"]
    assert keys[:2] == ["policy=async", "batch_size=4"]
    assert keys[-2:] == ["policy=sync", "backend=gloo"]  # the last one wins
    assert command[-4:] == ["--emulate-slow", "1:3", "--nproc", "2"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policies": ["sync", "fast"]}, "policy is 'fast'"),
        ({"backends": ["mpi"]}, "backend is 'mpi'"),
        ({"overrides": ["batch_size=0"]}, "batch_size is 0"),
        ({"name": "a/b"}, "the run's name is 'a/b'"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(tmp_path, changes, words):
    (tmp_path / "run.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        check_options(options(tmp_path, **changes))
    assert words in str(caught.value)
