"""Names inside a checkpoint folder, and the manifest that says whether it is whole."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.errors import CheckpointError
from evener.parsing import Fields, parse_json, short

FORMAT = "evener-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TENSORS_SUFFIX = ".safetensors"

_NAME = re.compile(r"step-(0|[1-9][0-9]*)(?:\.(tmp|replaced)-[0-9]+-[0-9a-f]{8})?")


def step_name(step: int) -> str:
    """Return the folder name of a step, such as ``step-120``."""
    return f"step-{step}"


def parse_name(name: str) -> tuple[int, str] | None:
    """Return step and kind of a checkpoint folder's name; ``None`` for any other name.

    The kind is empty for a finished checkpoint, ``tmp`` for one that a writer was still filling,
    and ``replaced`` for one that was moved aside for a newer one of the same step.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2] or "") if match else None


def check_file_name(name: str) -> None:
    """Refuse names that would leave the checkpoint's folder or hide its manifest.

    Raises:
        CheckpointError: The name has a separator, is empty, is ``.`` or ``..``, or is reserved.
    """
    if name in {"", ".", ".."} or not name.isprintable() or "/" in name or "\\" in name:
        raise CheckpointError(
            f"{name!r} is no name for a file of a checkpoint: use a plain file name, no folders"
        )
    if name == MANIFEST_NAME:
        raise CheckpointError(f"{name!r} is reserved for evener: give the file another name")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest knows of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """The table of contents of a checkpoint.

    Attributes:
        step: The step, equal to the one in the folder's name.
        files: Size and hash of every file except the manifest.
        aliases: For each stem of a tensor file: names that were left out because their tensor is
            tied to another one, and the name under which it is stored.
    """

    step: int
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, Mapping[str, str]]

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON, with a checksum over its own content."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "files": {
                name: {"bytes": record.num_bytes, "sha256": record.sha256}
                for name, record in self.files.items()
            },
            "aliases": {stem: dict(table) for stem, table in self.aliases.items()},
        }
        content["checksum"] = _checksum(content)
        return json.dumps(content, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read a manifest.

        Raises:
            CheckpointError: It is no JSON, is of something else, of an unknown version, or damaged.
        """
        try:
            content = parse_json(data)
        except ValueError as error:
            raise CheckpointError(
                f"{MANIFEST_NAME} is damaged: it is not JSON ({error})"
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{MANIFEST_NAME} is not of an evener checkpoint")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"format version {short(content.get('version'))} is unknown to this evener, "
                f"which reads version {VERSION}: use the evener that wrote it"
            )
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise CheckpointError(f"{MANIFEST_NAME} is damaged: its checksum differs")
        try:
            fields = Fields(content)
            records, tables = fields.fields("files"), fields.fields("aliases")
            files = {}
            for name in records.values:
                check_file_name(name)
                record = records.fields(name)
                files[name] = FileRecord(record.whole("bytes"), record.text("sha256"))
            aliases = {stem: tables.fields(stem) for stem in tables.values}
            names = {s: {alias: t.text(alias) for alias in t.values} for s, t in aliases.items()}
            return cls(fields.whole("step"), files, names)
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST_NAME} is damaged: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
