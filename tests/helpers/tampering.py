"""Damage done to files on purpose: by structure, by bytes, and by what else may stand there."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from evener.errors import EvenerError

NESTED = b"[" * 4000 + b"]" * 4000


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes, cut, overwritten, or with others put between them."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 16)))
    return data[:start] + draw(st.binary(max_size=8)) + data[stop:]


def read_or_refuse(path: Path, read: Callable[[], object]) -> bool:
    """Reads; what is refused is refused by an error of evener that names the file."""
    refused = None
    try:
        read()
    except EvenerError as error:
        refused = str(error)
    assert refused is None or str(path) in refused
    return refused is not None


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Replaces a file of a checkpoint, and makes its manifest say that this is right."""
    (checkpoint / name).write_bytes(content)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["files"][name] = hashlib.sha256(content).hexdigest()
    (checkpoint / "manifest.json").write_bytes(sealed(manifest))


def sealed(manifest: Any) -> bytes:
    """A manifest with the checksum that belongs to it."""
    if isinstance(manifest, dict):
        content = {key: value for key, value in manifest.items() if key != "checksum"}
        text = json.dumps(content, sort_keys=True)
        manifest = {**content, "checksum": hashlib.sha256(text.encode()).hexdigest()}
    return json.dumps(manifest).encode()
