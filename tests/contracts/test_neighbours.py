"""A class asks its neighbours; it neither reaches through them nor changes what is theirs.

Both rules are read from the source of the packages in which a window is carried out.
"""

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest

from helpers.source import PACKAGE, Module, modules

PACKAGES = ("protocol", "engine", "comm", "averaging")
FILES = {
    *("data.cursor", "data.leases"),
    *("loop.loop", "loop.data_side", "loop.assembly", "loop.saved_state"),
    *("loop.fitting", "loop.reporting", "loop.likeness", "loop.models"),
}
#: So many dots after a name reach through a neighbour: ``self.team.comm.rank``.
TOO_MANY_DOTS = 3
#: Attributes of others that may be assigned all the same, with the reason.
ASSIGNABLE = {
    "grad": "torch keeps a parameter's gradient there, and optimizers look for it there",
    "data": "torch moves a parameter to other memory by it alone",
    "requires_grad": "torch freezes a parameter by it",
    "__cause__": "Python chains exceptions by it",
    "__context__": "Python chains exceptions by it",
    "atexit": "the standard library's finalizers are told by it not to run at exit",
    "_opt_called": "torch's schedulers look there whether their optimizer was stepped",
    "timeout": "torch takes the deadline of an operation in an options object",
    "rootRank": "torch takes the source of a broadcast in an options object",
    "_timeout": "torch takes the deadline of a process group in an options object",
    "_devices": "torch takes the network devices of a process group in an options object",
    "_threads": "torch takes the threads of a process group in an options object",
}

CHOSEN = [m for m in modules() if m.layer in PACKAGES or m.name in FILES]


def reaches(module: Module) -> list[str]:
    """Chains of attributes that begin at a name and are too long; modules' names are free."""
    inner = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            root: ast.expr = node
            dots = 0
            while isinstance(root, ast.Attribute):
                root, dots = root.value, dots + 1
            is_object = isinstance(root, ast.Name) and root.id not in module_names(module)
            if dots >= TOO_MANY_DOTS and is_object:
                found.append(f"{module.where(node)}: {ast.unparse(node)}")
    return found


@cache
def module_names(module: Module) -> frozenset[str]:
    """Names by which a file calls modules that it has imported."""
    names = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.import_module(node.module or "")
            for alias in node.names:
                if isinstance(getattr(source, alias.name, None), ModuleType):
                    names.add(alias.asname or alias.name)
    return frozenset(names)


def intrusions(module: Module) -> list[str]:
    """Assignments to attributes of anything but ``self``, ``cls`` and what a class makes itself."""
    found = []
    for function, own in scopes(module.tree):
        for node in local_nodes(function):
            # What is assigned, also by ``+=``, in a tuple, by ``for`` and ``with``; or deleted.
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                is_own = isinstance(node.value, ast.Name) and node.value.id in own
                if not is_own and node.attr not in ASSIGNABLE:
                    found.append(f"{module.where(node)}: {ast.unparse(node)} = …")
    return found


def scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, set[str]]]:
    """Every function and class body, with the names whose attributes it may assign."""
    yield tree, set()
    for node in ast.walk(tree):
        class_name = node.name if isinstance(node, ast.ClassDef) else ""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                own = {"self", "cls"} | made_in(child, {"cls", class_name} - {""})
                yield child, own
            elif isinstance(child, ast.ClassDef):
                yield child, set()


def made_in(function: ast.AST, makers: set[str]) -> set[str]:
    """Names that are bound to a new object of the function's own class, and to nothing else."""
    bound: dict[str, list[bool]] = {}
    for node in local_nodes(function):
        if isinstance(node, ast.Assign):
            value = node.value
            is_new = (
                isinstance(value, ast.Call)
                and isinstance(value.func, ast.Name)
                and value.func.id in makers
            )
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(is_new)
    return {name for name, news in bound.items() if all(news)}


def local_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of the scopes within it."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            waiting += ast.iter_child_nodes(node)


@pytest.mark.parametrize("module", CHOSEN, ids=lambda m: m.name)
def test_nobody_reaches_through_a_neighbour(module: Module) -> None:
    found = reaches(module)
    assert not found, "ask the neighbour, with a method of its own:\n" + "\n".join(found)


@pytest.mark.parametrize("module", CHOSEN, ids=lambda m: m.name)
def test_nobody_changes_what_is_anothers(module: Module) -> None:
    found = intrusions(module)
    assert not found, "let a method of the owner do it:\n" + "\n".join(found)


def test_the_rulers_themselves() -> None:
    source = """
import torch.utils
class A:
    def make(cls, other, team):
        new = cls()
        new.size, self.count = 1, 2
        other.size += 1
        for self.part.number in team.of().ranks.first.second:
            torch.utils.data.Dataset, team.comm.rank, self.a.b.c()
        p.grad = None
"""
    module = Module(PACKAGE / "x.py", "x")
    vars(module)["tree"] = ast.parse(source)
    assert [line.rpartition(":")[2] for line in reaches(module)] == [" self.a.b.c"]
    found = sorted(line.split(": ")[1] for line in intrusions(module))
    assert found == ["other.size = …", "self.part.number = …"]
