import os

import pytest
import torch

from evener.team.child import apply_threads
from evener.team.environment import DistributedTrainConfig


@pytest.mark.parametrize(
    ("launched_by", "omp", "local_world_size", "expected"),
    [
        ("torchrun", None, 2, 4),
        ("torchrun", "1", 2, 4),  # torchrun's own choice, not the user's
        ("torchrun", "1", 1, None),
        ("torchrun", "3", 2, None),
        ("slurm", None, 2, 4),
        ("slurm", "1", 2, None),
        ("the user", None, 2, 4),
        ("the user", "1", 2, None),
        ("evener", "4", 2, None),
        ("evener", None, 2, None),
        ("alone", None, 1, None),
    ],
)
def test_cores_are_shared_out_where_the_launcher_has_not(
    monkeypatch, launched_by, omp, local_world_size, expected
):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    config = DistributedTrainConfig(
        local_world_size,
        local_world_size=local_world_size,
        launched_by=launched_by,
    )
    apply_threads(config)
    assert chosen == ([] if expected is None else [expected])


def test_cores_that_slurm_gave_to_one_task_are_not_shared_again(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    apply_threads(DistributedTrainConfig(2, local_world_size=2, launched_by="slurm"))
    assert chosen == [3]
