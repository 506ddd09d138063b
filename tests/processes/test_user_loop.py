"""What a user's own loop meets on several ranks: which samples it sees, errors, closing."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evener import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatchError,
    Ddp,
    DdpConfig,
    Sink,
    UsageError,
    WindowResult,
)
from helpers.ranks import Outcome, Rank, be_script, run_ranks, run_ranks_to_end

# ── what the loop sees ───────────────────────────────────────────────────────────────────────────

SAMPLES, BATCH, EPOCHS = 609, 29, 2


def batch_norm_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def count_samples(rank: Rank, policy: str) -> dict[str, Any]:
    """With default options: nobody is given batches that do not count."""
    model = batch_norm_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 2))
    seen: list[list[int]] = [[] for _ in range(EPOCHS)]
    firsts: dict[int, int] = {}
    opened: dict[int, tuple[int, list[int]]] = {}
    forwards, committed = 0, [0] * EPOCHS
    unmoved = True

    def count(result: WindowResult) -> None:
        work = [record.micro_batches for record in result.ranks]
        opened.setdefault(result.epoch, (result.window, work))
        committed[result.epoch] += work[rank.rank]

    with Ddp.setup(model, optimizer, policy=policy, quiet=True) as ddp:
        ddp.on_commit(count)
        loader = ddp.loader(data, batch_size=BATCH)
        for epoch in range(EPOCHS):
            for i, (ids, x) in enumerate(loader.epoch(epoch)):
                if i == 0:
                    firsts[epoch] = ddp.window
                if not forwards:
                    unmoved = int(model[1].num_batches_tracked) == 0 and all(
                        map(torch.equal, model.parameters(), batch_norm_model().parameters())
                    )
                seen[epoch] += ids.tolist()
                forwards += 1
                ddp.backward(model(x).square().mean())
                ddp.step()
    tracked = int(model[1].num_batches_tracked)
    return {
        "seen": seen,
        "firsts": firsts,
        "opened": opened,
        "forwards": forwards,
        "committed": committed,
        "unmoved": unmoved,
        "tracked": tracked,
    }


@pytest.mark.parametrize("policy", ["sync", "cadence", "async"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_loop_sees_each_sample_once_an_epoch(world_size: int, policy: str) -> None:
    found = run_ranks(count_samples, world_size, policy)
    for epoch in range(EPOCHS):
        ids = Counter(i for rank in found for i in rank["seen"][epoch])
        assert ids == dict.fromkeys(range(SAMPLES), 1)
        # A parked rank may have missed the first window, and a rank may have no share of it.
        _, work = min(rank["opened"][epoch] for rank in found if epoch in rank["opened"])
        begins = {rank["firsts"][epoch] for rank, own in zip(found, work, strict=True) if own}
        assert len(begins) == 1, "an epoch begins at one window"
    for rank in found:
        assert rank["forwards"] == sum(rank["committed"]), "a batch did not count"
        assert rank["unmoved"], "something was trained before the loop began"
        # A counter reads what one process would have counted.
        assert rank["tracked"] == sum(r["forwards"] for r in found)


# ── a process group of the user's own ────────────────────────────────────────────────────────────


def train_in(process_group: Any) -> tuple[int, int, float, list[float]]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {} if process_group is None else {"process_group": process_group}
    with Ddp.setup(model, optimizer, devices="cpu", quiet=True, **options) as ddp:
        for batch in ddp.loader(torch.arange(24.0).view(8, 3) / 24, batch_size=4).epoch(0):
            ddp.backward(model(batch).square().mean())
            ddp.step()
        mean = ddp.weighted_mean(dist.get_rank())
        return ddp.rank, ddp.world_size, mean, model.weight.flatten().tolist()


def use_the_default_group_and_a_part_of_it(rank: Rank, address: str) -> list[Any]:
    dist.init_process_group("gloo", init_method=address, rank=rank.rank, world_size=rank.world_size)
    some = dist.new_group([2, 0])
    results: list[Any] = [train_in(None)]
    if rank.rank != 1:
        results.append(train_in(some))
    total = torch.ones(1)
    dist.all_reduce(total)  # the user's own group is as it was
    results.append(total.item())
    dist.destroy_process_group()
    return results


def test_a_process_group_that_is_there_already_or_a_part_of_it_is_the_team(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/store"
    first, second, third = run_ranks(use_the_default_group_and_a_part_of_it, 3, address)
    for number, (whole, *_, total) in enumerate((first, second, third)):
        assert whole[:3] == (number, 3, 1.0)
        assert whole[3] == first[0][3]
        assert total == 3.0
    assert [part[1:3] for part in (first[1], third[1])] == [(2, 1.0), (2, 1.0)]
    assert {first[1][0], third[1][0]} == {0, 1}
    assert first[1][3] == third[1][3]


# ── errors that name rank, file and line ─────────────────────────────────────────────────────────

BEGIN = """\
import os, torch, evener
RANK = int(os.environ["RANK"])
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def setup(ratios=(1, 1)):
    config = evener.DdpConfig(partition_ratios=ratios)
    return evener.Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True)
DATA = torch.arange(24.).view(8, 3)
"""


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Runs a script that fails on two ranks: what they print."""
    monkeypatch.chdir(tmp_path)

    def run(lines: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(BEGIN + lines)
        outcomes = run_ranks_to_end(be_script, 2, str(script))
        said = "\n".join(outcome.story() for outcome in outcomes)
        assert all(outcome.returned for outcome in outcomes), said
        assert max(outcome.value for outcome in outcomes) == 1, said
        return said

    return run


def line_of(text: str) -> int:
    """Number of the only line of the script that holds a text."""
    lines = Path("script.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, start=1) if text in line]
    return number


def test_a_name_of_a_body_that_did_not_run_for_lack_of_a_share(
    fork: Callable[[str], str],
) -> None:
    said = fork(
        "def main(ddp):\n"
        "    for batch in ddp.loader(DATA, batch_size=4).epoch(0):\n"
        "        loss = model(batch).mean()\n"
        "        ddp.backward(loss)\n"
        "        ddp.step()\n"
        "    print(loss.item())\n"
        "main(setup((1, 0)))\n"
    )
    assert "UnboundLocalError" in said
    assert "rank 1 has had no share of any window so far, so its loop's body has not run" in said


def test_different_collectives_name_file_and_line_of_every_rank(
    fork: Callable[[str], str],
) -> None:
    said = fork(
        "ddp = setup()\n"
        "for number, batch in enumerate(ddp.loader(DATA, batch_size=4).epoch(0)):\n"
        "    if RANK == 1 and number == 1:\n"
        "        ddp.save('checkpoint')\n"
        "    ddp.backward(model(batch).mean())\n"
        "    ddp.step()\n"
    )
    script, step, save = Path("script.py").resolve(), line_of("ddp.step()"), line_of("ddp.save(")
    assert f" at {script}:{step}; rank 1 is saving (ddp.save)" in said
    assert f"saving (ddp.save) at {script}:{save}." in said


# ── closing ──────────────────────────────────────────────────────────────────────────────────────


def begin(rank: Rank, **options: Any) -> tuple[Ddp, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = DdpConfig(partition_ratios=(1,) * rank.world_size)
    return Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True, **options), model


def train(ddp: Ddp, model: nn.Module, after: Callable[[int], object] = lambda number: None) -> None:
    data = torch.arange(48.0).view(16, 3)
    for number, batch in enumerate(ddp.loader(data, batch_size=4).epoch(0)):
        ddp.backward(model(batch).mean())
        ddp.step()
        after(number)


def close_while_another_error_is_handled(rank: Rank) -> list[str]:
    """Such as: nothing to resume from, so start anew."""
    told: list[str] = []

    class Told(Sink):
        def emit(self, event: Mapping[str, Any]) -> None:
            if event["type"] in ("window", "run_finished"):
                told.append(event.get("reason", event["type"]))

        def close(self) -> None:
            pass

    try:
        raise CheckpointError("no checkpoint")
    except CheckpointError:
        ddp, model = begin(rank, sinks=[Told()])
        with ddp:
            train(ddp, model)
    return told


def test_closing_in_a_handler_of_something_else_commits_what_was_applied() -> None:
    whole = [*["window"] * 4, "completed"]
    assert run_ranks(close_while_another_error_is_handled, 2) == [whole, []]


def refuse(ddp: Ddp, model: nn.Module) -> None:
    train(ddp, model)
    ddp.gather("a text" if ddp.rank else torch.ones(1))  # type: ignore[type-var]


def fail(ddp: Ddp, model: nn.Module) -> None:
    def raise_on_rank_1(number: int) -> None:
        if ddp.rank == number == 1:
            raise ZeroDivisionError("in the loop of rank 1")

    train(ddp, model, raise_on_rank_1)


def meet_at_odds(ddp: Ddp, model: nn.Module) -> None:
    train(ddp, model, lambda number: ddp.save("x") if ddp.rank == number == 1 else None)


def close_after(rank: Rank, trouble: Callable[[Ddp, nn.Module], None]) -> None:
    ddp, model = begin(rank)
    try:
        trouble(ddp, model)
    finally:
        if rank.rank == 0 or trouble is not meet_at_odds:  # the other one never comes
            ddp.close()


@pytest.mark.parametrize(
    ("trouble", "healthy", "failed"),
    [
        (refuse, CollectiveError, UsageError),
        (fail, CollectiveError, ZeroDivisionError),
        (meet_at_odds, CollectiveMismatchError, CollectiveMismatchError),
    ],
)
def test_closing_after_an_error_waits_for_nobody_and_hides_nothing(
    trouble: Callable[[Ddp, nn.Module], None], healthy: type, failed: type
) -> None:
    outcomes: list[Outcome] = run_ranks_to_end(close_after, 2, trouble)
    assert [type(outcome.exception) for outcome in outcomes[1:]] == [failed]
    assert isinstance(outcomes[0].exception, healthy), outcomes[0].story()
    assert "During handling" not in outcomes[1].traceback


# ── what belongs to an update ────────────────────────────────────────────────────────────────────


def clamp_after_every_update(rank: Rank) -> list[float]:
    """A share for rank 0 alone; ``verify_every`` finds weights that differ."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @optimizer.register_step_post_hook
    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.1, 0.1)

    config = DdpConfig(partition_ratios=(1, 0)[: rank.world_size], verify_every=1)
    with Ddp.setup(model, optimizer, devices="cpu", config=config, quiet=True) as ddp:
        train(ddp, model)
    return nn.utils.parameters_to_vector(model.parameters()).tolist()


def test_clamping_after_every_update_reaches_a_rank_without_a_share() -> None:
    (alone,) = run_ranks(clamp_after_every_update, 1)
    first, second = run_ranks(clamp_after_every_update, 2)
    assert first == second == pytest.approx(alone, rel=1e-6)
