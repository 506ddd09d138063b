"""State on disk: written complete or not at all, verified before it is used, never unpickled.

A checkpoint is a folder ``step-N`` that holds one safetensors file per group of tensors, JSON
documents, and a manifest with the SHA-256 of each file. It appears under that name only once it is
complete, so a killed process or a full disk leaves the previous one in use.
"""

from evener.checkpoint.codec import encode_document
from evener.checkpoint.copies import alias_table, copy_to_cpu
from evener.checkpoint.manifest import step_name
from evener.checkpoint.reader import Checkpoint, find_newest, open_checkpoint
from evener.checkpoint.writer import (
    Snapshot,
    WrittenCheckpoint,
    fence_writers,
    write_checkpoint,
)

__all__ = [
    "Checkpoint",
    "Snapshot",
    "WrittenCheckpoint",
    "alias_table",
    "copy_to_cpu",
    "encode_document",
    "fence_writers",
    "find_newest",
    "open_checkpoint",
    "step_name",
    "write_checkpoint",
]
