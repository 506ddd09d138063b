"""``docs/errors.md`` has every public exception, in its place, and quotes what the code says."""

import ast
import re

import evener
from evener import EvenerError
from helpers.source import ROOT, modules

TEXT = (ROOT / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
EXCEPTIONS = {
    name: thing
    for name in evener.__all__
    if isinstance(thing := getattr(evener, name), type) and issubclass(thing, EvenerError)
}
QUOTES = re.findall(r"^> (.+)$", TEXT, re.MULTILINE)


def strings() -> list[str]:
    """Every string in the code; what f-strings fill in is …."""
    found = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_exception_has_a_section_and_every_section_an_exception() -> None:
    assert list(SECTIONS) == [n for n in SECTIONS if n in EXCEPTIONS]
    assert set(SECTIONS) == set(EXCEPTIONS)


def test_a_section_names_every_attribute() -> None:
    for name, kind in EXCEPTIONS.items():
        for attribute in re.findall(r"^\s{8}(\w+): ", kind.__doc__ or "", re.MULTILINE):
            assert f"`{attribute}`" in SECTIONS[name], name


def test_the_tree_is_that_of_the_classes() -> None:
    parents = [EvenerError]
    for line in TEXT.partition("```text\n")[2].partition("```")[0].splitlines():
        depth, name = re.search(r"[A-Z]", line).start() // 4, re.findall(r"[A-Z]\w+", line)[0]  # type: ignore[union-attr]
        error = EXCEPTIONS[name]
        del parents[depth:]
        assert not parents or error.__bases__[0] is parents[-1], name
        parents.append(error)
        for also in re.findall(r"\(also an? (\w+)\)", line):
            assert also in {base.__name__ for base in error.__mro__}, line


def test_quoted_messages_are_those_of_the_code() -> None:
    said = strings()
    assert [quote for quote in QUOTES if not any(quote in text for text in said)] == []
