"""A speed hint that measurement contradicts is told by rank 0, in every policy alike."""

import pytest
import torch
from torch import nn

from evener import ApplyPolicy, Ddp, DdpConfig, DistributedTrainConfig
from evener.comm.base import Communicator
from helpers.clocks import RankClocks
from helpers.limits import PATIENCE_S
from helpers.teams import run_team

#: Rank 1 takes four times as long for a sample.
SAMPLE_S = (0.001, 0.004)


@pytest.mark.parametrize("policy", list(ApplyPolicy))
def test_a_hint_the_wrong_way_round_is_told_with_both_numbers(
    policy: ApplyPolicy, rank_clocks: RankClocks, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {} if policy is ApplyPolicy.SYNC else {"anchor": 2, "max_anchor": 2}
    batch_size = 40 if policy is ApplyPolicy.SYNC else 4

    def train(comm: Communicator, hinted: DdpConfig) -> None:
        rank_clocks.start()
        model = nn.Linear(4, 1)
        config = DdpConfig(speed_hint=hinted.speed_hint, timeout_s=PATIENCE_S, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Ddp.setup(
            model,
            optimizer,
            policy=policy,
            devices="cpu",
            config=config,
            environment=DistributedTrainConfig(),
            communicator=comm,
            quiet=True,
        ) as ddp:
            for x in ddp.loader(torch.randn(480, 4), batch_size=batch_size):
                rank_clocks.spend(SAMPLE_S[comm.rank] * len(x))
                ddp.backward(model(x).square().mean())
                ddp.step()

    # Meant as "rank 1 is 4 times slower", and said as "rank 1 is 4 times faster".
    run_team(2, lambda comm: train(comm, DdpConfig(speed_hint={1: 4})))
    lines = [line for line in capsys.readouterr().err.splitlines() if "speed_hint" in line]
    assert [line.partition(" (")[0] for line in lines] == [
        "warning: speed_hint gives rank 0 20% of the speed of the ranks that were measured, and it "
        "has 80%",
        "warning: speed_hint gives rank 1 80% of the speed of the ranks that were measured, and it "
        "has 20%",
    ]
    assert all("with_speed_hint(slow_rank, ratio) says how slow one is" in line for line in lines)

    right = DdpConfig().with_speed_hint(slow_rank=1, ratio=4.0)
    run_team(2, lambda comm: train(comm, right))
    assert "speed_hint" not in capsys.readouterr().err
