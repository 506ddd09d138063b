"""A data set that is on every machine: functions of the standard library, labelled by package."""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from evener.errors import DataError
from evener.tasks.classification.samples import Record

#: Packages that every Python has, with several files and some hundred functions each.
PACKAGES = ("asyncio", "email", "encodings", "importlib", "multiprocessing", "unittest", "xml")

_LEFT_OUT = frozenset({"test", "tests", "__pycache__"})


def stdlib_functions(root: Path | None = None) -> list[Record]:
    """Read every function of ``PACKAGES`` once; its group is its file.

    Texts are unindented, further indentation is by tabs (four spaces say no more than one tab and
    cost four bytes of what a model sees). Contents differ between versions of Python.

    Args:
        root: The standard library; that of this Python by default.

    Raises:
        DataError: Its sources are not there.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: dict[str, Record] = {}
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            name = path.relative_to(folder)
            if _LEFT_OUT.isdisjoint(name.parts):
                for line, text in _functions(path):
                    record = Record(text, package, name.as_posix(), f"{path}:{line}")
                    found.setdefault(text, record)
    records = list(found.values())
    if len({record.label for record in records}) < len(PACKAGES):
        raise DataError(
            f"{folder} lacks the sources of some of {', '.join(PACKAGES)}; name a data set of your "
            "own with data.path"
        )
    return records


def _functions(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each function and method, the inner ones of others too."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, UnicodeDecodeError, SyntaxError):
        return  # some files hold broken code on purpose
    lines = source.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # By lines: ast.get_source_segment reads the whole file again for each.
            text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).strip()
            yield node.lineno, text.replace("    ", "\t")
