"""Read YAML files: numbers as users write them, and every mistake with file and line."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from evener.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``3e-4`` as text, but users mean the number; keys may be given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping of the file; refuse one with a key that is given twice."""
        seen: list[Any] = []
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            seen.append(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a text in YAML.

    Args:
        text: The text.
        source: Where it is from, for the message.

    Raises:
        ConfigError: It is not YAML; names source, line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2001-99-99
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{source}{place}: broken YAML: {problem}; fix it") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file; none of an empty one.

    Raises:
        ConfigError: It does not exist, is not YAML, or holds something else; names file and place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give a YAML file in UTF-8") from None
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict | None):
        raise ConfigError(
            f"{path} holds a {type(document).__name__}; give keys and values, such as "
            "'batch_size: 32'"
        )
    return document or {}
