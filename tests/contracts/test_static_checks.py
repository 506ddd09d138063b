"""Lint, format, types and import layers of the whole repository."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.source import ROOT

CHECKS = {
    "types": "mypy",  # first, as it takes longest
    "lint": "ruff check .",
    "format": "ruff format --check .",
    "import layers": "lint-imports --no-logo",
}


@pytest.mark.timeout(800)  # mypy without a cache, beside other tests
@pytest.mark.parametrize("command", CHECKS.values(), ids=CHECKS)
def test_the_repository_passes(command: str) -> None:
    tool, *arguments = command.split()
    program = Path(sys.executable).with_name(tool)
    done = subprocess.run(
        [program, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
