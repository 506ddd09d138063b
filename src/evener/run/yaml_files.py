"""Reads YAML files: numbers as people write them, and every mistake with file and line."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from evener.errors import ConfigError


class NumberLoader(yaml.SafeLoader):
    """YAML 1.1 reads ``3e-4`` as text, where people mean the number; keys may be given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping of the file; refuses one with a key that is given twice."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} is given twice", key_node.start_mark
                )
            if isinstance(key_node, yaml.ScalarNode):
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


NumberLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys and values of a file; none of an empty one.

    Raises:
        ConfigError: It does not exist, is no YAML, or holds something else; names file and place.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give the path of a YAML file in UTF-8"
        ) from None
    try:
        document = yaml.load(text, Loader=NumberLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"{path}{place}: broken YAML: {problem}; mend the file") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(
            f"{path} holds a {type(document).__name__}; give keys and values, such as "
            "'batch_size: 32'"
        )
    return document
