"""A rank that becomes slow in the middle of a run is named."""

import pytest
import torch
from torch import nn

from evener.planning import stragglers
from helpers.clocks import RankClocks
from helpers.sinks import Kept
from helpers.teams import run_team, setup

SLOW_RANK, SLOW_FROM, NUM_STEPS = 2, 15, 24


def test_one_of_four_ranks_takes_200_ms_more(
    rank_clocks: RankClocks,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    # Waiting takes no time on these clocks, so nothing that a rank does costs the others anything.
    monkeypatch.setattr(stragglers, "NOTEWORTHY_S", 0.0)
    kept = Kept()

    def body(comm):
        rank_clocks.start()
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = setup(comm, model, optimizer)
        named, seen = [], []

        @ddp.on_commit
        def note(result):
            seen.append(result.window)
            named.extend(result.stragglers)

        def compute(batch):
            is_slow = comm.rank == SLOW_RANK and ddp.window >= SLOW_FROM
            rank_clocks.spend(0.01 * len(batch) + 0.2 * is_slow)
            ddp.backward(model(batch).square().mean())
            ddp.step()

        ddp.events.report_to([lambda: kept])
        with ddp:
            samples = torch.ones(32 * NUM_STEPS, 1)
            for batch in ddp.loader(samples, batch_size=32, micro_batch_size=4, prefetch="inline"):
                compute(batch)
        return named

    found = run_team(4, body)
    one, *further = found[0]
    assert (one.rank, one.since, one.is_over, further) == (SLOW_RANK, SLOW_FROM, False, [])
    assert one.window < SLOW_FROM + 5
    assert one.factor > 1.3
    assert found[1:] == [[], [], []], "the main process alone judges"
    (event,) = (event for event in kept.events if event["type"] == "straggler")
    assert (event["rank"], event["since"], event["window"]) == (SLOW_RANK, SLOW_FROM, one.window)
    assert event["compute_s"] == pytest.approx(one.factor * event["expected_s"], rel=1e-3)
    assert event["host"]
    assert event["device"].startswith("cpu (")
    assert event["cause"]
    said = [line for line in capsys.readouterr().err.splitlines() if "straggler" in line]
    assert len(said) == 1
    assert f"warning: straggler: rank {SLOW_RANK} ({event['host']}, cpu, " in said[0]
    assert f"since window {SLOW_FROM}" in said[0]
