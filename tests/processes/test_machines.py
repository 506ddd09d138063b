"""One run on several machines, each with a launcher of its own."""

import os
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from helpers.lineage import check_exactly_once
from helpers.machines import ADDRESSES, NOBODY, Machines
from helpers.ports import free_port
from helpers.pretraining import (
    LAYER,
    NUM_SAMPLES,
    Lab,
    relative_difference,
    wait_for_events,
)

pytestmark = pytest.mark.timeout(700)

#: 0.9 MB of gradients a window: a tenth of a second at 100 Mbit/s.
LARGER = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
#: Hard limit for a run: three ranks load their libraries on what may be two busy cores.
WAIT_S = 200.0
#: Ranks of the two machines.
COUNTS = (2, 1)

TELL_HASH = """
import os
if "RANK" in os.environ:
    from evener.loop.assembly import Assembly
    from pathlib import Path
    def close(assembly, close=Assembly.close):
        folder = Path(os.environ["TEST_HASHES"])
        weights = [p.tolist() for p in assembly.flat.parameters]
        (folder / os.environ["RANK"]).write_text(str(weights))
        close(assembly)
    Assembly.close = close
"""


@pytest.fixture
def labs(tmp_path):
    """A folder for each machine: they share no files, but have the same text and configuration."""
    labs = []
    for number in range(2):
        folder = tmp_path / f"machine-{number}"
        folder.mkdir()
        lab = Lab(folder)
        lab.configure(
            model={"config": {**LAYER, **LARGER}}, timeout_s=100.0, checkpoint={"every": 9}
        )
        lab.sandbox.environ["OMP_NUM_THREADS"] = "1"
        lab.sandbox.environ["EVENER_TOKEN_FILE"] = str(
            lab.sandbox.token_file("a token that both machines know")
        )
        labs.append(lab)
    yield labs
    for lab in labs:
        lab.close()


@pytest.fixture
def hashes(labs, tmp_path):
    """The folder in which every rank leaves a hash of its weights behind."""
    folder = tmp_path / "hashes"
    folder.mkdir()
    for lab in labs:
        lab.install(TELL_HASH)
        lab.sandbox.environ["TEST_HASHES"] = str(folder)
    return folder


def check(labs, name, hashes):
    """The run equals that of one process on the same samples."""
    labs[0].run("run.yaml", "--name", "alone")
    run, alone = labs[0].path_of(name), labs[0].path_of("alone")
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    assert run.summary["world_size"] == sum(COUNTS)
    # float32 sums in another order, over 18 steps of AdamW
    assert relative_difference(run.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
    told = {path.name: path.read_text() for path in hashes.iterdir()}
    assert sorted(told) == ["0", "1", "2"]
    assert len(set(told.values())) == 1


def plainly(node, address, port, *further):
    """``evener pretrain`` on one of two machines."""
    nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", address, "--port", port)
    evener = (sys.executable, "-P", "-m", "evener", "pretrain")
    return (*evener, "run.yaml", "--nproc", COUNTS[node], *nodes, *further)


def by_torchrun(node, address, port, *further):
    """The same by torchrun."""
    nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", address, "--master-port", port)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", COUNTS[node])
    return (*torchrun, *nodes, "-m", "evener", "pretrain", "run.yaml", *further)


def by_torchrun_without_names(node, address, port, *further):
    """The same where machines do not know one another's names, and torchrun numbers them."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", COUNTS[node])
    own = ("--local-addr", ADDRESSES[node], "--rdzv-conf", f"is_host={1 - node}")
    evener = ("-m", "evener", "pretrain", "run.yaml")
    return (*torchrun, "--nnodes", 2, *rendezvous, *own, *evener, *further)


# ── launchers on one host, in folders of their own ───────────────────────────────────────────────


def test_launchers_of_unlike_sizes_are_one_team(labs, hashes):
    port = free_port()
    # The second comes first, and waits.
    running = [
        labs[node].sandbox.start(*plainly(node, "127.0.0.1", port, "--name", "both"))
        for node in (1, 0)
    ]
    for ended in [each.end(WAIT_S) for each in running]:
        assert ended.code == 0, ended.err
    check(labs, "both", hashes)
    # Rank 0 alone writes; the other machine has its own tokenised text.
    written = {path.name for path in (labs[1].folder / "runs").iterdir()}
    assert written == {".cache"}


def test_a_script_of_ones_own_has_its_place_on_each_machine(labs):
    port = free_port()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    running = []
    for node, lab in enumerate(labs):
        script = lab.sandbox.script(f"print(*[os.environ[name] for name in {names}])\n")
        nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", f"localhost:{port}")
        running.append(lab.sandbox.evener("launch", "--nproc", COUNTS[node], *nodes, script))
    first, second = [each.end() for each in running]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    # Machines still meet at the port that was given, so the store of the ranks has another.
    rest = first.out.splitlines()[0].partition("127.0.0.1 ")[2]
    assert rest.isdecimal()
    assert rest != str(port)
    rest = f"127.0.0.1 {rest}"
    assert sorted(first.out.splitlines()) == [f"0 0 3 2 {rest}", f"[rank 1] 1 1 3 2 {rest}"]
    assert second.out.splitlines() == [f"2 0 3 1 {rest}"]


def test_a_signal_on_one_machine_stops_all_of_them(labs):
    port = free_port()
    options = ("--name", "stopped", "--set", "epochs=10000", "--nproc", 1)
    second, first = [
        labs[node].sandbox.start(*plainly(node, "127.0.0.1", port, *options)) for node in (1, 0)
    ]
    run = labs[0].path_of("stopped")
    wait_for_events(first, run, lambda events: any(e["type"] == "window" for e in events))
    second.signal(signal.SIGTERM)
    for each in (first, second):
        assert each.end(WAIT_S).code == 128 + signal.SIGTERM
    assert run.checkpoints
    assert run.of_type("run_finished")[-1]["reason"] == "stopped"


# ── network namespaces, over 100 Mbit/s ──────────────────────────────────────────────────────────


@pytest.mark.root
@pytest.mark.parametrize("started", [plainly, by_torchrun])
def test_two_machines_over_a_slow_cable(labs, hashes, started):
    with Machines(rate="100mbit") as machines:
        running = [
            lab.sandbox.start(
                *machines.command(node, *started(node, ADDRESSES[0], 29_500, "--name", "two"))
            )
            for node, lab in enumerate(labs)
        ]
        for ended in [each.end(WAIT_S) for each in running]:
            assert ended.code == 0, ended.err
        sent = [machines.sent_bytes(node) for node in range(2)]
    check(labs, "two", hashes)
    run = labs[0].path_of("two")
    hosts = [event["host"] for event in run.of_type("worker_started")]
    assert hosts == ["machine-0", "machine-0", "machine-1"]
    # Weights come over the cable at the start. Then, whatever the algorithm, what one machine has
    # must reach the other in each window in which both work (a rank that is too slow is parked).
    weights = load_file(run.checkpoints[-1] / "model.safetensors").values()
    num_bytes = 4 * sum(array.size for array in weights)
    windows = run.of_type("window")
    both = sum(
        any(rank["rank"] == 2 and rank["samples"] for rank in window["ranks"])
        and any(rank["rank"] < 2 and rank["samples"] for rank in window["ranks"])
        for window in windows
    )
    assert sent[0] >= num_bytes * (1 + both)
    assert sent[1] >= num_bytes * both


@pytest.mark.root
def test_torchrun_numbers_machines_that_do_not_know_names(labs, hashes):
    with Machines() as machines:
        running = [
            lab.sandbox.start(
                *machines.command(node, *by_torchrun_without_names(node, ADDRESSES[0], 29_500))
            )
            for node, lab in enumerate(labs)
        ]
        for ended in [each.end(WAIT_S) for each in running]:
            assert ended.code == 0, ended.err
    told = {path.name: path.read_text() for path in hashes.iterdir()}
    assert sorted(told) == ["0", "1", "2"]
    assert len(set(told.values())) == 1


@pytest.mark.root
def test_ranks_of_a_process_group_need_not_know_names(labs):
    program = """
        import torch
        import torch.distributed as dist
        from evener import Ddp

        dist.init_process_group("gloo")
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Ddp.setup(model, optimizer, devices="cpu", quiet=True) as ddp:
            print(ddp.rank, ddp.world_size, ddp.weighted_mean(ddp.rank))
        dist.destroy_process_group()
    """
    with Machines() as machines:
        running = []
        for node, lab in enumerate(labs):
            lab.sandbox.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", ADDRESSES[0])
            launch = (sys.executable, "-m", "evener", "launch", "--nproc", 1, *nodes)
            script = lab.sandbox.script(textwrap.dedent(program))
            running.append(lab.sandbox.start(*machines.command(node, *launch, script)))
        first, second = [each.end(WAIT_S) for each in running]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.out, second.out) == ("0 2 0.5\n", "1 2 0.5\n")


@pytest.mark.root
@pytest.mark.parametrize(
    ("node", "address", "said"),
    [
        (1, NOBODY, f"waited 4 s for the coordinator at {NOBODY}:29500"),
        (0, ADDRESSES[1], f"node 0 does not reach its own coordinator at {ADDRESSES[1]}:29500"),
        (0, NOBODY, f"node 0 does not reach its own coordinator at {NOBODY}:29500"),
        (0, ADDRESSES[0], f"node 0 waited 4 s at {ADDRESSES[0]}:29500 for node 1 of 2"),
    ],
)
def test_a_bad_address_is_said_in_time(labs, node, address, said):
    lab = labs[node]
    with Machines() as machines:
        command = plainly(node, address, 29_500, "--set", "timeout_s=4")
        ended = lab.sandbox.start(*machines.command(node, *command)).end()
    assert (ended.code, ended.out) == (1, "")
    assert said in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.root
def test_a_cable_that_is_cut_ends_the_run_on_both_machines(labs):
    """Nothing closes a connection then: each side waits as long as it has been told to."""
    options = ("--set", "timeout_s=20", "--set", "epochs=10000", "--nproc", 1)
    with Machines() as machines:
        running = [
            lab.sandbox.start(
                *machines.command(node, *plainly(node, ADDRESSES[0], 29_500, *options))
            )
            for node, lab in enumerate(labs)
        ]
        run = labs[0].path_of("run")
        wait_for_events(running[0], run, lambda e: any(w["type"] == "window" for w in e))
        machines.run(0, "ip", "link", "set", "eth0", "down")
        ended = [each.end(WAIT_S) for each in running]
    for rank, each in enumerate(ended):
        assert each.code == 1
        other = f"node {1 - rank} ({ADDRESSES[1 - rank]})"
        assert f"\nerror: the connection to {other} broke off at " in each.err
        assert "the link to that machine is cut, or the machine" in each.err
        assert "Traceback" not in each.err
        # Rank 1 cannot ask who is missing: the coordinator is on the other side.
        whom = ["rank 1", "the others .*the coordinator does not answer"][rank]
        gave_up = rf"rank {rank} waited \S+ s in .* for {whom}"
        assert re.search(rf"{gave_up}|rank {rank} lost a peer", each.err), each.err


@pytest.mark.root
def test_namespaces_leave_the_host_alone():
    def devices():
        return sorted(path.name for path in Path("/sys/class/net").iterdir())

    before, host = devices(), os.uname().nodename
    with Machines(rate="100mbit") as machines:
        assert devices() == before
        assert machines.run(0, "hostname") == "machine-0\n"
        assert "rate 100Mbit" in machines.run(1, "tc", "qdisc", "show", "dev", "eth0")
    assert (devices(), os.uname().nodename) == (before, host)
