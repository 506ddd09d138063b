"""How much code there is: lines and tokens of ``src``, by package, here and in other commits.

    python benchmarks/size.py --against v0.1.0 --json size.json

Blank lines, comments and docstrings do not count: they are for readers. Tokens are those of
Python's own tokenizer without newlines and indents, so that long lines gain nothing.
"""

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from typing import Any

from machine import ROOT, load_average, write_report
from options import make_parser

LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def documentation(tree: ast.Module) -> set[int]:
    """The lines of strings that stand alone: docstrings, and the notes under constants."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def measure(source: str) -> tuple[int, int]:
    """Lines and tokens of one file."""
    documented = documentation(ast.parse(source))
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT:
            continue
        if here := set(range(token.start[0], token.end[0] + 1)) - documented:
            lines |= here
            tokens += 1
    return len(lines), tokens


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Path below ``src/evener`` and text of every module, of a commit or of the tree as it is."""
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
    """Files, lines and tokens in all, and lines and tokens by package."""
    lines: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    files = 0
    for path, text in sources(commit):
        package, _, inside = path.partition("/")
        part = f"{package}/" if inside else "modules"
        found = measure(text)
        lines[part] += found[0]
        tokens[part] += found[1]
        files += 1
    return {
        "commit": commit or "this tree",
        "files": files,
        "lines": lines.total(),
        "tokens": tokens.total(),
        "packages": {part: [lines[part], tokens[part]] for part in sorted(lines)},
    }


def show(found: dict[str, Any], first: dict[str, Any]) -> None:
    """Prints one count, and its ratio to the first."""
    for part, (lines, tokens) in found["packages"].items():
        print(f"  {part:<14} {lines:>7,} lines {tokens:>9,} tokens")
    print(
        f"{found['commit']}: {found['files']} files, {found['lines']:,} lines "
        f"({found['lines'] / first['lines']:.3f} of {first['commit']}), "
        f"{found['tokens']:,} tokens ({found['tokens'] / first['tokens']:.3f})"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="count that commit first")
    arguments = parser.parse_args()
    before = load_average()
    commits = [None] if arguments.against is None else [arguments.against, None]
    found = [count(commit) for commit in commits]
    for one in found:
        show(one, found[0])
    write_report(arguments, before, found)


if __name__ == "__main__":
    main()
