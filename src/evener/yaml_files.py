"""Read YAML files: numbers as people write them, and every mistake with file and line.

A file may be hostile: a few lines of aliases expand to billions of values, and one line of brackets
to any depth. Both are refused while the text is read, before anything has been built from it.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from evener.errors import ConfigError
from evener.files import read_file

MOST_BYTES: Final = 256 * 1024
"""PyYAML reads so much text in less than half a second, whatever it is."""

MOST_VALUES: Final = 10_000
"""Values of a file, those that aliases repeat included; PyYAML reads so many in 0.3 s."""

MOST_DEPTH: Final = 32
"""Sections and lists within one another."""

MOST_DIGITS: Final = 100
"""Characters of a number; conversions of long ones take seconds, and fail when they are shown."""

_NUMBERS: Final = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``3e-4`` as text, where people mean the number; keys may be given once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read one value; refuse what would grow beyond all bounds."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._num_values
        self._depth += 1
        self._num_values += 1
        if self._depth > MOST_DEPTH:
            raise _refused(f"values are nested more than {MOST_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias:
            if id(node) not in self._sizes:
                raise _refused("an alias refers to the value that it is a part of", mark)
            self._num_values += self._sizes[id(node)]
        self._sizes[id(node)] = self._num_values - before
        if (
            isinstance(node, yaml.ScalarNode)
            and node.tag in _NUMBERS
            and len(node.value) > MOST_DIGITS
        ):
            raise _refused(f"a number has more than {MOST_DIGITS} digits", mark)
        if self._num_values > MOST_VALUES:
            raise _refused(f"there are more than {MOST_VALUES} values, aliases expanded", mark)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping of the file; refuse one with a key that is given twice."""
        seen = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refused("a key is a list or a section, and not text", key_node.start_mark)
            if key_node.value in seen:
                raise _refused(f"key {key_node.value!r} is given twice", key_node.start_mark)
            seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _refused(problem: str, mark: yaml.Mark | None) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def parse_yaml(text: str) -> Any:
    """Return the value of a text in YAML.

    Raises:
        yaml.YAMLError: It is not YAML, or more than a file of options can need.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # PyYAML passes on what Python's types say of a date such as 2001-99-99.
        raise _refused(f"a value cannot be read ({error})", None) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the keys and values of a file; none of an empty one.

    Raises:
        ConfigError: It does not exist, is not YAML, or holds something else; names file and place.
    """
    try:
        text = read_file(path, most_bytes=MOST_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; give the path of a YAML file in UTF-8"
        ) from None
    try:
        document = parse_yaml(text)
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
