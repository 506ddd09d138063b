"""Kubernetes on this machine: manifests are checked by schemas, and containers run as processes.

``kubernetes_schemas.json`` was derived from the OpenAPI schemas of Kubernetes 1.37 (Copyright The
Kubernetes Authors), JobSet 0.12 (Copyright The Kubernetes Authors) and Kubeflow Trainer 2.3
(Copyright The Kubeflow Authors), all under the Apache License 2.0, which LICENSE contains. Changed:
descriptions, patterns, statuses and vendors' volumes are left out, and definitions are shared.
"""

import json
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from helpers.launched import Running, Sandbox

_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}
_KUSTOMIZATION = {"apiVersion", "kind", "resources", "nameSuffix", "patches"}
#: Resolves names as a cluster does: from a file, which is read each time.
_RESOLVER = """
import json, socket
def resolve(host, *args, ask=socket.getaddrinfo, **kwargs):
    if isinstance(host, str) and host.startswith("evener"):
        with open({zone!r}) as file:
            host = json.load(file).get(host, host + ".invalid")
    if str(host).endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return ask(host, *args, **kwargs)
socket.getaddrinfo = resolve
"""


# ── manifests ────────────────────────────────────────────────────────────────────────────────────


@cache
def _schemas() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())


def problems(document: Mapping[str, Any]) -> list[str]:
    """What a server with strict validation refuses of a manifest; nothing if it is valid."""
    kind = document.get("kind")
    if kind not in _schemas():
        return [f"kind {kind!r} is unknown"]
    return list(_problems(document, _schemas()[kind], str(kind)))


def _problems(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = _schemas()[schema["$ref"]]
    kinds = schema.get("type", "object")
    allowed = [kinds] if isinstance(kinds, str) else kinds
    is_right = any(
        isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
        for kind in allowed
    )
    if not is_right:
        yield f"{place}: {value!r} is not of type {kinds}"
    elif value not in schema.get("enum", [value]):
        yield f"{place}: {value!r} is none of {schema['enum']}"
    elif isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (
            f"{place}.{key}: missing" for key in schema.get("required", ()) if key not in value
        )
        for key, inner in value.items():
            if key not in known and other is None:
                yield f"{place}.{key}: unknown"
            else:
                yield from _problems(inner, known.get(key, other), f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _problems(inner, schema["items"], f"{place}[{number}]")


def read(path: Path) -> list[dict[str, Any]]:
    """The documents of a file."""
    return list(yaml.safe_load_all(path.read_text()))


def build(folder: Path) -> list[dict[str, Any]]:
    """What ``kubectl kustomize`` makes of a folder, as far as the examples use it."""
    (kustomization,) = read(folder / "kustomization.yaml")
    assert set(kustomization) <= _KUSTOMIZATION, kustomization
    documents: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        resource = folder / name
        documents += build(resource) if resource.is_dir() else read(resource)
    for document in documents:
        document["metadata"]["name"] += kustomization.get("nameSuffix", "")
    for patch in kustomization.get("patches", ()):
        targets = [d for d in documents if d["kind"] == patch["target"]["kind"]]
        assert targets, f"{folder}: nothing is patched"
        for target in targets:
            for change in yaml.safe_load(patch["patch"]):
                _change(target, **change)
    return documents


def _change(document: Any, op: str, path: str, value: Any) -> None:
    *outer, last = [key.replace("~1", "/") for key in path.split("/")[1:]]
    for key in outer:
        document = document[int(key) if isinstance(document, list) else key]
    assert (op, last in document) in (("replace", True), ("add", False)), path
    document[last] = value


# ── pods ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Pod:
    """A pod whose container runs as a process.

    Attributes:
        spec: Of the pod.
        address: Its own.
        claims: Folder of each volume claim, by name.
        files: Its folder: mounts are below it.
    """

    spec: Mapping[str, Any]
    address: str
    claims: Mapping[str, Path]
    files: Path

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.spec["containers"]
        return container

    @property
    def grace_s(self) -> float:
        return self.spec["terminationGracePeriodSeconds"]

    def start(self, sandbox: Sandbox, token: str, program: Path | None = None) -> Running:
        """Starts the container, with the manifest's command, environment and files.

        Args:
            sandbox: Where.
            token: Content of the Secret.
            program: In place of the last word of the command.
        """
        environ = dict(self._environment())
        command = [
            re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], word)
            for word in self.container["command"]
        ]
        places = {mount["mountPath"]: self._mount(mount["name"], token) for mount in self._mounts()}

        def inside(text: str) -> str:
            for path, folder in places.items():
                text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=/|$)", str(folder), text)
            return text

        assert command[0] == "evener"
        return sandbox.evener(
            *map(inside, command[1:] if program is None else command[1:-1]),
            *([] if program is None else [program]),
            env=sandbox.environ | {name: inside(value) for name, value in environ.items()},
            cwd=inside(self.container.get("workingDir", str(sandbox.folder))),
        )

    def is_ready(self) -> bool:
        """What the readiness probe finds."""
        port = self.container["readinessProbe"]["tcpSocket"]["port"]
        (number,) = [p["containerPort"] for p in self.container["ports"] if p["name"] == port]
        with suppress(OSError):
            socket.create_connection((self.address, number), 1).close()
            return True
        return False

    def _environment(self) -> Iterator[tuple[str, str]]:
        for variable in self.container.get("env", ()):
            value = variable.get("value")
            if value is None:
                assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
                value = self.address
            yield variable["name"], value

    def _mounts(self) -> list[Mapping[str, Any]]:
        return self.container.get("volumeMounts", [])

    def _mount(self, name: str, token: str) -> Path:
        (volume,) = [v for v in self.spec.get("volumes", ()) if v["name"] == name] or [{}]
        if "secret" in volume:
            return self._secret(volume["secret"]["defaultMode"], token)
        if "emptyDir" in volume:
            folder = self.files / name
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        claim = volume.get("persistentVolumeClaim", {}).get("claimName", name)
        return self.claims[claim]

    def _secret(self, mode: int, token: str) -> Path:
        """As kubelet does: the file is a link into a folder that is replaced as a whole."""
        folder = self.files / "secret"
        if not folder.exists():
            (folder / "..1").mkdir(parents=True)
            (folder / "..1" / "token").write_text(token)
            (folder / "..1" / "token").chmod(mode)
            (folder / "..data").symlink_to("..1")
            (folder / "token").symlink_to("..data/token")
        return folder


class Zone:
    """Names of a cluster, which pods ask for.

    Args:
        sandbox: Where pods run.
        code: What each Python process there runs first.
    """

    def __init__(self, sandbox: Sandbox, code: str = "") -> None:
        self._path = sandbox.folder / "zone.json"
        self.set({})
        sandbox.install(_RESOLVER.format(zone=str(self._path)) + code)

    def set(self, names: Mapping[str, str]) -> None:
        """Replaces all names."""
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(names))
        new.replace(self._path)
