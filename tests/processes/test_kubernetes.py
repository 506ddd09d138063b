"""What pods of examples/kubernetes do, as processes with the manifests' commands and files."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.kubernetes import Pod, Zone, build, read
from helpers.launched import Running
from helpers.limits import wait_until
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab
from helpers.source import ROOT

MANIFESTS = ROOT / "examples" / "kubernetes"
TOKEN = "0123456789abcdef" * 2
#: Of this process alone: pods listen on the ports that the manifests name.
NETWORK = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"
#: Stays in the team until it is told to leave. It needs no torch: what pods do is the agent's.
WORKER = """\
from evener.team.child import tell as tell_launcher
tell_launcher(place="joining")
tell_launcher(place="joined")
try:
    tell("joined")
    wait_forever()
except KeyboardInterrupt:
    tell("leaves")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
"""
#: A standby loads no torch, either.
SMALL_STANDBY = """
from evener.team.agent import LIBRARIES
LIBRARIES["evener.team.script"] = ("json",)
"""


class Cluster:
    """A coordinator and two workers, as manifests describe them."""

    def __init__(
        self, folder: Path, coordinator: Any, workers: Any, name: str, code: str = ""
    ) -> None:
        self.lab = Lab(folder)
        self.zone = Zone(self.lab.sandbox, code)
        self._name = name
        claims = {"ledger": folder / "ledger", "evener-work": folder}
        claims["ledger"].mkdir()
        self._specs = {"coordinator": coordinator, "0": workers, "1": workers}
        self.pods = {
            pod: Pod(spec, f"{NETWORK}.{1 + index}", claims, folder / f"pod-{pod}")
            for index, (pod, spec) in enumerate(self._specs.items())
        }

    def start(self, pod: str, program: Path | None = None) -> Running:
        return self.pods[pod].start(self.lab.sandbox, TOKEN, program)

    def start_coordinator(self) -> Running:
        """Starts it, and gives its name to the others when it is ready."""
        running = self.start("coordinator")
        wait_until(self.pods["coordinator"].is_ready)
        self.zone.set({self._name: self.pods["coordinator"].address})
        return running


def pod_of(document: Mapping[str, Any]) -> Any:
    return document["spec"]["template"]["spec"]


def cluster_of(manifest: str, folder: Path, code: str = "") -> Cluster:
    if manifest == "jobset":
        (jobset,) = read(MANIFESTS / "jobset.yaml")
        jobs = {job["name"]: pod_of(job["template"]) for job in jobset["spec"]["replicatedJobs"]}
        subdomain = jobset["spec"]["network"]["subdomain"]
        name = f"{jobset['metadata']['name']}-coordinator-0-0.{subdomain}"
        return Cluster(folder, jobs["coordinator"], jobs["workers"], name, code)
    kinds = {document["kind"]: document for document in build(MANIFESTS)}
    name = kinds["Service"]["metadata"]["name"]
    return Cluster(folder, pod_of(kinds["StatefulSet"]), pod_of(kinds["Job"]), name, code)


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(manifest: str, code: str = "") -> Cluster:
        made.append(cluster_of(manifest, tmp_path, code))
        return made[-1]

    yield make
    for cluster in made:
        cluster.lab.close()


@pytest.mark.parametrize("manifest", ["kustomization", "jobset"])
def test_pods_wait_for_a_name_and_are_stopped_killed_and_restarted(
    clusters: Callable[..., Cluster], manifest: str
) -> None:
    cluster = clusters(manifest, SMALL_STANDBY)
    sandbox = cluster.lab.sandbox
    worker = sandbox.script(WORKER)
    first, second = cluster.start("0", worker), cluster.start("1", worker)
    decides = cluster.start_coordinator()  # so the name became known later than workers started
    assert [line.split()[1] for line in sandbox.mailbox.read(2)] == ["joined"] * 2

    second.signal(signal.SIGTERM)  # as where a node is drained
    assert sandbox.mailbox.read(1)[0].endswith("leaves")
    ended = second.end(cluster.pods["1"].grace_s)
    assert ended.code == 128 + signal.SIGTERM, ended.err
    second = cluster.start("1", worker)
    assert sandbox.mailbox.read(1)[0].endswith("joined")

    second.signal(signal.SIGKILL)
    assert second.end().code == -signal.SIGKILL
    second = cluster.start("1", worker)
    assert sandbox.mailbox.read(1)[0].endswith("joined")

    decides.signal(signal.SIGKILL)
    decides.end()
    decides = cluster.start_coordinator()
    for pod in (first, second):
        pod.signal(signal.SIGTERM)
    assert [line.split()[1] for line in sandbox.mailbox.read(2)] == ["leaves"] * 2
    assert {pod.end().code for pod in (first, second)} == {128 + signal.SIGTERM}
    decides.signal(signal.SIGTERM)
    assert decides.end(cluster.pods["coordinator"].grace_s).code in (0, 128 + signal.SIGTERM)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_team_of_pods_trains(clusters: Callable[..., Cluster]) -> None:
    """Each change costs a window at most, and a team that was stopped as a whole resumes."""
    cluster = clusters("kustomization")
    lab = cluster.lab
    lab.configure(epochs=9999, checkpoint={"every": 20, "keep_last": 2}, eval={"every": 20})
    run = lab.path_of()

    def rejoin() -> Running:
        before = len(run.of_type("worker_joined"))
        running = cluster.start("1")
        wait_until(lambda: len(run.of_type("worker_joined")) > before)
        return running

    first = cluster.start("0")
    decides = cluster.start_coordinator()
    wait_until(lambda: (run.path / "events.jsonl").exists() and run.of_type("window"))
    second = rejoin()
    second.signal(signal.SIGTERM)
    assert second.end().code == 128 + signal.SIGTERM
    assert run.of_type("worker_lost") == []
    second = rejoin()
    decides.signal(signal.SIGKILL)
    decides.end()
    decides = cluster.start_coordinator()
    second.signal(signal.SIGKILL)
    second.end()
    wait_until(lambda: len(run.of_type("worker_lost")) == 1)
    second = rejoin()
    for pod in (first, second):  # as where the Job is suspended
        pod.signal(signal.SIGTERM)
    assert {pod.end().code for pod in (first, second)} == {128 + signal.SIGTERM}
    last = run.events[-1]
    assert (last["type"], last["reason"]) == ("run_finished", "stopped")
    assert run.checkpoints[-1].name == f"step-{last['window']}"
    first = cluster.start("0")
    wait_until(lambda: run.events[-1]["type"] == "window")
    first.signal(signal.SIGTERM)
    first.end()
    assert [event["window"] for event in run.of_type("run_resumed")] == [last["window"]]
    assert check_exactly_once(run.events, NUM_SAMPLES) == []


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_train_job_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    (train_job,) = read(MANIFESTS / "trainjob.yaml")
    trainer = train_job["spec"]["trainer"]
    (patch,) = train_job["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    lab = Lab(tmp_path)
    lab.configure(epochs=9999, timeout_s=60)
    run, zone = lab.path_of(), Zone(lab.sandbox)

    def start(node: int) -> Running:
        # As the runtime merges both, and adds its variables.
        variables = {
            "PET_NNODES": trainer["numNodes"],
            "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
            "PET_NODE_RANK": node,
            "PET_MASTER_ADDR": "evener-node-0-0.evener",
            "PET_MASTER_PORT": 29500,
        }
        env = [{"name": name, "value": str(value)} for name, value in variables.items()]
        merged = {
            **container,
            "command": trainer["command"],
            "env": [*trainer["env"], *env],
            "workingDir": "/team",
        }
        spec = {**pod, "containers": [merged]}
        claims = {"evener-work": tmp_path}
        address = f"{NETWORK}.{10 + node}"
        return Pod(spec, address, claims, tmp_path / f"node-{node}").start(lab.sandbox, TOKEN)

    try:
        second = start(1)
        zone.set({"evener-node-0-0.evener": f"{NETWORK}.10"})
        first = start(0)
        wait_until(lambda: (run.path / "events.jsonl").exists() and run.of_type("window"))
        wait_until(lambda: run.of_type("window")[-1]["generation"] and has_two(run))
        second.signal(signal.SIGKILL)
        second.end()
        wait_until(lambda: run.of_type("worker_lost"))
        before = len(run.of_type("worker_joined"))
        second = start(1)
        wait_until(lambda: len(run.of_type("worker_joined")) > before)
        first.signal(signal.SIGTERM)  # node 0 stops the team, which saves
        assert first.end().code == 128 + signal.SIGTERM
        second.end()
        assert run.checkpoints[-1].name == f"step-{run.events[-1]['window']}"
        assert check_exactly_once(run.events, NUM_SAMPLES) == []
    finally:
        lab.close()


def has_two(run: Any) -> bool:
    return len(run.of_type("window")[-1]["ranks"]) == 2
