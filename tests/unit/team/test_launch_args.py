import os
import socket

import pytest

from evener.errors import LaunchError
from evener.team.environment import DistributedTrainConfig
from evener.team.launch import LaunchPlan, launch
from evener.team.lifeline import watch
from evener.team.worker_processes import LocalRanks, rank_environment


def environment_of(rank, base=None):
    base = {} if base is None else base
    ranks = LocalRanks(count=3, world_size=3, host="127.0.0.1", port=1234)
    return rank_environment(base, ranks, rank)


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"port {port} .*in use.*--port"):
            launch(["true"], LaunchPlan(nproc=1, port=port))


def test_a_rank_reads_its_place_from_what_the_launcher_sets():
    config = DistributedTrainConfig.from_env(environment_of(2))
    assert (config.rank, config.local_rank) == (2, 2)
    assert (config.world_size, config.local_world_size) == (3, 3)
    assert (config.coordinator_addr, config.coordinator_port) == ("127.0.0.1", 1234)
    assert config.launched_by == "evener"


def test_traces_of_another_launcher_are_removed_and_the_rest_is_kept():
    base = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_RANK": "1",
        "RANK": "7",
        "GROUP_NAME": "mine",
        "HOME": "/home/x",
    }
    environ = environment_of(1, base)
    assert {"TORCHELASTIC_USE_AGENT_STORE", "GROUP_RANK"}.isdisjoint(environ)
    assert environ["RANK"] == "1"
    assert (environ["GROUP_NAME"], environ["HOME"]) == ("mine", "/home/x")
    assert environ["EVENER_PARENT_PID"] == str(os.getpid())


def test_the_lifeline_knows_who_is_left():
    assert watch(["11\n", "12\n", "11\n", "/a b\n"]) == {"12", "/a b"}
