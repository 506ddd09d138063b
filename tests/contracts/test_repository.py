"""The repository itself: what is tracked, what is pinned, what is declared."""

import os
import re
import tomllib

import evener
from helpers.source import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TEXT = [path for path in tracked_files() if b"\0" not in path.read_bytes()[:8192]]
MAX_FILE_BYTES = 500_000

# Spelled so that this file does not contain what it looks for.
HOMES = re.compile("/(?:" + "|".join(("home/", "Users/", "root/", "work/")) + r")[\w.-]{2,}")


def test_text_files_are_clean():
    wrong = []
    for path in TEXT:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if "\r" in text or (text and not text.endswith("\n")) or text.endswith("\n\n"):
            wrong.append(f"{name}: line ends")
        for number, line in enumerate(text.splitlines(), 1):
            if line != line.rstrip() and path.suffix != ".md":
                wrong.append(f"{name}:{number}: white space at the end")
            if line.startswith(("<<<<<<< ", ">>>>>>> ")):
                wrong.append(f"{name}:{number}: merge conflict")
            if HOMES.search(line):
                wrong.append(f"{name}:{number}: somebody's own folder")
    assert wrong == []


def test_nothing_large_or_made_is_tracked():
    for path in tracked_files():
        assert path.stat().st_size <= MAX_FILE_BYTES, path
        assert path.suffix not in {".pyc", ".so", ".whl", ".log", ".pt", ".safetensors"}, path
        assert not set(path.relative_to(ROOT).parts) & {".venv", "__pycache__", "runs", "dist"}, (
            path
        )


def test_scripts_can_be_executed():
    for name in ("dev.py", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


def test_versions_agree():
    assert evener.__version__ == PROJECT["project"]["version"]


def test_every_dependency_is_pinned():
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert re.fullmatch(r"[\w.]+", version), f"no exact version without build tag: {line}"
            pinned[normalised(name)] = version
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in PROJECT["project"]["optional-dependencies"].values():
        wanted += extra
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)
        assert name is not None
        assert normalised(name[0]) in pinned, requirement


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_changelog_has_this_version_and_a_place_for_the_next_change():
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", PROJECT["project"]["version"]]
    assert len(sections) == len(set(sections))


def test_test_folders_are_no_packages():
    packages = [p for p in (ROOT / "tests").rglob("__init__.py") if p.parent.name != "helpers"]
    assert not packages
