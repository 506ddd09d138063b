"""Who may import and do what. import-linter sees modules; the rest is read from the source."""

import ast

import pytest

from helpers.source import PACKAGE, imports, modules, uses, without_functions

# What pure modules may import: computing, no clock, no I/O, nothing that depends on the machine.
PURE_IMPORTS = {
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "html",  # escape
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "reprlib",
    "statistics",
    "struct",
    "types",
    "typing",
    "zlib",  # checksums
}
PURE_BUILTINS_NOT = {"open", "print", "input", "eval", "exec", "__import__", "breakpoint"}


def is_pure(name: str) -> bool:
    return name.startswith(("planning", "protocol", "errors", "version")) or name in {
        "averaging.weights",
        "data.cursor",
        "data.leases",
        "doctor.host_facts",
        "doctor.judgement",
        "notebook",
        "parsing",
    }


PURE = [module for module in modules() if is_pure(module.name)]
NOT_COMM = [m for m in modules() if m.layer != "comm"]
MAY_PRINT = {"team", "loop", "managed", "manual", "ddp", "tasks", "cli", "__main__", "__init__"}
SILENT = [m for m in modules() if m.layer not in MAY_PRINT]


def test_the_lists_below_are_about_something():
    assert {m.name for m in PURE} >= {
        "errors",
        "planning.plans",
        "data.cursor",
        "averaging.weights",
    }
    assert len(SILENT) > len(PURE)


@pytest.mark.parametrize("module", PURE, ids=lambda m: m.name)
def test_pure_modules_import_only_what_computes(module):
    for node, name in imports(module.tree):
        top = name.split(".")[0]
        if top == "evener":
            target = name.removeprefix("evener.")
            assert is_pure(target) or is_pure(target.rpartition(".")[0]), module.where(node)
        else:
            assert top in PURE_IMPORTS, f"{module.where(node)} imports {name}"


@pytest.mark.parametrize("module", PURE, ids=lambda m: m.name)
def test_pure_modules_read_and_write_nothing(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in PURE_BUILTINS_NOT, module.where(node)


@pytest.mark.parametrize("module", NOT_COMM, ids=lambda m: m.name)
def test_only_comm_touches_torch_distributed(module):
    places = [module.where(node) for node in uses(module.tree, "torch.distributed")]
    assert not places


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_hugging_face_is_imported_inside_functions(module):
    for node in without_functions(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {name.split(".")[0] for _, name in imports(node)}
            assert not names & {"transformers", "peft", "tokenizers"}, module.where(node)


@pytest.mark.parametrize("module", SILENT, ids=lambda m: m.name)
def test_lower_layers_neither_log_nor_print(module):
    for node, name in imports(module.tree):
        assert name.split(".")[0] != "logging", module.where(node)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", module.where(node)
        # Sinks write where they are told; nobody reaches for the process's own streams.
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in {"sys.stdout", "sys.stderr"}, module.where(node)


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_nobody_sets_up_logging_or_imports_the_top_of_the_package(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            assert ast.unparse(node.func) not in {"logging.basicConfig", "basicConfig"}
    if module.layer in {"cli", "__main__"}:
        return
    for node, name in imports(module.tree):
        if name.startswith("evener."):
            target = PACKAGE / name.split(".")[1]
            inside = target.is_dir() or target.with_suffix(".py").is_file()
            assert inside, f"{module.where(node)} takes {name} from the layer above"
        assert name != "evener", f"{module.where(node)}: for the version, evener.version"


@pytest.mark.parametrize("module", modules(), ids=lambda m: m.name)
def test_nothing_is_unpickled_by_torch_and_no_interface_is_guessed(module):
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            assert function not in {"torch.load", "torch.save"}, module.where(node)
            assert function != "hasattr", f"{module.where(node)}: put it into the interface instead"
