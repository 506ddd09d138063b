"""The source of evener as syntax trees, for tests that hold it to its rules."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from helpers.limits import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "evener"


@dataclass(frozen=True)
class Module:
    """One source file; ``name`` is relative to the package, such as ``comm.base``."""

    path: Path
    name: str

    @property
    def layer(self) -> str:
        """The package or module directly under evener."""
        return self.name.split(".", 1)[0]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def where(self, node: ast.AST) -> str:
        """``src/evener/comm/base.py:12``."""
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


@cache
def modules() -> tuple[Module, ...]:
    """All source files of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(path, name or "__init__"))
    assert found, f"no source under {PACKAGE}"
    return tuple(found)


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import with the dotted name it brings in: ``from a import b`` gives ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node, f"{prefix}.{alias.name}"


def tracked_files() -> list[Path]:
    """Every file of the repository that git knows, and that is still there."""
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=PATIENCE_S,
    )
    paths = (ROOT / name for name in done.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]
