"""Members of an elastic team that are processes, and the named points at which one dies.

The points, and where they are in a window:

    ==================  ==========================================================================
    before              before this rank joins an exchange
    inside              it waits in the exchange for a rank that has not come yet
    after               the exchange has ended for all, and nothing is updated
    before publishing   the window is applied here, and the others do not know it yet
    mid-recovery        state is sent, by the source or to the receiver
    ==================  ==========================================================================
"""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from evener import Ddp, DdpConfig, WindowResult
from evener.comm.base import Communicator
from evener.team.host import KernelState, state_of
from helpers.limits import PATIENCE_S, wait_until
from helpers.ranks import Rank

NUM_SAMPLES, BATCH, EPOCHS = 32, 8, 2
DATA = [(torch.tensor([k / 32, 1.0, k * k / 1024]), torch.tensor([k / 16])) for k in range(32)]

#: Every window of a run in SYNC: its number, its epoch, and the ranges of positions in that.
WINDOWS = [
    (window, window * BATCH // NUM_SAMPLES, ((start, start + BATCH),))
    for window, start in enumerate([*range(0, NUM_SAMPLES, BATCH)] * EPOCHS)
]
Windows = list[tuple[int, int, tuple[tuple[int, int], ...]]]


def set_up(
    rank: Rank, address: str, limits: str, policy: str = "sync", **options: Any
) -> tuple[Ddp, nn.Module]:
    """Joins the team as member ``w`` and the rank's number; weights differ before."""
    os.environ |= {
        "EVENER_COORDINATOR": address,
        "EVENER_MEMBER": f"w{rank.rank}",
        "EVENER_ELASTIC": limits,
    }
    torch.manual_seed(1 + rank.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = AdamW(model.parameters(), lr=0.05)
    # Two local steps of the slowest rank in each window, where there are local steps.
    anchors = {} if policy == "sync" else {"anchor": 2, "max_anchor": 2}
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S, **anchors, **options)
    ddp = Ddp.setup(model, optimizer, policy=policy, devices="cpu", config=config)
    # What is worth parking rests on measured times: here nothing does.
    ddp.assembly.engine.policy.decide_parking = lambda batch_size, main: None  # type: ignore[method-assign]
    return ddp, model


def train(
    ddp: Ddp,
    model: nn.Module,
    at_commit: Callable[[WindowResult], None],
    *,
    batch_size: int = BATCH,
) -> tuple[Windows, list[list[float]]]:
    """Trains two epochs.

    Returns:
        What a test compares: windows, as in ``WINDOWS``, and all numbers of the state.
    """
    windows: Windows = []

    def commit(result: WindowResult) -> None:
        windows.append((result.window, result.epoch, result.ranges or (result.committed,)))
        at_commit(result)

    ddp.on_commit(commit)
    sizes = {"batch_size": batch_size, "micro_batch_size": min(batch_size, 4)}
    loader = ddp.loader(DATA, seed=3, **sizes)
    for epoch in ddp.epochs(EPOCHS):
        for x, y in loader.epoch(epoch):
            ddp.backward(((model(x) - y) ** 2).mean())
            ddp.step()
    return windows, [tensor.double().flatten().tolist() for tensor in model.state_dict().values()]


def let_steps_last_alike() -> None:
    """Lets this rank make as many local steps in a window as others, however busy this machine is.

    Time passes for it by how often it looks at the clock.
    """
    looks = count()
    time.perf_counter = lambda: next(looks) / 1000


def covers_each_once(windows: Windows) -> bool:
    """Whether no window is missing, and every sample is in one window of each epoch."""
    positions = Counter(
        (epoch, position)
        for _, epoch, ranges in windows
        for start, stop in ranges
        for position in range(start, stop)
    )
    once = {(epoch, position): 1 for epoch in range(EPOCHS) for position in range(NUM_SAMPLES)}
    return positions == once and [number for number, *_ in windows] == [*range(len(windows))]


def die() -> None:
    """Ends this process as SIGKILL does: nothing is flushed, closed or said."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(point: str, what: str, skip: int = 0) -> None:
    """Lets this process die at an exchange whose words contain ``what``.

    Args:
        point: ``"before"`` it, ``"inside"`` it or ``"after"`` it.
        what: Part of the words for it.
        skip: How many such exchanges pass first.
    """
    passed = [0]

    def watch(name: str) -> None:
        exchange = getattr(Communicator, name)

        def run(self: Communicator, *given: Any, **named: Any) -> Any:
            words = [named.get("what", "")]
            if name == "all_reduce_each":
                words += [of_tensor for of_tensor, _ in given[0]]
            is_it = any(what in each for each in words)
            # `all_reduce` and others are made of these: each counts once.
            is_due = is_it and passed[0] == skip
            passed[0] += is_it
            if is_due and point == "before":
                die()
            if is_due and point == "inside":
                threading.Timer(0.3, die).start()
            result = exchange(self, *given, **named)
            if is_due:
                die()
            return result

        setattr(Communicator, name, run)

    for name in ("all_reduce_each", "broadcast", "all_gather_rows", "all_gather_bytes"):
        watch(name)


def come_late(what: str, pid: int) -> None:
    """Lets this process join an exchange only when another one is gone."""
    begin = Communicator._begin

    def run(self: Communicator, kind: str, words: str, *given: Any) -> Any:
        if what in words:
            wait_until(lambda: state_of(pid) is KernelState.GONE)
        return begin(self, kind, words, *given)

    Communicator._begin = run  # type: ignore[method-assign]
