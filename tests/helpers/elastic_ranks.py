"""Members of an elastic team that are processes, and the named points at which one dies.

The points, and where they are in a window of SYNC:

    ==================  ==========================================================================
    before              before this rank joins the exchange of gradients
    inside              it waits in the exchange for a rank that has not come yet
    after               the exchange has ended for all, and nothing is updated
    mid-update          the optimizer has stepped one of several parameters
    before publishing   the window is applied here, and the others do not know it yet
    mid-heal            state is sent: by the donor, to the receiver, or past a third member
    ==================  ==========================================================================

Threads have the same points (``elastic.Kill``), and a further one: an exchange of which some
members have the result and others do not.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from evener import Ddp, DdpConfig
from evener.comm.base import Communicator
from evener.team.process_state import KernelState, state_of
from helpers.elastic_runs import BATCH, EPOCHS, NUM_SAMPLES, Trained
from helpers.limits import PATIENCE_S
from helpers.ranks import Rank

#: Every window of the run, and the first position of its samples.
WINDOWS = list(enumerate([*range(0, NUM_SAMPLES, BATCH)] * EPOCHS))


def set_up(rank: Rank, address: str, limits: str) -> tuple[Ddp, nn.Module]:
    """Joins the team as member ``w`` and the rank's number; weights differ before."""
    os.environ |= {
        "EVENER_COORDINATOR": address,
        "EVENER_MEMBER": f"w{rank.rank}",
        "EVENER_ELASTIC": limits,
    }
    torch.manual_seed(rank.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
    optimizer = AdamW(model.parameters(), lr=0.05)
    return Ddp.setup(model, optimizer, devices="cpu", config=config), model


def summary(trained: Trained) -> tuple[list[tuple[int, int]], list[list[float]]]:
    """What a test compares: windows with their first positions, and all numbers of the state."""
    windows = [(result.window, result.committed[0]) for result in trained.committed]
    return windows, [tensor.double().flatten().tolist() for tensor in trained.state]


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


def wait_until(condition: Callable[[], object]) -> None:
    """Waits for what has to come."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def die_in_update(number: int) -> None:
    """Lets this process die in an optimizer step: some parameters have changed, others have not.

    Args:
        number: Which step, from 1.
    """
    steps, step = [0], AdamW.step

    def run(self: AdamW, *given: Any) -> Any:
        steps[0] += 1
        if steps[0] == number:
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)
            die()
        return step(self, *given)

    AdamW.step = run  # type: ignore[method-assign]
