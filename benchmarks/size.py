"""How much code there is: lines of ``src``, by package, here and in another commit.

    python benchmarks/size.py --against v0.1.0 --json size.json

Blank lines, comments and docstrings do not count: they are for readers.
"""

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from typing import Any

from report import ROOT, load_average, make_parser, write_report

LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def measure(source: str) -> int:
    """Return the code lines of one file."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield the path below ``src/evener`` and the text of every module of a commit, or of here."""
    if commit is None:
        folder = ROOT / "src/evener"
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        return
    packed = subprocess.run(
        ["git", "archive", commit, "src/evener"], cwd=ROOT, capture_output=True, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".py") else None
            if file is not None:
                yield member.name.removeprefix("src/evener/"), file.read().decode()


def count(commit: str | None) -> dict[str, Any]:
    """Return files, lines in all, and lines by package."""
    packages: Counter[str] = Counter()
    files = 0
    for path, text in sources(commit):
        package, _, inside = path.partition("/")
        packages[f"{package}/" if inside else "modules"] += measure(text)
        files += 1
    return {
        "commit": commit or "this tree",
        "files": files,
        "lines": packages.total(),
        "packages": dict(sorted(packages.items())),
    }


def main() -> None:
    """Count, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="count that commit first")
    arguments = parser.parse_args()
    before = load_average()
    commits = [None] if arguments.against is None else [arguments.against, None]
    counts = [count(commit) for commit in commits]
    for found in counts:
        for package, lines in found["packages"].items():
            print(f"  {package:<14} {lines:>7,} lines")
        part = found["lines"] / counts[0]["lines"]
        print(
            f"{found['commit']}: {found['files']} files, {found['lines']:,} lines ({part:.3f} of "
            f"{counts[0]['commit']})"
        )
    write_report(arguments, before, counts)


if __name__ == "__main__":
    main()
