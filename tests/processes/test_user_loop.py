"""What a user's own loop meets on several ranks: names without a value, errors, closing."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatchError,
    Ddp,
    DdpConfig,
    Sink,
    UsageError,
)
from helpers.launched import Ended, Sandbox
from helpers.ranks import Outcome, Rank, be_script, run_ranks, run_ranks_to_end

BEGIN = """\
import torch, evener
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def setup(**options):
    config = evener.DdpConfig(**options)
    return evener.Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True)
DATA = torch.arange(24.).view(8, 3)
"""


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    monkeypatch.chdir(tmp_path)  # forked ranks write there
    sandbox = Sandbox(tmp_path)
    yield sandbox
    sandbox.close()


def launch(sandbox: Sandbox, lines: str, nproc: int = 2) -> Ended:
    return sandbox.evener("launch", "--nproc", str(nproc), sandbox.script(BEGIN + lines)).end()


def fork(sandbox: Sandbox, lines: str, nproc: int = 2) -> tuple[int, str]:
    """As ``launch``, on forked ranks: what the launcher would say is left out.

    Returns:
        The highest exit code, and what all ranks printed.
    """
    script = sandbox.script(BEGIN + lines)
    outcomes = run_ranks_to_end(be_script, nproc, str(script))
    said = "\n".join(outcome.story() for outcome in outcomes)
    assert all(outcome.returned for outcome in outcomes), said
    return max(outcome.value for outcome in outcomes), said


def line_of(sandbox: Sandbox, text: str) -> int:
    """Number of the only line of the script that holds a text."""
    lines = (sandbox.folder / "script.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number


# ── a name that the body of the loop would have set ──────────────────────────────────────────────

NO_SHARE = """\
def main(ddp):
    loader = ddp.loader(DATA, batch_size=4)
    for i, batch in enumerate(loader.epoch(0)):
        loss = model(batch).mean()
        ddp.backward(loss)
        ddp.step()
    print(loss.item())
"""


def test_a_name_of_a_body_that_did_not_run_for_lack_of_a_share(sandbox: Sandbox) -> None:
    code, said = fork(sandbox, NO_SHARE + "main(setup(partition_ratios=(1, 0)))\n")
    assert code == 1
    assert "UnboundLocalError" in said
    assert "rank 1 has had no share of any window so far, so its loop's body has not run" in said
    assert "result.loss" in said


# ── rank, file and line ──────────────────────────────────────────────────────────────────────────


def test_an_error_in_the_loop_names_rank_file_and_line(sandbox: Sandbox) -> None:
    code, said = fork(
        sandbox,
        "ddp = setup(partition_ratios=(1, 1))\n"
        "for batch in ddp.loader(DATA, batch_size=4).epoch(0):\n"
        "    weight = -1 if RANK == 1 else 1\n"
        "    ddp.backward(model(batch).mean(), weight=weight)\n"
        "    ddp.step()\n",
    )
    assert code == 1
    assert "error: weight is -1;" in said
    assert (
        f"raised on rank 1 at {sandbox.folder}/script.py:{line_of(sandbox, 'weight=weight')}"
        in said
    )


def test_different_collectives_name_file_and_line_of_every_rank(sandbox: Sandbox) -> None:
    ended = launch(
        sandbox,
        "ddp = setup(partition_ratios=(1, 1))\n"
        "for number, batch in enumerate(ddp.loader(DATA, batch_size=4).epoch(0)):\n"
        "    if RANK == 1 and number == 1:\n"
        "        ddp.save('checkpoint')\n"
        "    ddp.backward(model(batch).mean())\n"
        "    ddp.step()\n",
    )
    assert ended.code == 1
    step, save = line_of(sandbox, "ddp.step()"), line_of(sandbox, "ddp.save(")
    assert f" at {sandbox.folder}/script.py:{step}; rank 1 is saving (ddp.save)" in ended.err
    assert f"saving (ddp.save) at {sandbox.folder}/script.py:{save}." in ended.err


# ── closing ──────────────────────────────────────────────────────────────────────────────────────


def begin(rank: Rank, *, sinks: Sequence[Sink] = (), **options: Any) -> tuple[Ddp, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DdpConfig(partition_ratios=(1,) * rank.world_size, **options)
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True, sinks=sinks)
    return ddp, model


def nothing(number: int) -> None:
    pass


def train(
    ddp: Ddp,
    model: nn.Module,
    *,
    before: Callable[[int], object] = nothing,
    after: Callable[[int], object] = nothing,
) -> None:
    data = torch.arange(48.0).view(16, 3)
    for number, batch in enumerate(ddp.loader(data, batch_size=4).epoch(0)):
        before(number)
        ddp.backward(model(batch).mean())
        ddp.step()
        after(number)


def close_while_another_error_is_handled(rank: Rank, other: Exception, how: str) -> list[str]:
    """Trains two windows while ``other`` is handled, or handles it when it closes."""
    told: list[str] = []

    class Told(Sink):
        def emit(self, event: Mapping[str, Any]) -> None:
            if event["type"] in ("window", "run_finished"):
                told.append(event.get("reason", event["type"]))

        def close(self) -> None:
            pass

    def two_windows(ddp: Ddp, model: nn.Module) -> None:
        for batch in ddp.loader(torch.arange(48.0).view(16, 3), batch_size=4).epoch(0):
            ddp.backward(model(batch).mean())
            ddp.step()
            if ddp.window == 2:
                break

    def whole_run() -> None:
        ddp, model = begin(rank, sinks=[Told()])
        with ddp:
            two_windows(ddp, model)

    if how == "a run in the handler":  # such as: nothing to resume from, so start anew
        try:
            raise other
        except type(other):
            whole_run()
    else:
        ddp, model = begin(rank, sinks=[Told()])
        two_windows(ddp, model)
        try:
            raise other
        except type(other):
            ddp.close()
    return told


@pytest.mark.parametrize("how", ["a run in the handler", "close in the handler"])
@pytest.mark.parametrize("other", [KeyError("a key"), CheckpointError("no checkpoint")])
def test_closing_in_a_handler_of_something_else_commits_what_was_applied(
    other: Exception, how: str
) -> None:
    whole = ["window", "window", "completed"]
    assert run_ranks(close_while_another_error_is_handled, 2, other, how) == [whole, []]


def gather_a_text_and_close(rank: Rank) -> None:
    ddp, model = begin(rank)
    train(ddp, model)
    try:
        ddp.gather("a text" if rank.rank else torch.ones(1))  # type: ignore[type-var]
    finally:
        ddp.close()


def test_closing_after_a_refusal_on_one_rank_hides_nothing() -> None:
    healthy, refused = run_ranks_to_end(gather_a_text_and_close, 2)
    assert isinstance(refused.exception, UsageError)
    assert refused.exception.__context__ is None
    assert isinstance(healthy.exception, CollectiveError)


def fail_and_close(rank: Rank, *, after_step: bool) -> None:
    def fail(number: int) -> None:
        if rank.rank == 1 and number == 1:
            raise ZeroDivisionError("in the loop of rank 1")

    ddp, model = begin(rank)
    try:
        train(ddp, model, after=fail) if after_step else train(ddp, model, before=fail)
    finally:
        ddp.close()


@pytest.mark.parametrize("after_step", [True, False])
def test_closing_after_an_error_that_ended_the_loop_hides_nothing(after_step: bool) -> None:
    healthy, failed = run_ranks_to_end(partial(fail_and_close, after_step=after_step), 2)
    assert isinstance(failed.exception, ZeroDivisionError)
    assert isinstance(healthy.exception, CollectiveError)
    assert not isinstance(healthy.exception, CollectiveMismatchError)


def meet_at_odds(rank: Rank) -> str:
    ddp, model = begin(rank)
    try:
        train(ddp, model, after=lambda number: ddp.save("x") if rank.rank == number == 1 else None)
    except CollectiveMismatchError as error:
        said = str(error)
    if rank.rank == 0:  # the other never comes
        ddp.close()
    return said


def test_closing_after_an_error_of_the_team_waits_for_nobody() -> None:
    outcomes: list[Outcome] = run_ranks_to_end(meet_at_odds, 2)
    assert [o.returned for o in outcomes] == [True, True]


def hook_during_and_after(rank: Rank) -> tuple[bool, bool]:
    before = sys.excepthook
    ddp, _ = begin(rank)
    during = sys.excepthook is before
    ddp.close()
    return during, sys.excepthook is before


def test_the_hook_for_uncaught_errors_is_put_back() -> None:
    assert run_ranks(hook_during_and_after, 1) == [(False, True)]


# ── what belongs to an update ────────────────────────────────────────────────────────────────────


def clamp_after_every_update(rank: Rank) -> tuple[list[float], int]:
    """A share for rank 0 alone; ``verify_every`` finds weights that differ."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @optimizer.register_step_post_hook
    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    ratios = (1, 0)[: rank.world_size]
    config = DdpConfig(partition_ratios=ratios, verify_every=1)
    with Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True) as ddp:
        results = 0
        for batch in ddp.loader(torch.arange(48.0).view(16, 3), batch_size=4):
            ddp.backward(model(batch).square().mean())
            if ddp.step():
                results += 1
    return nn.utils.parameters_to_vector(model.parameters()).tolist(), results


def test_clamping_after_every_update_reaches_a_rank_without_a_share() -> None:
    ((alone, _),) = run_ranks(clamp_after_every_update, 1)
    (first, windows), (second, nothing) = run_ranks(clamp_after_every_update, 2)
    assert first == second == pytest.approx(alone, rel=1e-6)
    assert (windows, nothing) == (4, 0)
