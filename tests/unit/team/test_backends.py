"""How a team exchanges: one decision from what all ranks say, with a reason; the rest by name."""

from dataclasses import replace

import pytest

from evener.comm.threads import ThreadTeam
from evener.errors import ConfigError
from evener.team.backends import ExchangeFacts, check_backend, decide_backend
from evener.team.environment import AverageBackend
from helpers.gpu_facts import ON_CPU, ON_GPU, OTHER_GPU


def asking(backend: str, *team: ExchangeFacts) -> list[ExchangeFacts]:
    return [replace(facts, backend=backend) for facts in team]


@pytest.mark.parametrize("backend", list(AverageBackend))
def test_one_rank_exchanges_nothing_whatever_is_asked(backend):
    assert decide_backend(asking(backend, ON_CPU))[0] == "none"


ANY_DEVICES = pytest.mark.parametrize(
    "team", [(ON_CPU, ON_CPU), (ON_GPU, OTHER_GPU), (ON_GPU, ON_CPU)]
)


@ANY_DEVICES
def test_gloo_means_sockets_between_any_devices(team):
    assert decide_backend(asking("gloo", *team)) == (
        "gloo",
        "asked for ('gloo'); ranks exchange through sockets of their hosts",
    )


@ANY_DEVICES
def test_ranks_of_one_host_exchange_through_its_memory(team):
    chosen, reason = decide_backend(asking("cpu", *team))
    assert (chosen, reason) == ("shared", "asked for ('cpu')")
    apart = [replace(facts, host=f"host-{rank}") for rank, facts in enumerate(team)]
    assert decide_backend(asking("cpu", *apart))[0] == "gloo"
    assert decide_backend(asking("auto", ON_CPU, replace(ON_CPU, host="beta")))[0] == "gloo"
    assert decide_backend(asking("cpu", *apart, team[0], replace(team[0], host="host-0")))[0] == (
        "hosts"
    )


@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_gpus_of_one_vendor_one_for_each_rank_use_nccl(backend):
    chosen, reason = decide_backend(asking(backend, ON_GPU, OTHER_GPU))
    assert chosen == "nccl"
    assert reason.startswith("asked for" if backend == "nccl" else "chosen because every rank has")


OBSTACLES = {
    "without CUDA": ([ON_CPU, ON_CPU], "ranks 0 and 1 compute on the CPU, and NCCL connects only"),
    "one rank on the CPU": ([ON_GPU, ON_CPU], "rank 1 computes on the CPU, and NCCL connects only"),
    "more ranks than GPUs": (
        [replace(ON_GPU, num_gpus=1), replace(ON_CPU, num_gpus=1)],
        r"rank 1 \(host here: 2 ranks, GPUs: 1\) computes on the CPU",
    ),
    "two ranks on one GPU": (
        [ON_GPU, ON_GPU],
        r"ranks 0 and 1 share one GPU \(cuda:0 of host here\), and NCCL needs one for each rank",
    ),
    "mixed vendors": (
        [ON_GPU, replace(OTHER_GPU, vendor="AMD", nccl="2.26")],
        "rank 0 has NCCL 2.29 of NVIDIA and rank 1 has NCCL 2.26 of AMD, which are incompatible",
    ),
    "no NCCL": ([ON_GPU, replace(OTHER_GPU, nccl="")], "rank 1 has a torch without NCCL"),
    "unlike NCCL": (
        [ON_GPU, replace(OTHER_GPU, nccl="2.27")],
        "NCCL 2.29 of NVIDIA and rank 1 has NCCL 2.27",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_nccl_is_refused_with_the_reason_for_which_auto_avoids_it(case):
    team, words = OBSTACLES[case]
    with pytest.raises(
        ConfigError, match=f"backend is 'nccl', but .*{words}.*: use backend='gloo'"
    ):
        decide_backend(asking("nccl", *team))
    chosen, reason = decide_backend(asking("auto", *team))
    assert chosen == "shared"
    with pytest.raises(ConfigError, match=words):  # the same words
        raise ConfigError(reason)


@pytest.mark.parametrize("name", ["backend", "policy"])
def test_ranks_that_ask_for_different_things_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is '.*' on rank 0 and 'gloo' on rank 1"):
        decide_backend([ON_CPU, replace(ON_CPU, **{name: "gloo"})])


def test_unknown_backends_are_refused():
    with pytest.raises(ConfigError, match="backend is 'mpi'; choose one of auto, nccl, gloo, cpu"):
        check_backend("mpi")


def test_ranks_that_are_no_processes_have_no_nccl():
    with (
        ThreadTeam(2).communicator(0) as comm,
        pytest.raises(ConfigError, match=r"backend is 'nccl', but .* exchange over 'threads'"),
    ):
        comm.add_nccl()
