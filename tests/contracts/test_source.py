"""What neither ruff nor import-linter can see of the source (``pyproject.toml``)."""

import ast
from collections import defaultdict

from helpers.source import PACKAGE, imports, modules

#: Files that share a name with another file or with a package, and why readers may expect it.
SAME_NAME = {
    "coordinator": "classification's public DataParallelCoordinator; team/ has that of a team",
    "engine": "the module that the other modules of engine/ build on",
    "loop": "the class that the other modules of loop/ serve",
    "sync": "the policy SYNC: planning/ divides its windows, engine/ carries them out",
    "team": "the team as an engine sees it; the package team/ forms it",
}


def test_only_the_command_line_imports_the_top_of_the_package() -> None:
    """Below it, ``from evener import …`` takes a name from a layer above."""
    wrong = []
    for module in modules():
        for node, name in imports(module.tree):
            if module.layer in {"cli", "__main__", "__init__"} or name.split(".")[0] != "evener":
                continue
            own = PACKAGE / name.partition(".")[2].partition(".")[0]
            if own == PACKAGE or not (own.is_dir() or own.with_suffix(".py").is_file()):
                wrong.append(module.where(node))
    assert wrong == []


def test_no_class_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module.where(node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_file_has_the_name_of_another_or_of_a_package() -> None:
    places = defaultdict(list)
    for module in modules():
        path = module.path.relative_to(PACKAGE)
        if not path.stem.startswith("__"):
            places[path.stem].append(str(path))
        elif path.parent.name:
            places[path.parent.name].append(f"{path.parent}/")
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared.keys() == SAME_NAME.keys(), shared
