"""Read a configuration: a YAML file or keys, then the changes of ``--set``."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from evener.config.checks import explain
from evener.config.keys import Keys
from evener.errors import ConfigError
from evener.parsing import short
from evener.yaml_files import parse_yaml, read_yaml

_Schema = TypeVar("_Schema", bound=BaseModel)


def load_config(
    schema: type[_Schema],
    given: Keys,
    overrides: Iterable[str] = (),
    *,
    owner: str = "the configuration",
) -> _Schema:
    """Read and check a configuration.

    Args:
        schema: The class that declares the keys.
        given: The keys, or a YAML file with them; ``None`` for all defaults.
        overrides: ``key=value`` with dots for sections, values in YAML, such as
            ``optimizer.lr=3e-4``.
        owner: Name of what the keys belong to, for messages about keys that are not from a file.

    Raises:
        ConfigError: Names the file or key, the value, and what is allowed.
    """
    if isinstance(given, str | Path):
        document, source = read_yaml(Path(given)), str(given)
    else:
        document, source = copy.deepcopy(dict(given or {})), owner
    overridden = [_override(document, override) for override in overrides]
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(explain(schema, error, f"{source}: ", overridden)) from None


def _override(document: dict[str, Any], override: str) -> str:
    """Apply a ``--set`` to the document; return its key."""
    key, equals, text = override.partition("=")
    *sections, last = key.strip().split(".")
    if not equals or not all([*sections, last]):
        raise ConfigError(f"--set {override!r} is not key=value; write e.g. optimizer.lr=3e-4")
    place = document
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise ConfigError(
                f"--set {override!r}: {section!r} is {short(place)}, a value and not a section"
            )
    place[last] = parse_yaml(text, f"--set {override!r}")
    return key.strip()
