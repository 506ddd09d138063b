"""A fixed team whose machines have launchers of their own: who meets, who is told what.

Without root all of them are on this host, in folders of their own.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from helpers.launched import Running, Sandbox
from helpers.lineage import check_exactly_once
from helpers.machines import ADDRESSES, Machines
from helpers.ports import connect_soon, free_port
from helpers.pretraining import LAYER, NUM_SAMPLES, Lab, relative_difference, wait_for_events

EVENER = (sys.executable, "-P", "-m", "evener")
#: Hard limit for a run: three ranks load their libraries on what may be two busy cores.
WAIT_S = 200.0


@pytest.fixture
def sandboxes(tmp_path: Path) -> Iterator[list[Sandbox]]:
    """One for each machine, with the token that both know."""
    with ExitStack() as stack:
        made = []
        for number in range(2):
            (folder := tmp_path / f"machine-{number}").mkdir()
            made.append(Sandbox(folder))
            token_file = made[-1].token_file("a token that both machines know")
            made[-1].environ["EVENER_TOKEN_FILE"] = str(token_file)
            stack.callback(made[-1].close)
        yield made


def words_of(node: int, address: str, *script: object) -> list[object]:
    nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", address, "--nproc", 1)
    return ["launch", *nodes, *script]


def launch(sandboxes: list[Sandbox], address: str, body: str) -> list[Running]:
    return [
        sandbox.evener(*words_of(node, address, sandbox.script(body)))
        for node, sandbox in enumerate(sandboxes)
    ]


def test_a_script_has_its_place_on_each_machine(sandboxes: list[Sandbox]) -> None:
    port = free_port()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    running = []
    for node, (sandbox, nproc) in enumerate(zip(sandboxes, (2, 1), strict=True)):
        script = sandbox.script(f"print(*[os.environ[name] for name in {names}])\n")
        nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", f"localhost:{port}")
        running.append(sandbox.evener("launch", "--nproc", nproc, *nodes, script))
    first, second = [each.end() for each in running]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    # Machines still meet at the port that was given, so the store of the ranks has another.
    own = first.out.splitlines()[0].partition("127.0.0.1 ")[2]
    assert own.isdecimal()
    assert own != str(port)
    rest = f"127.0.0.1 {own}"
    assert sorted(first.out.splitlines()) == [f"0 0 3 2 {rest}", f"[rank 1] 1 1 3 2 {rest}"]
    assert second.out.splitlines() == [f"2 0 3 1 {rest}"]


FROM_ANOTHER_VERSION = """
import sys
from evener import version
version.__version__ = "0.0.1"
from evener.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_strangers_and_late_comers_are_refused_and_the_run_continues(
    sandboxes: list[Sandbox],
) -> None:
    first, second = sandboxes
    port = free_port()
    body = "tell('in')\npass_gate()\nprint(RANK, os.environ['WORLD_SIZE'])\n"
    with ExitStack() as visitors:
        (host,) = launch([first], f"127.0.0.1:{port}", body)
        for junk in (b"", b"[" * 4000 + b"\n", b'{"a":' * 800 + b"\n", b"GET / HTTP/1.1\r\n\r\n"):
            visitors.enter_context(connect_soon(port)).sendall(junk)
        words = words_of(1, f"127.0.0.1:{port}", second.script(body))
        other = second.start(sys.executable, "-c", FROM_ANOTHER_VERSION, *words).end()
        assert other.code == 1
        assert "runs 0.0.1; install the same version" in other.err
        right = second.evener(*words)
        for node, sandbox in enumerate(sandboxes):
            assert sandbox.mailbox.read(1) == [f"{node} in"]
        late = second.evener(*words).end()
        assert (late.code, late.out) == (1, "")
        assert late.err.startswith("error: two machines were started with --node-rank 1")
        for sandbox in sandboxes:
            sandbox.open_gate(1)
        ends = [host.end(), right.end()]
    assert [(end.code, end.out) for end in ends] == [(0, "0 2\n"), (0, "1 2\n")], ends
    assert re.search("refused a launcher: .*; the run continues without it", ends[0].err)


@pytest.mark.parametrize("way", ["Ctrl-C", "failure", "power cut"])
def test_what_ends_one_machine_ends_the_other_at_once(sandboxes: list[Sandbox], way: str) -> None:
    body = (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\ntell('in')\n"
        "from evener.errors import PeerLostError\n"
        "pass_gate()\n"
        "raise ValueError('boom') if RANK else PeerLostError('rank 0 lost rank 1')\n"
    )
    running = launch(sandboxes, f"127.0.0.1:{free_port()}", body)
    for sandbox in sandboxes:
        sandbox.mailbox.read(1)
    if way == "Ctrl-C":
        running[1].press_ctrl_c()
    elif way == "failure":
        sandboxes[1].open_gate(1)
    else:
        running[1].process.kill()
        assert running[0].process.stderr is not None
        assert b"the connection to node 1 (127.0.0.1) broke" in running[0].process.stderr.readline()
        sandboxes[0].open_gate(1)  # rank 0 notices it later, in its next exchange
    first, second = [each.end() for each in running]
    assert first.code == (130 if way == "Ctrl-C" else 1)
    if way != "power cut":  # where rank 0 raises an error of its own
        assert "Traceback" not in first.err
    said = {
        "Ctrl-C": "SIGINT on another machine",
        "failure": "the run failed on another machine, which has rank 1",
        "power cut": "error: the connection to node 1 (127.0.0.1) ended at ",
    }
    assert said[way] in first.err
    assert ("Traceback" in second.err) == (way == "failure")


# ── network namespaces ───────────────────────────────────────────────────────────────────────────


#: Sums of 2 MB, ten windows; tells how ranks exchange.
SUMS = """
import torch
from evener import Ddp, DdpConfig
model = torch.nn.Linear(500, 1000, bias=False)
shares = [1] * {ranks}
config = DdpConfig(wire=os.environ["WIRE"], overlap="off", partition_ratios=shares, quiet=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
with Ddp.setup(model, optimizer, devices="cpu", config=config) as ddp:
    loader = ddp.loader(torch.ones(10 * 12, 500), batch_size=12)
    for x in loader.epoch(0):
        ddp.backward(model(x).square().mean())
        ddp.step()
    print(ddp.assembly.comm.backend, flush=True)
"""


def sent_by(sandboxes: list[Sandbox], sizes: tuple[int, int], wire: str) -> list[int]:
    """What each of two machines sends, with so many ranks on them."""
    with Machines() as machines:
        running = []
        for node, (sandbox, size) in enumerate(zip(sandboxes, sizes, strict=True)):
            sandbox.environ["WIRE"] = wire
            sandbox.environ["OMP_NUM_THREADS"] = "1"
            nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", ADDRESSES[0])
            script = sandbox.script(SUMS.replace("{ranks}", str(sum(sizes))))
            command = machines.command(node, *EVENER, "launch", "--nproc", size, *nodes, script)
            running.append(sandbox.start(*command))
        for ended in [each.end(WAIT_S) for each in running]:
            assert ended.code == 0, ended.err
            assert ("hosts" if sum(sizes) > 2 else "gloo") in ended.out
        return [machines.sent_bytes(node) for node in range(2)]


@pytest.mark.root
@pytest.mark.timeout(700)
def test_a_link_carries_as_much_with_several_ranks_on_each_machine(
    sandboxes: list[Sandbox],
) -> None:
    alone = sent_by(sandboxes, (1, 1), "float32")
    assert min(alone) > 10 * 2_000_000, "a sum of two sends the whole tensor once"
    for sizes in ((2, 1), (2, 2)):
        sent = sent_by(sandboxes, sizes, "float32")
        print(f"sent by two machines with {sizes} ranks: {sent}")
        for own, reference in zip(sent, alone, strict=True):
            assert own < 1.1 * reference, sizes
    rounded = sent_by(sandboxes, (2, 1), "bfloat16")
    print(f"sent by two machines: {alone} with a rank each; {rounded} in bfloat16")
    assert all(own < 0.65 * reference for own, reference in zip(rounded, alone, strict=True))


@pytest.fixture
def labs(sandboxes: list[Sandbox], tmp_path: Path) -> Iterator[list[Lab]]:
    """A folder for each machine: they share no files, but have the same text and configuration."""
    with ExitStack() as stack:
        made = []
        for number, sandbox in enumerate(sandboxes):
            (folder := tmp_path / f"lab-{number}").mkdir()
            lab = Lab(folder)
            stack.callback(lab.close)
            # 0.9 MB of gradients a window: a tenth of a second at 100 Mbit/s.
            larger = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
            lab.configure(model={"config": {**LAYER, **larger}}, checkpoint={"every": 9})
            lab.sandbox.environ["OMP_NUM_THREADS"] = "1"
            lab.sandbox.environ["EVENER_TOKEN_FILE"] = sandbox.environ["EVENER_TOKEN_FILE"]
            made.append(lab)
        yield made


def plainly(node: int, address: str, *further: object) -> tuple[object, ...]:
    """``evener pretrain`` on one of two machines."""
    nodes = ("--nnodes", 2, "--node-rank", node, "--master-addr", address, "--port", 29_500)
    return (*EVENER, "pretrain", "run.yaml", "--nproc", 2 - node, *nodes, *further)


def by_torchrun(node: int, address: str, *further: object) -> tuple[object, ...]:
    """The same where machines do not know one another's names, and torchrun numbers them."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:29500")
    own = ("--local-addr", ADDRESSES[node], "--rdzv-conf", f"is_host={1 - node}")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2 - node)
    evener = ("-m", "evener", "pretrain", "run.yaml")
    return (*torchrun, "--nnodes", 2, *rendezvous, *own, *evener, *further)


@pytest.mark.root
@pytest.mark.timeout(700)
@pytest.mark.parametrize("started", [plainly, by_torchrun])
def test_two_machines_over_a_slow_cable(labs: list[Lab], started: object) -> None:
    assert callable(started)
    with Machines(rate="100mbit") as machines:
        running = [
            lab.sandbox.start(*machines.command(node, *started(node, ADDRESSES[0])))
            for node, lab in enumerate(labs)
        ]
        for ended in [each.end(WAIT_S) for each in running]:
            assert ended.code == 0, ended.err
        sent = [machines.sent_bytes(node) for node in range(2)]
    (run,) = (lab.path_of() for lab in labs if lab.path_of().path.exists())  # one rank 0 writes
    labs[0].run("run.yaml", "--name", "alone")
    assert check_exactly_once(run.events, NUM_SAMPLES, whole_epochs=2) == []
    # float32 sums in another order, over 18 steps of AdamW
    alone = labs[0].path_of("alone")
    assert relative_difference(run.checkpoints[-1], alone.checkpoints[-1]) <= 1e-5
    hosts = {event["host"] for event in run.of_type("worker_started")}
    assert hosts == {"machine-0", "machine-1"}
    weights = load_file(run.checkpoints[-1] / "model.safetensors").values()
    assert max(sent) >= 4 * sum(array.size for array in weights), "weights come over the cable"


@pytest.mark.root
@pytest.mark.timeout(700)
def test_a_cable_that_is_cut_ends_the_run_on_both_machines(labs: list[Lab]) -> None:
    """Nothing closes a connection then: each side waits as long as it has been told to."""
    options = ("--set", "timeout_s=20", "--set", "epochs=10000")
    with Machines() as machines:
        running = [
            lab.sandbox.start(*machines.command(node, *plainly(node, ADDRESSES[0], *options)))
            for node, lab in enumerate(labs)
        ]
        run = labs[0].path_of()
        wait_for_events(run, lambda events: any(e["type"] == "window" for e in events))
        machines.run(0, "ip", "link", "set", "eth0", "down")
        ended = [each.end(WAIT_S) for each in running]
    for node, each in enumerate(ended):
        assert (each.code, "Traceback" in each.err) == (1, False)
        other = f"node {1 - node} ({ADDRESSES[1 - node]})"
        assert f"\nerror: the connection to {other} ended at " in each.err
