"""Measure which wrong lines the tests notice: ``python tests/nightly/mutants.py [PACKAGE ...]``.

A mutant is a copy of the source with one small change: a comparison, an operator or a constant
is another one, a condition is negated, or a statement is missing. The tests of its package must
fail. A mutant that survives names a test that is missing, or code that is not needed.

Mutants are found in the source as it is. A hash of place and change decides which are run, so an
edit elsewhere does not change the choice. ``--seed`` chooses others.
"""

import argparse
import ast
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path("src/evener")


class Package(NamedTuple):
    """How many mutants a package has, and the tests that must notice them, quick ones first."""

    count: int
    tests: tuple[str, ...]


PACKAGES = {
    "protocol": Package(
        16,
        (
            "tests/unit/protocol",
            "tests/unit/team/test_fixed.py",
            "tests/processes/test_waits.py",
        ),
    ),
    "averaging": Package(8, ("tests/unit/averaging", "tests/unit/manual", "tests/unit/engine")),
    "data": Package(10, ("tests/unit/data", "tests/processes/test_fetch_processes.py")),
    "planning": Package(
        12, ("tests/unit/planning", "tests/unit/simulation", "tests/unit/engine/local")
    ),
    "engine": Package(
        24,
        (
            "tests/unit/engine",
            "tests/unit/loop",
            "tests/unit/managed",
            "tests/numerics/test_sums.py",
        ),
    ),
    "comm": Package(
        15,
        (
            "tests/unit/comm",
            "tests/conformance",
            "tests/unit/engine/sync",
            "tests/numerics/test_compatibility.py",
            "tests/numerics/test_compatibility_state.py",
        ),
    ),
    "team": Package(
        15,
        (
            "tests/unit/team",
            "tests/unit/managed",
            "tests/conformance",
            "tests/processes/test_elastic_launch.py",
        ),
    ),
}

#: Mutants that do nothing else that anybody relies on, by their name; and why.
EQUIVALENT = {
    "protocol/row.py encode: 3 -> 4": "a row has more room than the longest plan needs",
    "engine/sync.py SyncEngine._calibrate: self.collectives.ask(what) -> pass": (
        "ranks time their devices less at the same time; it changes no result"
    ),
    "data/fetching.py name_samples: len(indices) > 8 -> len(indices) >= 8": "an ellipsis in a text",
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One changed place of one file."""

    package: str
    file: Path
    line: int
    #: Stays the same when other code changes: file, function, old and new text.
    name: str
    source: str

    @property
    def order(self) -> str:
        """Return what mutants are sorted by before the first are taken."""
        return hashlib.sha256(self.name.encode()).hexdigest()


# ── finding mutants ──────────────────────────────────────────────────────────────────────────────


class Place(NamedTuple):
    """A node that can be changed, where its parent holds it, and the function that it is in."""

    parent: ast.AST
    field: str
    index: int | None
    node: ast.AST
    function: str

    def put(self, node: ast.AST) -> None:
        """Put another node in this one's place."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


def find_places(node: ast.AST, function: str = "") -> Iterator[Place]:
    """Yield the places inside functions. Annotations, messages and docstrings are left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of zip(): what it forbids does not happen
            if function and not is_docstring(child):
                yield Place(node, name, index if isinstance(value, list) else None, child, function)
            if isinstance(child, ast.Raise | ast.Assert):
                continue
            inside = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inside = f"{function}.{child.name}".lstrip(".")
            yield from find_places(child, inside)


def is_docstring(node: ast.AST) -> bool:
    """Return whether a statement is a string alone."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in a node's place."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=comparators):
            yield ast.Compare(left, [COMPARISONS[type(op)]()], comparators)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(op)](), right)
        case ast.BoolOp(op=ast.And(), values=values):
            yield ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(op=ast.Or(), values=values):
            yield ast.BoolOp(ast.And(), values)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            negated = ast.UnaryOp(ast.Not(), test)
            yield type(node)(**{**dict(ast.iter_fields(node)), "test": negated})
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def mutants_of(package: str, file: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    seen: dict[str, int] = {}
    for place in list(find_places(tree)):
        for change in changes(place.node):
            old, new = first_line(place.node), first_line(change)
            name = f"{file.relative_to(SOURCE)} {place.function}: {old} -> {new}"
            seen[name] = seen.get(name, 0) + 1
            if seen[name] > 1:
                name = f"{name} (no. {seen[name]})"
            place.put(ast.copy_location(change, place.node))
            source = ast.unparse(ast.fix_missing_locations(tree))
            place.put(place.node)
            yield Mutant(package, file, getattr(place.node, "lineno", 0), name, source)


def first_line(node: ast.AST) -> str:
    """Return the beginning of a node's source."""
    return ast.unparse(node).splitlines()[0][:70]


def choose(package: str, count: int, seed: int) -> list[Mutant]:
    """Return as many mutants of a package as asked for, spread over all of its files."""
    files = sorted(f.relative_to(ROOT) for f in (ROOT / SOURCE / package).rglob("*.py"))
    found = sorted(
        (mutant for file in files for mutant in mutants_of(package, file)),
        key=lambda mutant: mutant.order,
    )
    return found[seed * count : (seed + 1) * count]


# ── running them ─────────────────────────────────────────────────────────────────────────────────


def copy_tree(folder: Path) -> None:
    """Copy what tests read."""
    leave = shutil.ignore_patterns("__pycache__", ".git", ".venv*", ".*_cache", "runs")
    shutil.copytree(ROOT, folder, ignore=leave, symlinks=True)


def run(tree: Path, mutant: Mutant, tests: tuple[str, ...], limit_s: float) -> str | None:
    """Return the test that notices a mutant, or None; those that name its module come first."""
    file = tree / mutant.file
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.source, encoding="utf-8")
    try:
        for paths in (near(tree, mutant, tests), tests):
            if paths and (noticed := run_tests(tree, paths, limit_s)):
                return noticed
        return None
    finally:
        file.write_text(before, encoding="utf-8")


def near(tree: Path, mutant: Mutant, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Return the test files that name the mutant's module: most mutants are caught there."""
    stem = mutant.file.stem
    folders = [path for path in tests if not path.endswith(".py")]
    files = [file for path in folders for file in sorted((tree / path).rglob("test_*.py"))]
    return tuple(
        str(file.relative_to(tree))
        for file in files
        if f"_{stem}" in file.name or f".{stem} import" in file.read_text(encoding="utf-8")
    )


def run_tests(tree: Path, tests: tuple[str, ...], limit_s: float) -> str | None:
    """Return the first test that fails, or None."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "--tb=no", "--no-header", "-p", "no:cacheprovider", "--timeout=60"]
    there = [path for path in tests if (tree / path).exists()]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *there],
            cwd=tree,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None  # a test that hangs fails by itself, long before
        finally:
            # A mutant may leave processes behind, or not end at all.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if status == 0:
        return None
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"(pytest ended with status {status})"


def main() -> int:
    """Run mutants, and print which survived; the status is 1 if one did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("packages", nargs="*", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--count", type=int, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=0, help="0, 1, 2, …: which mutants")
    parser.add_argument("--jobs", type=int, default=2, help="how many are run at once")
    parser.add_argument("--match", default="", help="only mutants whose name contains this text")
    parser.add_argument("--tests", nargs="*", help="these tests instead of the package's own")
    parser.add_argument("--limit-s", type=float, default=900.0, help="for all tests of a mutant")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    options = parser.parse_args()
    chosen = [
        mutant
        for package in options.packages or PACKAGES
        for mutant in choose(package, options.count or PACKAGES[package].count, options.seed)
        if options.match in mutant.name
    ]
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    survived = 0
    trees: SimpleQueue[Path] = SimpleQueue()

    def examine(mutant: Mutant) -> tuple[Mutant, str | None, float]:
        began_s, tree = time.monotonic(), trees.get()
        tests = tuple(options.tests or PACKAGES[mutant.package].tests)
        try:
            return mutant, run(tree, mutant, tests, options.limit_s), time.monotonic() - began_s
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="evener-mutants-") as folder:
        for job in range(options.jobs):
            copy_tree(Path(folder, str(job)))
            trees.put(Path(folder, str(job)))
        with ThreadPoolExecutor(options.jobs) as pool:
            for mutant, noticed, seconds in pool.map(examine, chosen):
                reason = EQUIVALENT.get(mutant.name)
                survived += noticed is None and reason is None
                told = f"caught by {noticed}" if noticed else reason or "SURVIVED"
                print(f"{mutant.name}\n    line {mutant.line}, {seconds:.0f} s: {told}", flush=True)
    equal = sum(mutant.name in EQUIVALENT for mutant in chosen)
    caught = len(chosen) - survived - equal
    print(f"{len(chosen)} mutants: {caught} caught, {survived} survived, {equal} equivalent")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
