"""Fetchers that load in this process; worker processes are in tests/processes."""

import random
import threading
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from evener.data.fetching import make_fetcher
from evener.errors import ConfigError, DataError, UsageError
from helpers.fetch_cases import Augmented, Squares, keep_list
from helpers.limits import PATIENCE_S

LEAVES = ["inline", "thread"]


@pytest.mark.parametrize("leaf", LEAVES)
def test_batches_come_back_in_whatever_order_they_are_asked_for(leaf):
    with make_fetcher(Squares(), prefetch=leaf) as fetcher:
        pending = [fetcher.submit(0, [i, i + 1]) for i in range(5)]
        assert pending[3].result()[:, 0].tolist() == [9, 16]
        assert pending[0].result()[:, 0].tolist() == [0, 1]
        assert pending[3].result() is pending[3].result()


def test_a_collate_function_of_the_users_gets_the_samples():
    with make_fetcher(Squares(), keep_list) as fetcher:
        found = fetcher.submit(0, [1, 2]).result()
    assert isinstance(found, list), "not stacked"
    assert [sample.tolist() for sample in found] == [[1] * 4, [4] * 4]


@pytest.mark.parametrize("leaf", LEAVES)
def test_failing_sample_is_named_with_cause_and_place(leaf):
    with make_fetcher(Squares(broken=(7,)), prefetch=leaf) as fetcher:
        good, bad = fetcher.submit(0, [1]), fetcher.submit(3, [5, 7])
        with pytest.raises(DataError, match=r"sample 7 of epoch 3 .* Squares: KeyError") as caught:
            bad.result()
        assert isinstance(caught.value.__cause__, KeyError)
        assert "fetch_cases.py:" in str(caught.value)
        with pytest.raises(DataError, match="sample 7"):  # again
            bad.result()
        assert good.result().shape == (1, 4)


class Panic(BaseException):
    """What libraries in Rust raise is not an ``Exception``."""


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_library_that_panics_ends_no_fetcher(leaf):
    class Panics:
        def __getitem__(self, index):
            if index == 3:
                raise Panic("at 3")
            return float(index)

    with make_fetcher(Panics(), prefetch=leaf) as fetcher:
        bad, good = fetcher.submit(0, [3]), fetcher.submit(0, [4])
        with pytest.raises(Panic, match="at 3"):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S).tolist() == [4.0]


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_a_data_set_that_draws_only_now_and_then_is_seeded_all_the_same(draw):
    reads = []

    class Sometimes:
        def __getitem__(self, index):
            reads.append(index)
            return (index, float(draw()) if index >= 4 else 0.0)

    late, early = (make_fetcher(Sometimes(), seed=1) for _ in range(2))
    first = [late.submit(0, [k, k + 1]).result()[1] for k in range(0, 10, 2)]
    assert reads == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7, 8, 9]  # the batch that drew first, twice
    reads.clear()
    second = [early.submit(0, [k, k + 1]).result()[1] for k in reversed(range(0, 10, 2))]
    assert reads == [8, 9, 8, 9, 6, 7, 4, 5, 2, 3, 0, 1]
    assert torch.equal(torch.cat(first), torch.cat(second[::-1]))
    assert len(set(torch.cat(first)[4:].tolist())) == 6


def test_augmentation_depends_on_seed_epoch_and_index_only():
    def draws(seed, epoch, indices):
        batch = make_fetcher(Augmented(), seed=seed).submit(epoch, indices).result()
        return dict(zip(batch["index"].tolist(), batch["draws"].tolist(), strict=True))

    whole = draws(1, 0, [4, 5, 6])
    assert draws(1, 0, [6]) | draws(1, 0, [5, 4]) == whole
    assert len({str(value) for value in whole.values()}) == 3
    assert draws(2, 0, [4])[4] != whole[4]
    assert draws(1, 1, [4])[4] != whole[4]
    for column in zip(*whole.values(), strict=True):  # each generator is seeded
        assert len(set(column)) == 3


def test_thread_loads_ahead_of_need_and_in_one_thread():
    loaded = threading.Event()
    threads = set()

    class Watched:
        def __getitem__(self, index):
            threads.add(threading.current_thread())
            if index == 9:
                loaded.set()
            return index

    with make_fetcher(Watched(), prefetch="thread") as fetcher:
        pending = [fetcher.submit(0, [i]) for i in range(10)]
        assert loaded.wait(PATIENCE_S)  # nobody has asked for a result yet
        assert pending[9].result().tolist() == [9]
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_thread_deadline_names_the_samples_and_close_drops_the_queue():
    entered, release = threading.Event(), threading.Event()

    class Slow:
        def __getitem__(self, index):
            entered.set()
            release.wait(PATIENCE_S)
            return index

    fetcher = make_fetcher(Slow(), prefetch="thread")
    running, queued = fetcher.submit(0, [1]), fetcher.submit(0, [2])
    assert entered.wait(PATIENCE_S)
    with pytest.raises(DataError, match=r"samples \[1\] of epoch 0 did not arrive .* 0.01 s"):
        running.result(0.01)
    fetcher.close()
    with pytest.raises(CancelledError):
        queued.result(10)
    release.set()
    assert running.result(10).tolist() == [1]
    fetcher.close()


@pytest.mark.parametrize("leaf", LEAVES)
def test_misuse_is_refused(leaf):
    fetcher = make_fetcher(Squares(), prefetch=leaf)
    fetcher.close()
    with pytest.raises(UsageError, match="closed"):
        fetcher.submit(0, [1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch": "fork"}, "prefetch='fork'"),
        ({"prefetch": "process"}, "num_workers=0"),
        ({"prefetch": "inline", "num_workers": 2}, "contradicts num_workers=2"),
        ({"prefetch": "thread", "num_workers": 2}, "contradicts num_workers=2"),
    ],
)
def test_bad_options_name_the_value(options, message):
    with pytest.raises(ConfigError, match=message):
        make_fetcher(Squares(), **options)
