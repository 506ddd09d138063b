"""What pods of examples/kubernetes do, as processes with the manifests' commands and files."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.kubernetes import Pod, Zone, build, read
from helpers.launched import Running, Sandbox
from helpers.limits import wait_until
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
        sandbox: Where they run; its folder is the claim ``evener-work``.
        specs: Of the pods.
        name: The name under which others find the coordinator.
    """

    def __init__(self, sandbox: Sandbox, specs: dict[str, Any], name: str) -> None:
        self._sandbox, self._name, self._zone = sandbox, name, Zone(sandbox, SMALL_STANDBY)
        claims = {"ledger": sandbox.folder / "ledger", "evener-work": sandbox.folder}
        claims["ledger"].mkdir()
        self.pods = {
            pod: Pod(spec, f"{NETWORK}.{number}", claims, sandbox.folder / pod)
            for number, (pod, spec) in enumerate(specs.items(), 1)
        }

    def start(self, pod: str, program: Path | None = None) -> Running:
        return self.pods[pod].start(self._sandbox, TOKEN, program)

    def start_coordinator(self) -> Running:
        """Starts it, and makes its name known when it is ready."""
        running, pod = self.start("coordinator"), self.pods["coordinator"]
        wait_until(pod.is_ready)
        self._zone.set({self._name: pod.address})
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


@pytest.mark.parametrize("manifest", ["kustomization", "jobset"])
def test_pods_wait_for_a_name_and_are_stopped_killed_and_restarted(
    sandbox: Sandbox, manifest: str
) -> None:
    cluster = Cluster(sandbox, *team_of(manifest))
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
