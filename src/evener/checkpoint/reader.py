"""Checkpoints read back: only whole ones, and nothing is unpickled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from evener.checkpoint.codec import decode
from evener.checkpoint.manifest import MANIFEST_NAME, TENSORS_SUFFIX, Manifest, parse_name
from evener.errors import CheckpointError
from evener.files import hash_file, read_file
from evener.parsing import parse_json, short

MOST_MANIFEST_BYTES: Final = 16 * 1024 * 1024
"""A larger manifest is not read; that of 10,000 files has 2 MB."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files have been verified.

    Attributes:
        path: Its folder.
        step: The step it was taken at.
        manifest: Its table of contents.
    """

    path: Path
    step: int
    manifest: Manifest

    def tensors(self, stem: str) -> dict[str, torch.Tensor]:
        """Read a tensor file onto the CPU.

        Args:
            stem: The file's name without ``.safetensors``.

        Returns:
            The tensors by name. Names of tied tensors that were stored once refer to one object.

        Raises:
            CheckpointError: There is no such file, or it cannot be read.
        """
        path = self._existing(stem + TENSORS_SUFFIX)
        try:
            stored = load_file(path)
        # A dtype that this torch lacks is a KeyError or an AttributeError of safetensors.
        except (OSError, SafetensorError, ValueError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        for alias, kept in self.manifest.aliases.get(stem, {}).items():
            if kept not in stored:
                raise CheckpointError(
                    f"{path} lacks {short(kept)}, to which {MANIFEST_NAME} ties {short(alias)}"
                )
            stored[alias] = stored[kept]
        return stored

    def document(self, name: str) -> Any:
        """Read a JSON document; tuples, integer keys and infinite numbers come back as they were.

        Raises:
            CheckpointError: There is no such document, or it cannot be read.
        """
        try:
            return decode(parse_json(self.asset(name)))
        except ValueError as error:
            raise CheckpointError(f"{self.path / name} is not JSON: {error}") from error
        except CheckpointError as error:
            raise CheckpointError(f"{self.path / name} is damaged: {error}") from error

    def asset(self, name: str) -> bytes:
        """Read any file of the checkpoint as bytes.

        Raises:
            CheckpointError: There is no such file, or it cannot be read.
        """
        path = self._existing(name)
        try:
            return read_file(path, follow=False)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _existing(self, name: str) -> Path:
        if name not in self.manifest.files:
            has = ", ".join(sorted(self.manifest.files))
            raise CheckpointError(f"checkpoint {self.path} has no file {name!r}; it has {has}")
        return self.path / name


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify one checkpoint: its manifest, and the size and SHA-256 of each file.

    Raises:
        CheckpointError: It is missing, damaged, of an unknown version, or of something else.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {path} {what}: give a folder such as .../step-100")
    try:
        return _verify(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: {error}; use another, or delete it"
        ) from error


def find_newest(
    folder: Path,
    on_skip: Callable[[Path, str], None] | None = None,
    check: Callable[[Checkpoint], object] | None = None,
) -> Checkpoint | None:
    """Return the checkpoint with the highest step that is whole.

    Args:
        folder: Holds the ``step-N`` folders; need not exist.
        on_skip: Called with the path and the reason for every newer one that cannot be used.
        check: Called with a checkpoint whose files are as the manifest says; raises a
            ``CheckpointError`` where their content cannot be used.

    Returns:
        ``None`` when there is no usable checkpoint.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    for path in _newest_first(folder):
        try:
            checkpoint = _verify(path)
            if check is not None:
                check(checkpoint)
        except CheckpointError as error:
            if on_skip is not None:
                on_skip(path, str(error))
        else:
            return checkpoint
    return None


def _newest_first(folder: Path) -> Iterator[Path]:
    """Yield candidates; one that was moved aside comes after the one which replaces it."""
    try:
        paths = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(
            f"checkpoint folder {folder} cannot be read: {error}; give one that is readable"
        ) from error
    ranked = []
    for path in paths:
        step, kind = parse_name(path.name) or (0, "other")
        if kind in {"", "replaced"}:
            ranked.append((step, not kind, path))
    return (path for _, _, path in sorted(ranked, reverse=True))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a folder and compare sizes, not hashes.

    Raises:
        CheckpointError: The reason why it is not a whole checkpoint.
    """
    try:
        manifest = Manifest.from_bytes(
            read_file(path / MANIFEST_NAME, most_bytes=MOST_MANIFEST_BYTES, follow=False)
        )
        step, kind = parse_name(path.name) or (manifest.step, "")
        if kind != "tmp" and step != manifest.step:
            raise CheckpointError(f"{MANIFEST_NAME} is of step {manifest.step}, not of {step}")
        for name, record in manifest.files.items():
            found = (path / name).lstat()
            if not S_ISREG(found.st_mode):
                raise CheckpointError(f"{name} is not a regular file; a link is not followed")
            if found.st_size != record.num_bytes:
                raise CheckpointError(
                    f"{name} is damaged: it has {found.st_size} bytes instead of {record.num_bytes}"
                )
    except FileNotFoundError as error:
        raise CheckpointError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
    return manifest


def _verify(path: Path) -> Checkpoint:
    manifest = read_manifest(path)
    for name, record in manifest.files.items():
        try:
            digest = hash_file(path / name, "sha256", follow=False)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error}") from error
        if digest != record.sha256:
            raise CheckpointError(f"{name} is damaged: its SHA-256 differs from the manifest's")
    return Checkpoint(path, manifest.step, manifest)
