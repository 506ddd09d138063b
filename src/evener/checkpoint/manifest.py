"""Names inside a checkpoint folder, and the manifest with the hashes of its files."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evener.errors import CheckpointError
from evener.parsing import parse_json, short

FORMAT = "evener-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TENSORS_SUFFIX = ".safetensors"

_NAME = re.compile(r"step-(0|[1-9][0-9]*)(?:\.(tmp|replaced)-[0-9]+-[0-9a-f]{8})?")


def step_name(step: int) -> str:
    """Return the folder name of a step, such as ``step-120``."""
    return f"step-{step}"


def parse_name(name: str) -> tuple[int, str]:
    """Return step and kind of a checkpoint folder's name.

    The kind is empty for a finished checkpoint, ``tmp`` for one that was being written,
    ``replaced`` for one that was moved aside for a newer one of the same step, and ``other`` for
    any other name.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2] or "") if match else (0, "other")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of a checkpoint.

    Attributes:
        step: The step, equal to the one in the folder's name.
        files: SHA-256 of every file except the manifest, by name.
        aliases: For each stem of a tensor file: names that were left out because their tensor is
            tied to another one, and the name under which it is stored.
    """

    step: int
    files: Mapping[str, str]
    aliases: Mapping[str, Mapping[str, str]]

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, with a checksum over its own content."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["checksum"] = _checksum(content)
        return json.dumps(content, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read a manifest.

        Raises:
            CheckpointError: It is of something else, of an unknown version, or damaged.
            ValueError: It is not JSON.
        """
        content = parse_json(data)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{MANIFEST_NAME} is not of an evener checkpoint")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"format version {short(content.get('version'))} is unknown to this evener, "
                f"which reads version {VERSION}: use the evener that wrote it"
            )
        if content.pop("checksum", None) != _checksum(content):
            raise CheckpointError(f"{MANIFEST_NAME} is damaged: its checksum differs")
        return cls(content["step"], content["files"], content["aliases"])


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
