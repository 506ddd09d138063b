"""Names inside a checkpoint folder, and the manifest that says whether it is whole."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import CheckpointError
from evener.files import open_for_reading
from evener.parsing import Fields, parse_json, short

FORMAT = "evener-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
TENSORS_SUFFIX = ".safetensors"

_STEP_NAME = re.compile(r"step-(0|[1-9][0-9]*)")
_UNFINISHED_NAME = re.compile(r"step-(?:0|[1-9][0-9]*)\.tmp-[0-9]+-[0-9a-f]{8}")
_REPLACED_NAME = re.compile(r"step-(0|[1-9][0-9]*)\.replaced-[0-9]+-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Return the folder name of a step, such as ``step-120``."""
    return f"step-{step}"


def parse_step_name(name: str) -> int | None:
    """Return the step of a finished checkpoint's folder name, else ``None``."""
    match = _STEP_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def is_unfinished_name(name: str) -> bool:
    """Return whether a name is that of a folder which a writer was still filling."""
    return _UNFINISHED_NAME.fullmatch(name) is not None


def parse_replaced_name(name: str) -> int | None:
    """Return the step of a checkpoint that was moved aside for a newer one of the same step."""
    match = _REPLACED_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


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


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits; releases the interpreter lock.

    Raises:
        OSError: It cannot be read, is a link, or is not a regular file.
    """
    with open_for_reading(path, follow=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            return _from_fields(Fields(content))
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST_NAME} is damaged: {error}") from error


def _from_fields(content: Fields) -> Manifest:
    files = {}
    records = content.fields("files")
    for name in records.values:
        check_file_name(name)
        record = records.fields(name)
        files[name] = FileRecord(record.whole("bytes"), record.text("sha256"))
    aliases = {}
    tables = content.fields("aliases")
    for stem in tables.values:
        table = tables.fields(stem)
        aliases[stem] = {alias: table.text(alias) for alias in table.values}
    return Manifest(content.whole("step"), files, aliases)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
