"""What neither ruff nor import-linter can see of who may import what (``pyproject.toml``)."""

from helpers.source import PACKAGE, imports, modules


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
