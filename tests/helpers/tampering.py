"""Damage done to files on purpose: by structure, by bytes, and by what else may stand there."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from evener.errors import EvenerError

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 2**53, 10**30, -(10**400), 0.5, -1e308, float("nan"), float("inf")])
    | st.text(max_size=4)
    | st.sampled_from(["", "../x", "\0", "\ud800", "$map"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=3) | st.sampled_from(["$map", "$tensor"]), inner, max_size=2
        )
    ),
    max_leaves=4,
)
"""Values of every kind that JSON knows, and those that a reader is likely to trip over."""


NESTED = b"[" * 4000 + b"]" * 4000


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """The document with one of its nodes replaced, or removed."""
    document = json.loads(json.dumps(document))
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            places.append((node, key))
            if isinstance(node[key], dict | list):
                collect(node[key])

    collect(document)
    node, key = draw(st.sampled_from(places))
    if draw(st.integers(0, 4)) == 0:
        del node[key]
    else:
        node[key] = draw(JSON)
    return document


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
