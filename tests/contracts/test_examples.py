"""Every file in examples/ is what the command line takes."""

import re
import subprocess

import pytest

from evener import cli
from evener.config.loading import load_config
from evener.config.runs import ClassifyRunConfig, RunConfig
from evener.team import launch
from helpers.source import ROOT, tracked_files

EXAMPLES = [path for path in tracked_files() if path.parent == ROOT / "examples"]
CONFIGURATIONS = [path for path in EXAMPLES if path.suffix == ".yaml"]
SCRIPTS = [path for path in EXAMPLES if path.suffix == ".sbatch"]


def name(path):
    return path.name


def schema_of(path):
    return ClassifyRunConfig if path.stem.startswith("classify") else RunConfig


def test_configurations_are_valid():
    assert {*CONFIGURATIONS, *SCRIPTS} == set(EXAMPLES)
    for path in CONFIGURATIONS:
        load_config(schema_of(path), path)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=name)
def test_its_own_words_say_how_to_start_it(path, monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launch", lambda command, plan: started.append(command) or 0)
    monkeypatch.chdir(ROOT)
    for variable in ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "EVENER_LAUNCHED"):
        monkeypatch.delenv(variable, raising=False)
    lines = re.findall(r"^#     evener (.+)$", path.read_text(), re.MULTILINE)
    assert lines
    for line in lines:
        assert f"examples/{path.name}" in line
        started.clear()
        assert cli.main(line.split()) == 0
        assert f"examples/{path.name}" in started[-1]


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_a_batch_script_is_bash_and_names_files_that_exist(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    for named in re.findall(r"examples/[\w.]+", text):
        assert (ROOT / named.rstrip(".")).is_file(), named
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), "SLURM reads no further"
