"""A team of threads that grows from one rank to four and shrinks to one again."""

import time

from evener import Ddp, DdpConfig, WindowResult
from helpers.elastic import Died, ElasticThreads, ThreadMembership
from helpers.elastic_growth import DEATHS, SIZES, Grown, check, make_model, train
from helpers.elastic_runs import SEEDED, park_nobody
from helpers.limits import PATIENCE_S


def work(membership: ThreadMembership, *, changes: bool) -> Grown:
    team = membership.team

    def commit(result: WindowResult) -> None:
        if ddp.is_main_process and result.window in SIZES:
            joiners = [f"w{number}" for number in range(len(team.living), SIZES[result.window])]
            for member in joiners:
                team.start(member)
            while not team.waiting.issuperset(joiners):
                time.sleep(0.001)
        if membership.number in DEATHS.get(result.window, ()):
            team.die(membership.member)

    with SEEDED:  # threads share torch's generator
        model, optimizer = make_model(1 + membership.number)
    config = DdpConfig(quiet=True, timeout_s=PATIENCE_S)
    with Ddp.setup(model, optimizer, devices="cpu", elastic=membership, config=config) as ddp:
        park_nobody(ddp)
        return train(ddp, commit) if changes else train(ddp)


def test_growing_and_shrinking_trains_as_one_rank_alone() -> None:
    team = ElasticThreads(1)
    fates = team.run(lambda membership: work(membership, changes=True))
    errors = [fate.error for fate in fates if fate.error is not None]
    assert all(isinstance(error, Died) for error in errors), errors
    sizes = [len(formation.members) for formation in team.formations]
    assert (sizes[:4], sizes[-1]) == ([1, 2, 4, 3], 1)
    assert team.formations[-1].members == ("w3",)
    (alone,) = ElasticThreads(1).run(lambda membership: work(membership, changes=False))
    check(team.fate("w3").value, alone.value)
