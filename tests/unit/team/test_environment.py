"""A rank's place: from its environment, from a file, and from Python."""

from typing import Any

import pytest

from evener.errors import ConfigError
from evener.team.environment import (
    AverageBackend,
    DistributedBackend,
    DistributedRole,
    DistributedTrainConfig,
    read_machines,
)
from evener.team.slurm import hosts_of

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}
EVENER = {
    "EVENER_LAUNCHED": "1",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "41234",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_GTIDS": "4,5",
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_JOB_NODELIST": "login,node[01-09]",
}
# As srun sets it for a step over both components: counts are of all, nodes sorted by name. Task 0
# is on the first node of component 0, which is not the first of the list.
HETEROGENEOUS = {
    **SLURM,
    "SLURM_HET_SIZE": "2",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_NPROCS": "2",  # of this component
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "2",
    "SLURM_STEP_NODELIST": "big1,small[1-2]",
    "SLURM_JOB_NODELIST": "big1,small[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "small[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "big1",
    "SLURMD_NODENAME": "big1",
}
FILE = """
world_size: 3
rank: 1
local_rank: 1
local_world_size: 2
coordinator_addr: node7
coordinator_port: 29500
backend: cpu
comm_backend: gloo
"""


def place(environ, **changes):
    merged = {**environ, **changes}
    return DistributedTrainConfig.from_env({k: v for k, v in merged.items() if v is not None})


def in_file(folder, text, **changes):
    path = folder / "team.yaml"
    path.write_text(text)
    return DistributedTrainConfig.from_yaml(path, **changes)


def numbers(config):
    return config.rank, config.world_size, config.local_rank, config.local_world_size


def refused(call, *named):
    with pytest.raises(ConfigError) as caught:
        call()
    for text in named:
        assert text in str(caught.value)


# ── the environment ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("environ", "launched_by", "expected"),
    [
        ({}, "alone", (0, 1, 0, 1)),
        (TORCHRUN, "torchrun", (3, 4, 1, 2)),
        (SLURM, "slurm", (5, 6, 1, 2)),
        ({**SLURM, **TORCHRUN}, "torchrun", (3, 4, 1, 2)),
        ({**SLURM, **TORCHRUN, **EVENER}, "evener", (0, 2, 0, 2)),
        (HETEROGENEOUS, "slurm", (2, 3, 0, 1)),
        # No task of a step of several.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, "alone", (0, 1, 0, 1)),  # salloc
        ({**SLURM, "SLURM_STEP_ID": "4294967291"}, "alone", (0, 1, 0, 1)),  # a batch script
        ({**SLURM, "SLURM_STEP_ID": "4294967290"}, "alone", (0, 1, 0, 1)),  # salloc's shell
    ],
)
def test_whatever_started_a_rank_tells_its_place(environ, launched_by, expected):
    config = place(environ)
    assert (config.launched_by, numbers(config)) == (launched_by, expected)
    assert config.role == ("worker" if config.rank else "coordinator")


@pytest.mark.parametrize(("said", "has"), [(None, False), ("True", True), ("False", False)])
def test_torchruns_agent_may_have_the_port(said, has):
    assert place(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE=said).agent_store is has


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1", (3, 4)), ("localhost", (3, 4)), ("::1", (3, 4)), ("10.0.0.1", (0, 1))],
)
def test_without_local_numbers_a_loopback_address_means_one_host(tmp_path, address, local):
    config = place(TORCHRUN, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None, MASTER_ADDR=address)
    assert numbers(config) == (3, 4, *local)
    text = f"world_size: 4\nrank: 3\ncoordinator_addr: '{address}'\ncoordinator_port: 29500"
    assert numbers(in_file(tmp_path, text)) == (3, 4, *local)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "one"}, ["RANK", "'one'"]),
        ({"RANK": None}, ["RANK missing", "WORLD_SIZE=4"]),
        ({"WORLD_SIZE": "4.0"}, ["WORLD_SIZE", "'4.0'"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR missing"]),
        ({"MASTER_PORT": "70000"}, ["70000", "65535"]),
    ],
)
def test_a_bad_variable_is_named_with_its_value(changes, named):
    refused(lambda: place(TORCHRUN, **changes), *named)


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"},
        {"RANK": "0"},
        {**SLURM, "RANK": "0"},
    ],
)
def test_half_a_description_is_an_error_and_not_a_run_alone(environ):
    refused(lambda: place(environ), "incompletely", "unset them to run alone")


def test_machines_are_read_where_torchrun_reads_them():
    where = {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "29500"}
    found = {"nnodes": "2", "node_rank": 1, "master_addr": "node0", "port": 29500}
    pet = {**where, "PET_NNODES": "2"}
    assert read_machines({**pet, "PET_NPROC_PER_NODE": "4"}) == {**found, "nproc": 4}
    for count in ("auto", "gpu", ""):
        assert read_machines({**pet, "PET_NPROC_PER_NODE": count}) == found
    assert read_machines(where) == {}
    with pytest.raises(ConfigError, match="PET_NODE_RANK is 'first'"):
        read_machines({**pet, "PET_NODE_RANK": "first"})


# ── SLURM ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),2"}, 2),
        ({"SLURM_TASKS_PER_NODE": "3(x3)"}, 3),
        ({"SLURM_TASKS_PER_NODE": "nonsense"}, 2),  # nothing known: at least those up to this one
    ],
)
def test_tasks_on_the_node_without_a_list_of_them(changes, expected):
    assert place(SLURM, SLURM_GTIDS=None, **changes).local_world_size == expected


def test_slurm_ports_differ_between_jobs_and_steps_and_stay_in_range():
    ports = [
        place(SLURM, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)).coordinator_port
        for job in (4242, 4243, 10**9)
        for step in (0, 1)
    ]
    assert len(set(ports)) == len(ports)
    assert all(20_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({}, "small1"),
        ({"SLURM_STEP_NODELIST": "big1", "SLURM_JOB_NODELIST": "big1"}, "big1"),
        ({"SLURM_STEP_NODELIST": "big1,small2"}, "small2"),
    ],
)
def test_ranks_of_a_heterogeneous_step_meet_at_the_host_of_task_0(changes, host):
    assert place(HETEROGENEOUS, **changes).coordinator_addr == host


def test_components_in_another_order_are_noticed_by_task_0():
    """Such as `srun --het-group=1 ... : --het-group=0 ...`, which no variable tells."""
    task_0: Any = {"SLURM_PROCID": "0", "SLURM_GTIDS": "0"}
    refused(lambda: place(HETEROGENEOUS, **task_0), "task 0 runs on big1", "MASTER_ADDR=big1")
    chosen = place(HETEROGENEOUS, **task_0, MASTER_ADDR="10.0.0.9", MASTER_PORT="1234")
    assert (chosen.coordinator_addr, chosen.coordinator_port) == ("10.0.0.9", 1234)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": "6"}, ["SLURM_PROCID is 6", "6 tasks"]),
        ({"SLURM_LOCALID": None}, ["SLURM_LOCALID is not set", "srun"]),
        ({"SLURM_STEP_NODELIST": "node[01"}, ["node[01", "MASTER_ADDR"]),
        ({"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None}, ["SLURM_STEP_NODELIST"]),
    ],
)
def test_a_bad_slurm_variable_is_named(changes, named):
    refused(lambda: place(SLURM, **changes), *named)


@pytest.mark.parametrize(
    ("compact", "hosts"),
    [
        ("node7", ["node7"]),
        ("node[01-03,7],gpu2", ["node01", "node02", "node03", "node7", "gpu2"]),
        ("rack[1-2]n[a,b]", ["rack1na", "rack1nb", "rack2na", "rack2nb"]),
        ("a-b[9-11]-c", ["a-b9-c", "a-b10-c", "a-b11-c"]),
    ],
)
def test_all_hosts_of_a_list(compact, hosts):
    assert list(hosts_of(compact)) == hosts


@pytest.mark.parametrize("compact", ["", "(null)", "node[", "node]", "[]"])
def test_lists_without_a_first_host(compact):
    refused(lambda: next(hosts_of(compact)), repr(compact))


# ── files and Python ─────────────────────────────────────────────────────────────────────────────


def test_fields_in_the_order_that_is_public():
    config = DistributedTrainConfig(4, 2, 0, "worker", "10.0.0.1:9000", "cpu", "gloo")
    assert (config.world_size, config.rank, config.local_rank) == (4, 2, 0)
    assert config.role is DistributedRole.WORKER
    assert (config.coordinator_addr, config.coordinator_port) == ("10.0.0.1", 9000)
    assert config.backend is DistributedBackend.CPU
    assert config.comm_backend is AverageBackend.GLOO
    assert DistributedTrainConfig(2, 1).role is DistributedRole.WORKER


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"rank": 1, "world_size": 2, "role": "coordinator"}, "pass role='worker'"),
        ({"role": "worker"}, "pass role='coordinator'"),
        ({"role": "boss"}, "choose one of coordinator, worker"),
        ({"backend": "tpu"}, "choose one of auto, cpu, cuda"),
        ({"backend": "wgpu"}, "torch has no wgpu: 'auto' uses"),
        ({"coordinator_addr": "[::1]:9000", "coordinator_port": 9}, "give the port once"),
        ({"coordinator_addr": "my host"}, "'my host', which is not a host"),
        ({"world_size": 2, "rank": 1, "coordinator_addr": "0.0.0.0"}, "that host alone can use it"),
        ({"coordinator_port": 65_536}, "65536"),
        ({"local_rank": 2, "world_size": 2}, "local_rank is 2"),
        ({"world_size": 2, "local_world_size": 7}, "local_world_size is 7"),
        ({"local_rank": "1"}, "give a whole number"),
    ],
)
def test_impossible_fields_are_refused(fields, named):
    refused(lambda: DistributedTrainConfig(**fields), named)


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_rank_0_may_listen_on_every_address(address):
    bracketed = f"[{address}]:9000" if ":" in address else f"{address}:9000"
    config = DistributedTrainConfig(2, 0, coordinator_addr=bracketed)
    assert (config.coordinator_addr, config.coordinator_port) == (address, 9000)


@pytest.mark.parametrize("section", ["", "training:\n  distributed:\n", "distributed:\n"])
def test_a_place_is_read_from_a_file_alone_or_beside_other_things(tmp_path, section):
    depth = "  " * (section.count("\n"))
    lines = "".join(f"{depth}{line}\n" for line in FILE.split("\n") if line)
    config = in_file(tmp_path, f"{section}{lines}")
    assert numbers(config) == (1, 3, 1, 2)
    assert (config.role, config.backend, config.comm_backend) == ("worker", "cpu", "gloo")
    assert (config.coordinator_addr, config.coordinator_port) == ("node7", 29500)
    assert (config.launched_by, config.agent_store) == ("the user", False)


def test_ranks_may_share_a_file_and_say_who_they_are(tmp_path):
    text = "world_size: 2\nrank: 0\nlocal_rank: 0\nrole: coordinator\ncoordinator_addr: {}:9000"
    for rank, role in enumerate(["coordinator", "worker"]):
        config = in_file(tmp_path, text.format("127.0.0.1"), rank=rank)
        assert (numbers(config), config.role) == ((rank, 2, rank, 2), role)
    assert in_file(tmp_path, text.format("node7"), rank=1).local_rank == 0, "one rank on each host"
    assert in_file(tmp_path, text.format("node7"), rank=1, local_rank=1).local_rank == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank: 0", "world_size is missing"),
        ("world_size: 2\ncoordinator_addr: node7", "rank is missing"),
        ("world_size: 2\nrank: 1", "coordinator_addr is missing"),
        ("world_size: 1\nrnak: 0", "unknown key 'rnak'"),
        ("world_size: [", "broken YAML"),
    ],
)
def test_a_bad_value_of_a_file_is_named(tmp_path, text, named):
    refused(lambda: in_file(tmp_path, text), "team.yaml", named)
