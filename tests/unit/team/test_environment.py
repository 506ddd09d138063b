from pathlib import Path

import pytest

from evener.errors import ConfigError
from evener.team.environment import (
    AverageBackend,
    DistributedBackend,
    DistributedRole,
    DistributedTrainConfig,
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


def place(environ, **changes):
    merged = {**environ, **changes}
    return DistributedTrainConfig.from_env({k: v for k, v in merged.items() if v is not None})


def test_an_empty_environment_is_a_team_of_one():
    config = place({})
    assert (config.world_size, config.rank, config.local_rank) == (1, 0, 0)
    assert config.role is DistributedRole.COORDINATOR
    assert config.launched_by == "alone"
    assert not config.agent_store


def test_the_process_environment_is_the_default(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert DistributedTrainConfig.from_env().rank == 3


def test_torchrun_variables_are_taken_as_they_are():
    config = place(TORCHRUN)
    assert (config.world_size, config.rank) == (4, 3)
    assert (config.local_rank, config.local_world_size) == (1, 2)
    assert (config.coordinator_addr, config.coordinator_port) == ("node7", 29500)
    assert config.role is DistributedRole.WORKER
    assert config.launched_by == "torchrun"
    assert not config.agent_store


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("said", "has"), [(None, False), ("True", True), ("False", False)])
def test_torchruns_agent_may_have_the_port(rank, said, has):
    config = place(TORCHRUN, RANK=rank, TORCHELASTIC_USE_AGENT_STORE=said)
    assert config.agent_store is has


def test_evener_launch_comes_before_everything_else():
    config = place({**SLURM, **TORCHRUN, **EVENER})
    assert config.launched_by == "evener"
    assert (config.rank, config.world_size) == (0, 2)


def test_torchrun_comes_before_slurm():
    assert place({**SLURM, **TORCHRUN}).launched_by == "torchrun"


@pytest.mark.parametrize(
    ("address", "local_rank", "local_world_size"),
    [("127.0.0.1", 3, 4), ("localhost", 3, 4), ("::1", 3, 4), ("10.0.0.1", 0, 1)],
)
def test_without_local_variables_a_loopback_address_means_one_host(
    address, local_rank, local_world_size
):
    config = place(TORCHRUN, LOCAL_RANK=None, LOCAL_WORLD_SIZE=None, MASTER_ADDR=address)
    assert (config.local_rank, config.local_world_size) == (local_rank, local_world_size)


@pytest.mark.parametrize(
    "address", ["node7", "node7.lab.example", "10.1.2.3", "fe80::1", "[2001:db8::1]"]
)
def test_hosts_by_name_ipv4_and_ipv6(address):
    assert place(TORCHRUN, MASTER_ADDR=address).coordinator_addr == address.strip("[]")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"RANK": "4"}, ["rank is 4", "world_size is 4", "RANK"]),
        ({"RANK": "-1"}, ["rank is -1"]),
        ({"RANK": "one"}, ["RANK", "'one'", "no integer"]),
        ({"WORLD_SIZE": "4.0"}, ["WORLD_SIZE", "'4.0'"]),
        ({"WORLD_SIZE": "0"}, ["world_size is 0"]),
        ({"RANK": None}, ["RANK missing", "WORLD_SIZE=4"]),
        ({"WORLD_SIZE": None}, ["WORLD_SIZE missing"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR missing"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR missing"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT missing"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT", "'http'"]),
        ({"MASTER_PORT": "70000"}, [":70000'; give a port"]),
        ({"LOCAL_RANK": "2"}, ["local_rank is 2", "local_world_size is 2"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK", "'x'"]),
        ({"MASTER_ADDR": "node7:1"}, ["node7:1", "give the port once"]),
        ({"MASTER_ADDR": "my host"}, ["my host", "not a host"]),
    ],
)
def test_a_bad_variable_is_named_with_its_value(changes, named):
    with pytest.raises(ConfigError) as caught:
        place(TORCHRUN, **changes)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"},
        {"LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"SLURM_JOB_ID": "1", "MASTER_ADDR": "node7"},
        {**SLURM, "RANK": "0"},
    ],
)
def test_half_a_description_is_an_error_and_not_a_run_alone(environ):
    with pytest.raises(ConfigError, match=r"only in part.*unset them to run alone"):
        place(environ)


# ── SLURM ────────────────────────────────────────────────────────────────────────────────────────


def test_a_slurm_task():
    config = place(SLURM)
    assert (config.world_size, config.rank) == (6, 5)
    assert (config.local_rank, config.local_world_size) == (1, 2)
    assert config.coordinator_addr == "node01"
    assert config.coordinator_port == 24242
    assert config.launched_by == "slurm"
    assert not config.agent_store


def test_slurm_ports_differ_between_jobs_and_steps_and_stay_in_range():
    ports = [
        place(SLURM, SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)).coordinator_port
        for job in (1, 2, 9_999, 10_000, 123_456_789)
        for step in (0, 1, 2)
    ]
    assert all(20_000 <= port <= 29_999 for port in ports)
    assert len(set(ports)) == len(ports)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"},  # salloc
        {**SLURM, "SLURM_STEP_ID": None, "SLURM_PROCID": "0"},  # a batch script
        {**SLURM, "SLURM_PROCID": None},
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # a batch script, newer releases
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # salloc with an interactive step
    ],
)
def test_a_slurm_shell_without_srun_is_a_team_of_one(environ):
    assert place(environ).launched_by == "alone"


def test_a_slurm_step_of_one_task_may_start_ranks_of_its_own():
    """The shell of `srun --pty bash` is one, perhaps with several devices."""
    changes = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    config = place(SLURM, **changes, MASTER_ADDR="node01")
    assert (config.world_size, config.launched_by) == (1, "alone")


def test_older_name_of_the_step():
    assert place(SLURM, SLURM_STEP_ID=None, SLURM_STEPID="0").launched_by == "slurm"


def test_a_step_smaller_than_its_job_counts_its_own_tasks():
    assert place(SLURM, SLURM_NTASKS="64").world_size == 6


def test_a_batch_script_may_choose_where_to_meet():
    config = place(SLURM, MASTER_ADDR="10.0.0.9", MASTER_PORT="1234")
    assert (config.coordinator_addr, config.coordinator_port) == ("10.0.0.9", 1234)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_GTIDS": "0,1,2,3"}, 4),
        ({"SLURM_GTIDS": None}, 2),  # nothing known: at least those up to this one
    ],
)
def test_tasks_on_the_node(changes, expected):
    assert place(SLURM, **changes).local_world_size == expected


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
    "SLURM_NODEID": "2",
    "SLURM_GTIDS": "2",
    "SLURM_STEP_NODELIST": "big1,small[1-2]",
    "SLURM_JOB_NODELIST": "big1,small[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "small[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "big1",
    "SLURMD_NODENAME": "big1",
}


def test_a_heterogeneous_step_is_one_team():
    config = place(HETEROGENEOUS)
    assert (config.rank, config.world_size) == (2, 3)
    assert config.coordinator_addr == "small1"
    assert (config.local_rank, config.local_world_size) == (0, 1)
    task_0 = place(HETEROGENEOUS, SLURM_PROCID="0", SLURM_GTIDS="0", SLURMD_NODENAME="small1")
    assert task_0.coordinator_addr == "small1"
    assert not task_0.agent_store


def test_a_step_in_one_component_of_a_heterogeneous_job_stays_there():
    step = {"SLURM_STEP_NODELIST": "big1", "SLURM_JOB_NODELIST": "big1"}
    counts = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
    config = place(HETEROGENEOUS, **step, **counts, SLURM_GTIDS="0")
    assert (config.world_size, config.coordinator_addr) == (2, "big1")


def test_a_step_on_part_of_its_component():
    config = place(HETEROGENEOUS, SLURM_STEP_NODELIST="big1,small2")
    assert config.coordinator_addr == "small2"


def test_components_in_another_order_are_noticed_by_task_0():
    """Such as `srun --het-group=1 ... : --het-group=0 ...`, which no variable tells."""
    with pytest.raises(ConfigError, match=r"task 0 runs on big1, .*MASTER_ADDR=big1"):
        place(HETEROGENEOUS, SLURM_PROCID="0", SLURM_GTIDS="0")
    config = place(HETEROGENEOUS, SLURM_PROCID="0", SLURM_GTIDS="0", MASTER_ADDR="big1")
    assert config.coordinator_addr == "big1"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"SLURM_PROCID": "6"}, ["SLURM_PROCID is 6", "6 tasks"]),
        ({"SLURM_PROCID": "x"}, ["SLURM_PROCID", "'x'"]),
        ({"SLURM_LOCALID": None}, ["SLURM_LOCALID is not set", "srun"]),
        ({"SLURM_STEP_NODELIST": "node[01"}, ["node[01", "MASTER_ADDR"]),
        (
            {"SLURM_STEP_NODELIST": None, "SLURM_JOB_NODELIST": None},
            ["SLURM_STEP_NODELIST", "not set"],
        ),
    ],
)
def test_a_bad_slurm_variable_is_named(changes, named):
    with pytest.raises(ConfigError) as caught:
        place(SLURM, **changes)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("compact", "host"),
    [
        ("gpu2", "gpu2"),
        ("gpu2,node[01-03,7]", "gpu2"),
        ("node[01-03,7],gpu2", "node01"),
        ("node[7]", "node7"),
        ("node[007,9]", "node007"),
        ("rack[2-3]-node[10-12]", "rack2-node10"),
        ("node[1-2].cluster.example", "node1.cluster.example"),
        ("node1 node2", "node1"),
        ("  node1", "node1"),
        ("2001:db8::5,2001:db8::6", "2001:db8::5"),
    ],
)
def test_first_host_of_a_list(compact, host):
    assert next(hosts_of(compact)) == host


@pytest.mark.parametrize(
    ("compact", "hosts"),
    [
        ("node[08-10,7],gpu2", ["node08", "node09", "node10", "node7", "gpu2"]),
        ("r[1-2]n[3-4].x", ["r1n3.x", "r1n4.x", "r2n3.x", "r2n4.x"]),
        ("torus[000x001]", ["torus000x001"]),  # not written out: only its first is ever needed
    ],
)
def test_all_hosts_of_a_list(compact, hosts):
    assert list(hosts_of(compact)) == hosts


@pytest.mark.parametrize("compact", ["", ",", "node[", "node[]", "node[1", "node]", "(null)"])
def test_lists_without_a_first_host(compact):
    with pytest.raises(ConfigError, match="names no first host"):
        next(hosts_of(compact))


# ── made by hand ─────────────────────────────────────────────────────────────────────────────────


def test_fields_in_the_order_that_is_public():
    config = DistributedTrainConfig(4, 2, 0, "worker", "10.0.0.1", "cpu", "gloo")
    assert (config.world_size, config.rank, config.local_rank) == (4, 2, 0)
    assert config.role is DistributedRole.WORKER
    assert config.backend is DistributedBackend.CPU
    assert config.comm_backend is AverageBackend.GLOO


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"world_size": 0}, "world_size is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2"),
        ({"rank": 1, "world_size": 2, "role": "coordinator"}, "pass role='worker'"),
        ({"role": "worker"}, "pass role='coordinator'"),
        ({"role": "boss"}, "choose one of coordinator, worker"),
        ({"backend": "tpu"}, "choose one of auto, cpu, cuda"),
        ({"comm_backend": "mpi"}, "choose one of auto, nccl, gloo, cpu"),
        ({"coordinator_addr": "10.0.0.1:9000", "coordinator_port": 9}, "give the port once"),
        ({"coordinator_addr": "[::1]:9000", "coordinator_port": 9}, "give the port once"),
        ({"coordinator_addr": "[::1"}, "'[::1', which is not a host"),
        ({"coordinator_addr": "::1]"}, "'::1]', which is not a host"),
        ({"coordinator_port": 65_536}, ":65536'; give a port from 1"),
        ({"local_world_size": -1}, "local_world_size is -1"),
        ({"local_rank": -2}, "local_rank is -2"),
        ({"local_rank": 1}, "local_rank is 1 and local_world_size is 1"),
        ({"local_rank": 2, "world_size": 2}, "local_rank is 2 and local_world_size is 2"),
    ],
)
def test_impossible_fields_are_refused(fields, named):
    with pytest.raises(ConfigError) as caught:
        DistributedTrainConfig(**fields)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("address", "local_world_size"), [("127.0.0.1", 4), ("localhost:9", 4), ("10.0.0.1", 2)]
)
def test_ranks_of_this_host_follow_the_address_unless_they_are_told(address, local_world_size):
    config = DistributedTrainConfig(4, 3, 1, "worker", address)
    assert config.local_world_size == local_world_size
    told = DistributedTrainConfig(4, 3, 1, "worker", address, local_world_size=3)
    assert told.local_world_size == 3


# ── threads ──────────────────────────────────────────────────────────────────────────────────────


# ── a place in a file ────────────────────────────────────────────────────────────────────────────


def in_file(folder: Path, text: str, **changes: object) -> DistributedTrainConfig:
    path = folder / "team.yaml"
    path.write_text(text)
    return DistributedTrainConfig.from_yaml(path, **changes)


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


def test_a_place_is_read_from_a_file(tmp_path):
    config = in_file(tmp_path, FILE)
    assert (config.world_size, config.rank, config.local_rank) == (3, 1, 1)
    assert (config.role, config.backend) == (DistributedRole.WORKER, DistributedBackend.CPU)
    assert (config.coordinator_addr, config.coordinator_port) == ("node7", 29500)
    assert config.comm_backend is AverageBackend.GLOO
    assert not config.agent_store


@pytest.mark.parametrize(("address", "place"), [("localhost", (2, 3)), ("node7", (0, 1))])
def test_without_local_numbers_a_loopback_address_means_one_host(tmp_path, address, place):
    text = f"world_size: 3\nrank: 2\ncoordinator_addr: {address}\ncoordinator_port: 29500"
    config = in_file(tmp_path, text)
    assert (config.local_rank, config.local_world_size) == place
    assert config.launched_by == "the user"


def test_ranks_may_share_a_file_and_say_who_they_are(tmp_path):
    config = in_file(tmp_path, FILE, rank=0)
    assert (config.rank, config.role) == (0, DistributedRole.COORDINATOR)
    complete = """
        world_size: 2
        rank: 0
        local_rank: 0
        role: coordinator
        backend: auto
        coordinator_addr: 127.0.0.1:9000
    """
    for rank, role in enumerate(["coordinator", "worker"]):
        config = in_file(tmp_path, complete, rank=rank)
        assert (config.rank, config.local_rank, config.role) == (rank, rank, role)
        assert config.local_world_size == 2
    elsewhere = complete.replace("127.0.0.1", "node7")
    assert in_file(tmp_path, elsewhere, rank=1).local_rank == 0, "one rank on each host"
    assert in_file(tmp_path, elsewhere, rank=1, local_rank=1).local_rank == 1
    with pytest.raises(ConfigError, match="role is 'coordinator' for rank 1"):
        in_file(tmp_path, complete, rank=1, role="coordinator")


@pytest.mark.parametrize("section", ["training:\n  distributed:\n", "distributed:\n"])
def test_the_place_may_stand_beside_other_things(tmp_path, section):
    depth = " " * (4 if "training" in section else 2)
    lines = "".join(f"{depth}{line}\n" for line in FILE.split("\n") if line)
    assert in_file(tmp_path, f"model: {{size: 3}}\n{section}{lines}").rank == 1


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("node7:9000", "node7"),
        ("'10.1.2.3:9000'", "10.1.2.3"),
        ("'[2001:db8::1]:9000'", "2001:db8::1"),
    ],
)
def test_an_address_of_a_file_may_hold_the_port(tmp_path, address, host):
    text = f"world_size: 2\nrank: 1\ncoordinator_addr: {address}"
    config = in_file(tmp_path, text)
    assert (config.coordinator_addr, config.coordinator_port) == (host, 9000)
    with pytest.raises(ConfigError, match="coordinator_port is 29500; give the port once"):
        in_file(tmp_path, f"{text}\ncoordinator_port: 29500")


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_rank_0_may_listen_on_every_address_and_the_others_need_one_that_leads_there(address):
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "9000"}
    bracketed = f"[{address}]:9000" if ":" in address else f"{address}:9000"
    for config in (
        DistributedTrainConfig(2, 0, coordinator_addr=bracketed),
        DistributedTrainConfig.from_env({"RANK": "0", **variables}),
    ):
        assert (config.coordinator_addr, config.coordinator_port) == (address, 9000)
    for call in (
        lambda: DistributedTrainConfig(2, 1, 1, "worker", bracketed),
        lambda: DistributedTrainConfig.from_env({"RANK": "1", **variables}),
    ):
        with pytest.raises(ConfigError, match=r"that host alone can use it, to listen; give"):
            call()


def test_an_address_that_is_given_may_hold_the_port():
    config = DistributedTrainConfig(2, 1, 1, "worker", "10.1.2.3:9000", "cpu", "gloo")
    assert (config.coordinator_addr, config.coordinator_port) == ("10.1.2.3", 9000)
    assert DistributedTrainConfig(coordinator_addr="fe80::1").coordinator_port == 0
    with pytest.raises(ConfigError, match="coordinator_addr is 'node7:99999'; give a port"):
        DistributedTrainConfig(coordinator_addr="node7:99999")
    with pytest.raises(ConfigError, match="coordinator_addr is None; give a name"):
        DistributedTrainConfig(coordinator_addr=None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank: 0", ["team.yaml", "world_size is missing"]),
        ("world_size: 2\ncoordinator_addr: node7", ["rank is missing"]),
        ("world_size: 2\nrank: 1", ["coordinator_addr is missing"]),
        ("world_size: two\nrank: 0\ncoordinator_addr: a", ["world_size is 'two'", "whole number"]),
        ("world_size: yes\nrank: 0\ncoordinator_addr: a", ["world_size is True", "whole number"]),
        ("world_size: 1\nrnak: 0", ["unknown key 'rnak'", "rank"]),
        (FILE.replace("rank: 1", "rank: 3", 1), ["rank is 3 and world_size is 3"]),
        (FILE + "role: coordinator", ["role is 'coordinator' for rank 1", "'worker'"]),
        (FILE + "role: chief", ["role is 'chief'", "coordinator, worker"]),
        (FILE.replace("cpu", "tpu"), ["backend is 'tpu'", "auto, cpu, cuda"]),
        (FILE.replace("cpu", "wgpu"), ["backend is 'wgpu'", "torch has no wgpu: 'auto' takes"]),
        (FILE.replace("gloo", "mpi"), ["comm_backend is 'mpi'"]),
        (FILE.replace("node7", "my host"), ["coordinator_addr is 'my host'", "not a host"]),
        (FILE.replace("node7", "0.0.0.0"), ["coordinator_addr is '0.0.0.0'", "every address"]),
        (FILE.replace("node7", "'[::]'"), ["coordinator_addr is '[::]'"]),
        (FILE.replace("29500", "99999"), [":99999'; give a port"]),
        ("world_size: [", ["team.yaml:1:", "broken YAML"]),
    ],
)
def test_a_bad_value_of_a_file_is_named(tmp_path, text, named):
    with pytest.raises(ConfigError) as caught:
        in_file(tmp_path, text)
    for words in ["team.yaml", *named]:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        ("local_rank: 3\nlocal_world_size: 2", {}, "local_rank is 3 and local_world_size is 2"),
        ("local_world_size: 5", {}, "local_world_size is 5"),
        ("", {"world_size": "2"}, "world_size is '2'; give a whole number"),
    ],
)
def test_local_numbers_of_a_file_that_fit_no_host(tmp_path, text, changes, words):
    with pytest.raises(ConfigError, match=words):
        in_file(tmp_path, f"world_size: 2\nrank: 1\ncoordinator_addr: node7\n{text}", **changes)


def test_more_ranks_on_a_host_than_in_the_team():
    with pytest.raises(ConfigError, match="local_world_size is 7"):
        DistributedTrainConfig(2, local_world_size=7)


def test_a_rank_of_one_host_by_number():
    config = DistributedTrainConfig.of_rank(2, 4, backend="cpu")
    assert (config.local_rank, config.local_world_size, config.role) == (2, 4, "worker")
    assert config.backend is DistributedBackend.CPU
    with pytest.raises(ConfigError, match="rank is 4 and world_size is 4"):
        DistributedTrainConfig.of_rank(4, 4)


@pytest.mark.parametrize("value", [1.0, "1", True, None])
def test_numbers_are_whole_numbers(value):
    with pytest.raises(ConfigError, match=r"local_rank is .*; give a whole number"):
        DistributedTrainConfig(local_rank=value)
