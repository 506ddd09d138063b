"""What pods of examples/kubernetes do, as processes with the manifests' commands and files."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.kubernetes import Pod, Zone, build, read
from helpers.launched import Running
from helpers.limits import wait_until
from helpers.lineage import check_exactly_once
from helpers.pretraining import NUM_SAMPLES, Lab, RunFolder
from helpers.source import ROOT

MANIFESTS = ROOT / "examples" / "kubernetes"
TOKEN = "0123456789abcdef" * 2
STOPPED = 128 + signal.SIGTERM
#: Of this process alone: pods listen on the ports that the manifests name.
NETWORK = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}"
#: Stays in the team until it is told to leave. It needs no torch: what pods do is the agent's.
WORKER = """\
from evener.team.child import notify_supervisor
notify_supervisor(place="joining")
notify_supervisor(place="joined")
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
    """Pods of one team, by name.

    Args:
        lab: Where they run; its folder is the claim ``evener-work``.
        specs: Of the pods.
        name: The name under which others find the first pod.
        code: What each Python process runs first.
    """

    def __init__(self, lab: Lab, specs: dict[str, Any], name: str, code: str = "") -> None:
        self.lab, self._name, self._zone = lab, name, Zone(lab.sandbox, code)
        claims = {"ledger": lab.folder / "ledger", "evener-work": lab.folder}
        claims["ledger"].mkdir()
        self.pods = {
            pod: Pod(spec, f"{NETWORK}.{number}", claims, lab.folder / pod)
            for number, (pod, spec) in enumerate(specs.items(), 1)
        }

    def start(self, pod: str, program: Path | None = None) -> Running:
        return self.pods[pod].start(self.lab.sandbox, TOKEN, program)

    def publish(self) -> None:
        """Makes the name of the first pod known."""
        self._zone.set({self._name: next(iter(self.pods.values())).address})

    def start_coordinator(self) -> Running:
        """Starts it, and makes its name known when it is ready."""
        running = self.start("coordinator")
        wait_until(self.pods["coordinator"].is_ready)
        self.publish()
        return running

    def start_and_wait(self, pod: str, run: RunFolder) -> Running:
        """Starts a worker, and waits until it has joined the run."""
        before = len(run.of_type("worker_joined"))
        running = self.start(pod)
        wait_until(lambda: len(run.of_type("worker_joined")) > before)
        return running


def team_of(manifest: str) -> tuple[dict[str, Any], str]:
    """The pods of a coordinator and two workers, and the coordinator's name."""
    if manifest == "jobset":
        (jobset,) = read(MANIFESTS / "jobset.yaml")
        jobs = {job["name"]: job["template"] for job in jobset["spec"]["replicatedJobs"]}
        coordinator, workers = jobs["coordinator"], jobs["workers"]
        host = f"{jobset['metadata']['name']}-coordinator-0-0"
        name = f"{host}.{jobset['spec']['network']['subdomain']}"
    else:
        kinds = {document["kind"]: document for document in build(MANIFESTS)}
        coordinator, workers = kinds["StatefulSet"], kinds["Job"]
        name = kinds["Service"]["metadata"]["name"]
    owners = {"coordinator": coordinator, "pod-0": workers, "pod-1": workers}
    return {pod: owner["spec"]["template"]["spec"] for pod, owner in owners.items()}, name


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    lab.configure(epochs=9999, checkpoint={"every": 20, "keep_last": 2}, eval={"every": 20})
    yield lab
    lab.close()


def has_trained(run: RunFolder) -> bool:
    return (run.path / "events.jsonl").exists() and bool(run.of_type("window"))


@pytest.mark.parametrize("manifest", ["kustomization", "jobset"])
def test_pods_wait_for_a_name_and_are_stopped_killed_and_restarted(lab: Lab, manifest: str) -> None:
    cluster = Cluster(lab, *team_of(manifest), SMALL_STANDBY)
    sandbox = lab.sandbox
    worker = sandbox.script(WORKER)
    first, second = cluster.start("pod-0", worker), cluster.start("pod-1", worker)
    decides = cluster.start_coordinator()  # so its name became known after workers had started
    assert [line.split()[1] for line in sandbox.mailbox.read(2)] == ["joined"] * 2

    second.signal(signal.SIGTERM)  # as where a node is drained
    assert sandbox.mailbox.read(1)[0].endswith("leaves")
    assert second.end(cluster.pods["pod-1"].grace_s).code == STOPPED
    second = cluster.start("pod-1", worker)
    assert sandbox.mailbox.read(1)[0].endswith("joined")

    second.signal(signal.SIGKILL)
    assert second.end().code == -signal.SIGKILL
    second = cluster.start("pod-1", worker)
    assert sandbox.mailbox.read(1)[0].endswith("joined")

    decides.signal(signal.SIGKILL)
    decides.end()
    decides = cluster.start_coordinator()
    for pod in (first, second):
        pod.signal(signal.SIGTERM)
    assert {pod.end().code for pod in (first, second)} == {STOPPED}
    decides.signal(signal.SIGTERM)
    assert decides.end(cluster.pods["coordinator"].grace_s).code == 0


@pytest.mark.long
def test_a_team_of_pods_trains(lab: Lab) -> None:
    """Each change costs a window at most, and a team that was stopped as a whole resumes."""
    cluster, run = Cluster(lab, *team_of("kustomization")), lab.path_of()
    first, decides = cluster.start("pod-0"), cluster.start_coordinator()
    wait_until(lambda: has_trained(run))
    second = cluster.start_and_wait("pod-1", run)
    second.signal(signal.SIGTERM)
    assert second.end().code == STOPPED
    assert run.of_type("worker_lost") == []
    second = cluster.start_and_wait("pod-1", run)
    decides.signal(signal.SIGKILL)
    decides.end()
    cluster.start_coordinator()
    second.signal(signal.SIGKILL)
    second.end()
    wait_until(lambda: len(run.of_type("worker_lost")) == 1)
    second = cluster.start_and_wait("pod-1", run)
    for pod in (first, second):  # as where the Job is suspended
        pod.signal(signal.SIGTERM)
    assert {pod.end().code for pod in (first, second)} == {STOPPED}
    last = run.events[-1]
    assert (last["type"], last["reason"]) == ("run_finished", "stopped")
    assert run.checkpoints[-1].name == f"step-{last['window']}"
    first = cluster.start("pod-0")
    wait_until(lambda: run.events[-1]["type"] == "window")
    first.signal(signal.SIGTERM)
    assert first.end().code == STOPPED
    assert [event["window"] for event in run.of_type("run_resumed")][-1] == last["window"]
    assert check_exactly_once(run.events, NUM_SAMPLES) == []


def train_job_pod(node: int) -> dict[str, Any]:
    """A pod as the runtime makes it: it merges the patch, and adds its variables."""
    (job,) = read(MANIFESTS / "trainjob.yaml")
    trainer = job["spec"]["trainer"]
    (patch,) = job["spec"]["runtimePatches"]
    (part,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = part["template"]["spec"]["template"]["spec"]
    variables = {
        "PET_NNODES": trainer["numNodes"],
        "PET_NPROC_PER_NODE": trainer["numProcPerNode"],
        "PET_NODE_RANK": node,
        "PET_MASTER_ADDR": "evener-node-0-0.evener",
        "PET_MASTER_PORT": 29500,
    }
    env = [{"name": name, "value": str(value)} for name, value in variables.items()]
    command = {"command": trainer["command"], "env": [*trainer["env"], *env]}
    return {**pod, "containers": [{**pod["containers"][0], **command}]}


@pytest.mark.long
def test_a_train_job_survives_the_loss_of_a_node(lab: Lab) -> None:
    specs = {f"node-{node}": train_job_pod(node) for node in range(2)}
    cluster, run = Cluster(lab, specs, "evener-node-0-0.evener"), lab.path_of()
    second = cluster.start("node-1")
    cluster.publish()
    first = cluster.start("node-0")
    wait_until(lambda: has_trained(run) and len(run.of_type("window")[-1]["ranks"]) == 2)
    second.signal(signal.SIGKILL)
    second.end()
    wait_until(lambda: run.of_type("worker_lost"))
    second = cluster.start_and_wait("node-1", run)
    first.signal(signal.SIGTERM)  # node 0 stops the team, which saves
    assert first.end().code == STOPPED
    second.end()
    assert run.checkpoints[-1].name == f"step-{run.events[-1]['window']}"
    assert check_exactly_once(run.events, NUM_SAMPLES) == []
