"""Checkpoints read back: only complete ones, and nothing is unpickled."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from evener.checkpoint.codec import decode
from evener.checkpoint.manifest import MANIFEST_NAME, TENSORS_SUFFIX, Manifest, parse_name
from evener.errors import CheckpointError
from evener.files import explaining, hash_file, read_file
from evener.parsing import parse_json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose files have the hashes of its manifest.

    Attributes:
        path: Its folder.
        manifest: Its table of contents.
    """

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Return the step at which it was taken."""
        return self.manifest.step

    def tensors(self, stem: str) -> dict[str, torch.Tensor]:
        """Read a tensor file onto the CPU.

        Args:
            stem: The file's name without ``.safetensors``.

        Returns:
            The tensors by name. Names of tied tensors that were stored once refer to one object.

        Raises:
            CheckpointError: There is no such file.
        """
        stored = load_file(self._existing(stem + TENSORS_SUFFIX))
        aliases = self.manifest.aliases.get(stem, {})
        return stored | {alias: stored[kept] for alias, kept in aliases.items()}

    def document(self, name: str) -> Any:
        """Read a JSON document; tuples, integer keys and infinite numbers come back as they were.

        Raises:
            CheckpointError: There is no such document.
        """
        return decode(parse_json(self.asset(name)))

    def asset(self, name: str) -> bytes:
        """Read any file of the checkpoint as bytes.

        Raises:
            CheckpointError: There is no such file.
        """
        return read_file(self._existing(name))

    def _existing(self, name: str) -> Path:
        if name not in self.manifest.files:
            has = ", ".join(sorted(self.manifest.files))
            raise CheckpointError(f"checkpoint {self.path} has no file {name!r}; it has {has}")
        return self.path / name


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify one checkpoint: its manifest, and the SHA-256 of each file.

    Raises:
        CheckpointError: It is missing, damaged, of an unknown version, or of something else.
    """
    if not path.is_dir():
        raise CheckpointError(
            f"checkpoint {path} does not exist or is not a folder: give one such as .../step-100"
        )
    try:
        return _verify(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: {error}; use another, or delete it"
        ) from error


def find_newest(
    folder: Path, on_skip: Callable[[Path, str], None] | None = None
) -> Checkpoint | None:
    """Return the complete checkpoint with the highest step.

    Args:
        folder: Holds the ``step-N`` folders; need not exist.
        on_skip: Called with the path and the reason for every newer one that cannot be used.

    Returns:
        ``None`` when there is no usable checkpoint.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    for path in _newest_first(folder):
        try:
            return _verify(path)
        except CheckpointError as error:
            if on_skip is not None:
                on_skip(path, str(error))
    return None


def _newest_first(folder: Path) -> list[Path]:
    """Return candidates; one that was moved aside comes after the one which replaces it."""
    with explaining(f"checkpoint folder {folder}", "give one that is readable", CheckpointError):
        paths = list(folder.iterdir()) if folder.is_dir() else []
    found = ((*parse_name(path.name), path) for path in paths)
    ranked = [(step, not kind, path) for step, kind, path in found if kind in ("", "replaced")]
    return [path for *_, path in sorted(ranked, reverse=True)]


def _verify(path: Path) -> Checkpoint:
    """Compare each file with the manifest.

    Raises:
        CheckpointError: The reason why it is not a complete checkpoint.
    """
    try:
        manifest = Manifest.from_bytes(read_file(path / MANIFEST_NAME))
        for name, digest in manifest.files.items():
            if hash_file(path / name, "sha256") != digest:
                raise CheckpointError(f"{name} is damaged: its SHA-256 differs from the manifest's")
    except FileNotFoundError as error:
        raise CheckpointError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST_NAME} is not JSON: {error}") from error
    return Checkpoint(path, manifest)
