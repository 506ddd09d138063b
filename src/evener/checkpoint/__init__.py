"""State on disk: written in the background, verified before it is used, never unpickled.

A checkpoint is a folder ``step-N`` that holds one safetensors file per group of tensors, JSON
documents, and a manifest with the size and SHA-256 of each file. It appears under that name only
once it is whole, so a killed process or a full disk leaves the previous one in use.
"""

from evener.checkpoint.codec import flatten_optimizer, unflatten_optimizer
from evener.checkpoint.copies import alias_table, copy_to_cpu
from evener.checkpoint.reader import Checkpoint, find_newest, open_checkpoint
from evener.checkpoint.writer import (
    CheckpointWriter,
    SkippedCheckpoint,
    Snapshot,
    UnwrittenError,
    WrittenCheckpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "SkippedCheckpoint",
    "Snapshot",
    "UnwrittenError",
    "WrittenCheckpoint",
    "alias_table",
    "copy_to_cpu",
    "find_newest",
    "flatten_optimizer",
    "open_checkpoint",
    "unflatten_optimizer",
]
