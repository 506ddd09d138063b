"""Worker processes: the same samples as without, and no death, hang or leak goes unnoticed."""

import gc
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest
import torch

from evener.data.fetching import make_fetcher
from evener.errors import DataError
from helpers.fetch_cases import (
    Augmented,
    Squares,
    Stuck,
    Suicidal,
    Texts,
    Unpicklable,
    keep_list,
    masking_collate,
    unreadable_collate,
)
from helpers.launched import Running, Sandbox, wait_until_gone
from helpers.limits import PATIENCE_S, wait_until

TESTS = Path(__file__).parents[1]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_samples_are_the_same_for_any_number_of_workers(method):
    context = multiprocessing.get_context(method)

    def fetch(num_workers):
        with make_fetcher(Augmented(), masking_collate, 7, num_workers, context=context) as fetcher:
            # Submitted in another grouping order, so a worker's history differs.
            pending = {i: fetcher.submit(2, [i, i + 1]) for i in (8, 0, 4, 2, 6)}
            return {i: pending[i].result(PATIENCE_S) for i in range(0, 10, 2)}

    expected = fetch(0)
    actual = fetch(2)
    for i, batch in expected.items():
        assert batch.keys() == actual[i].keys()
        for name in batch:
            assert torch.equal(batch[name], actual[i][name]), (i, name)


def test_errors_of_one_batch_leave_the_others_alone():
    with make_fetcher(Squares(broken=(7,)), num_workers=1) as fetcher:
        pending = [fetcher.submit(1, [i, i + 1]) for i in (4, 6, 8)]
        with pytest.raises(DataError, match=r"sample 7 of epoch 1 .* KeyError: 'no row 7'") as e:
            pending[1].result(PATIENCE_S)
        assert "in __getitem__" in str(e.value.__cause__)
        assert pending[0].result(PATIENCE_S)[:, 0].tolist() == [16, 25]
        assert pending[2].result(PATIENCE_S)[:, 0].tolist() == [64, 81]


def test_a_batch_that_does_not_unpickle_is_an_error_and_no_hang():
    with make_fetcher(Squares(), unreadable_collate, num_workers=1) as fetcher:
        bad = fetcher.submit(0, [3])
        for _ in range(2):
            with pytest.raises(DataError, match=r"does not answer: ValueError: .*num_workers=0"):
                bad.result(PATIENCE_S)


def test_large_plain_batches_and_many_submissions_do_not_block():
    with make_fetcher(Texts(300_000), keep_list, num_workers=1) as fetcher:
        # Far more than the sockets hold, both ways, before anything is read.
        pending = [fetcher.submit(0, [i] * 1000 + [i]) for i in range(3)]
        long = [fetcher.submit(0, [i]) for i in range(200)]
        assert len(pending[0].result(PATIENCE_S)) == 1001
        assert long[199].result(PATIENCE_S)[0]["index"] == 199


def test_workers_of_a_forgotten_fetcher_end():
    fetcher = make_fetcher(Squares(), num_workers=1)
    pid = fetcher.workers[0].pid
    pending = fetcher.submit(0, [1])
    del fetcher
    assert pending.result(PATIENCE_S)[0, 0] == 1
    del pending
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, r"exit code -9\) .*memory .* is full"),
        (signal.SIGBUS, r"exit code -7\) .*/dev/shm is full"),
    ],
)
def test_dead_worker_is_an_error_and_no_hang(number, message):
    with make_fetcher(Suicidal(number), num_workers=1) as fetcher:
        first = fetcher.submit(0, [1])
        assert first.result(PATIENCE_S).tolist() == [1]
        second, third = fetcher.submit(0, [2]), fetcher.submit(0, [3])
        with pytest.raises(DataError, match=rf"data worker 0 \(pid \d+, {message}"):
            second.result(PATIENCE_S)
        assert first.result(1).tolist() == [1]
        with pytest.raises(DataError, match=message):
            third.result(PATIENCE_S)
        with pytest.raises(DataError, match=message):
            fetcher.submit(0, [4]).result(PATIENCE_S)


def test_close_is_prompt_in_the_middle_of_a_sample(tmp_path):
    reached = tmp_path / "reached"
    before = open_files()
    fetcher = make_fetcher(Stuck(reached), num_workers=2)
    pids = [worker.pid for worker in fetcher.workers]
    pending = [fetcher.submit(0, [i]) for i in range(6)]
    wait_until(reached.exists)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    fetcher.close()
    fetcher.close()
    assert time.monotonic() - start < PATIENCE_S / 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(DataError, match="exit code -9"):
        pending[0].result(1)
    with pytest.raises(CancelledError):
        pending[5].result(1)
    assert open_files() <= before + 1  # multiprocessing's own tracker stays


def test_what_does_not_pickle_is_loaded_by_forked_workers():
    with make_fetcher(Unpicklable(), num_workers=1) as fetcher:
        assert fetcher.submit(0, [1]).result(PATIENCE_S).tolist() == [1]
    with make_fetcher(Squares(), lambda samples: len(samples), num_workers=1) as fetcher:
        assert fetcher.submit(0, [1, 2]).result(PATIENCE_S) == 2


def test_nothing_stays_in_shared_memory():
    with make_fetcher(Squares(length=100_000), num_workers=1) as fetcher:
        pid = fetcher.workers[0].pid
        pending = [fetcher.submit(0, [i]) for i in range(4)]
        assert pending[1].result(PATIENCE_S)[0, 0] == 1
        # What torch leaves where the worker is killed before it has taken the name away again.
        Path(f"/dev/shm/torch_{pid}_17_3").write_bytes(bytes(64))
        os.kill(pid, signal.SIGKILL)
    assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


STUCK = """\
from pathlib import Path
from helpers.fetch_cases import Stuck
from evener.data.fetching import make_fetcher
if __name__ == "__main__":
    with make_fetcher(Stuck(Path("reached")), num_workers=2) as fetcher:
        pending = [fetcher.submit(0, [i]) for i in range(4)]
        tell(" ".join(str(worker.pid) for worker in fetcher.workers))
        try:
            pending[0].result()
        except KeyboardInterrupt:
            print("stopped")
"""


def start_stuck(sandbox: Sandbox) -> tuple[Running, list[int]]:
    """A script whose workers never return a sample, and their processes."""
    sandbox.environ["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    running = sandbox.start(sys.executable, "-W", "error", sandbox.script(STUCK))
    (line,) = sandbox.mailbox.read(1)
    wait_until((sandbox.folder / "reached").exists)
    return running, [int(pid) for pid in line.split()[1:]]


def test_no_worker_outlives_a_killed_rank(sandbox: Sandbox) -> None:
    running, pids = start_stuck(sandbox)
    running.signal(signal.SIGKILL)
    assert len(pids) == 2
    assert all(wait_until_gone(pid) for pid in pids)


def test_ctrl_c_is_the_parents_business(sandbox: Sandbox) -> None:
    running, _ = start_stuck(sandbox)
    running.press_ctrl_c()
    ended = running.end()
    assert (ended.out, ended.err, ended.code) == ("stopped\n", "", 0)
