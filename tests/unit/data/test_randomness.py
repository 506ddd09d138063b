"""Ranks on threads share the generators of their process, and take turns with them."""

import threading

import torch
from torch.utils.data import DataLoader, Sampler

from evener.data.randomness import generators_lock, seed_training
from evener.engine.loaders.dataset_arguments import DatasetArguments
from helpers.limits import PATIENCE_S


def test_training_is_not_seeded_while_another_thread_loads():
    seeded = threading.Event()

    def train():
        seed_training(5)
        seeded.set()

    thread = threading.Thread(target=train)
    with generators_lock:
        torch.manual_seed(3)
        thread.start()
        assert not seeded.wait(0.1)
        assert torch.initial_seed() == 3
    assert seeded.wait(PATIENCE_S)
    thread.join()
    assert torch.initial_seed() == 5


def test_no_other_thread_seeds_while_a_sampler_draws():
    free = []

    def look():
        free.append(generators_lock.acquire(blocking=False))
        if free[-1]:
            generators_lock.release()

    class Watched(Sampler):
        def __iter__(self):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            return iter(range(3))

        def __len__(self):
            return 3

    given = DataLoader([4, 5, 6], batch_size=1, sampler=Watched())
    arguments = DatasetArguments(given, batch_size=None, collate_fn=None, num_workers=None)
    assert list(arguments.order(0)) == [0, 1, 2]
    assert free == [False]
