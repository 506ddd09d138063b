"""The package: a wheel and a source distribution that hold what they need, and can be installed."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import evener
from helpers.limits import PATIENCE_S
from helpers.source import ROOT, tracked_files

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_citation_is_that_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (evener.__version__, PROJECT["license"])


def test_ci_runs_the_commands_that_contributors_run() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert commands == ["python3 dev.py test", "python3 dev.py docs"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_wheel_and_sdist_are_built_and_installed_in_a_clean_environment(tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), cwd=ROOT)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")

    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {str(path.relative_to(ROOT)) for path in tracked_files()} <= inside

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    assert {"evener/py.typed", "evener/run_report/assets/page.html"} <= set(names)
    licences = [name.partition("licenses/")[2] for name in names if "/licenses/" in name]
    assert sorted(licences) == sorted(PROJECT["license-files"])
    assert not [name for name in names if not name.startswith(("evener/", "evener-"))]
    for key in ("Repository", "Documentation"):
        assert f"Project-URL: {key}, " in metadata

    for number, package in enumerate((wheel, sdist)):
        environment = tmp_path / f"environment-{number}"
        run(sys.executable, "-m", "venv", str(environment))
        programs = environment / "bin"
        (library,) = environment.glob("lib/python*/site-packages")
        # torch and the other dependencies are those of the present environment, behind its own.
        behind = [path for path in sys.path if path.endswith("site-packages")]
        (library / "dependencies.pth").write_text("\n".join(behind) + "\n")
        pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed")
        run(str(programs / "python"), *pip, "--no-build-isolation", str(package))
        home = run(str(programs / "python"), "-c", "import evener; print(evener.Ddp, evener)")
        assert str(library) in home
        assert run(str(programs / "evener"), "--version").strip() == PROJECT["version"]


def run(*command: str, cwd: Path | None = None) -> str:
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd or Path(command[0]).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
