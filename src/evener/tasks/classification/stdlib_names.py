"""A data set that is on every machine: names in the standard library, by what they name."""

import ast
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from evener.errors import DataError
from evener.tasks.classification.samples import Record

_LEFT_OUT = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"})

_SHORTEST = 3
"""Characters: names such as ``i`` or ``fd`` stand for anything."""


def stdlib_names(root: Path | None = None) -> list[Record]:
    """Return each name that the standard library gives to something, with what it names most often.

    The classes are ``class``, ``function``, ``constant`` (assigned outside of functions and
    classes) and ``variable``. The group of a name is the first file that has it. Names differ
    between versions of Python.

    Args:
        root: The standard library; that of this Python by default.

    Raises:
        DataError: Its sources are not there.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    places: dict[str, tuple[str, int]] = {}
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        if _LEFT_OUT.isdisjoint(file.parts):
            for name, kind, line in _names(path):
                kinds[name][kind] += 1
                places.setdefault(name, (file.as_posix(), line))
    if not kinds:
        raise DataError(
            f"{folder} has no Python sources; name a data set of your own with data.path"
        )
    return [
        Record(name, counts.most_common(1)[0][0], places[name][0], ":".join(map(str, places[name])))
        for name, counts in kinds.items()
        if len(name) >= _SHORTEST
    ]


def _names(path: Path) -> Iterator[tuple[str, str, int]]:
    """Return name, class and line of all that a file defines."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError):
        return  # some files hold broken code on purpose
    definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    outside = {
        node
        for statement in tree.body
        if not isinstance(statement, definitions)
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, definitions):
            yield node.name, "class" if isinstance(node, ast.ClassDef) else "function", node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, "constant" if node in outside else "variable", node.lineno
