"""The rules by which worker processes are spawned, forked or refused."""

import multiprocessing
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from evener.data.start_method import ByValue, choose_context
from evener.errors import ConfigError, DataError

GUARDED = 'import sys\nif __name__ == "__main__":\n    main()\n'
PLAIN = "import sys\n\nmain()\n"


class Travelling(ByValue):
    def __init__(self) -> None:
        self.lock = threading.Lock()  # carried by value: nobody pickles it as it is


class Counting:
    """Shares a counter with its workers, which pickles only while a process is being spawned."""

    def __init__(self) -> None:
        self.epoch = multiprocessing.get_context("spawn").Value("i", 0)


ARRAYS = [torch.zeros(4, requires_grad=True), np.zeros(4), Counting(), default_collate]
UNPICKLABLE = [lambda index: index]


def choose(
    monkeypatch: pytest.MonkeyPatch,
    script: Path | None,
    text: str,
    parts: Sequence[object],
    platform: str,
    named: str | None = None,
) -> str:
    """What is chosen when it is asked for by a main script of that text."""
    main = sys.modules["__main__"]
    chosen: list[Any] = []

    def ask() -> None:
        context = None if named is None else multiprocessing.get_context(named)
        chosen.append(choose_context(parts, 2, context, platform=platform))

    monkeypatch.setattr(main, "main", ask, raising=False)
    monkeypatch.setattr(main, "__name__", "__main__")
    if script is None:
        monkeypatch.delattr(main, "__file__", raising=False)
    else:
        script.write_text(text)
        monkeypatch.setattr(main, "__file__", str(script), raising=False)
    exec(compile(text, str(script), "exec"), vars(main))
    return str(chosen[0].get_start_method())


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_spawn_wherever_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str
) -> None:
    script = tmp_path / "train.py"
    assert choose(monkeypatch, script, GUARDED, ARRAYS, platform) == "spawn"
    assert choose(monkeypatch, script, PLAIN, [Travelling()], platform) == "spawn"
    assert choose(monkeypatch, None, PLAIN, ARRAYS, platform) == "spawn"  # python -c


@pytest.mark.parametrize(
    ("text", "parts", "error", "words"),
    [
        (PLAIN, ARRAYS, ConfigError, r"num_workers=2 .*train\.py, and line 3 would train"),
        (GUARDED, UNPICKLABLE, DataError, r"<lambda> cannot be sent to worker processes"),
    ],
)
def test_fork_elsewhere_on_linux_and_an_error_with_the_remedy_on_other_systems(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    text: str,
    parts: Sequence[object],
    error: type[Exception],
    words: str,
) -> None:
    script = tmp_path / "train.py"
    assert choose(monkeypatch, script, text, parts, "linux") == "fork"
    with pytest.raises(error, match=words + r".*num_workers=0"):
        choose(monkeypatch, script, text, parts, "darwin")


def test_what_the_user_names_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    assert choose(monkeypatch, script, GUARDED, ARRAYS, "linux", "fork") == "fork"
    assert choose(monkeypatch, script, PLAIN, UNPICKLABLE, "darwin", "fork") == "fork"
    assert choose(monkeypatch, script, GUARDED, ARRAYS, "linux", "forkserver") == "forkserver"
    with pytest.raises(ConfigError, match="line 3"):
        choose(monkeypatch, script, PLAIN, ARRAYS, "linux", "spawn")


def test_a_class_of_an_interactive_session_reaches_its_workers_by_a_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = type("Cell", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Cell", cell, raising=False)
    assert choose(monkeypatch, None, PLAIN, [cell()], "linux") == "fork"
    with pytest.raises(DataError, match=r"Cell is not defined in a script or module"):
        choose(monkeypatch, None, PLAIN, [cell()], "darwin")


def test_a_script_from_standard_input_reaches_its_workers_by_a_fork(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("<stdin>")
    assert choose(monkeypatch, script, GUARDED, ARRAYS, "linux") == "fork"
    with pytest.raises(ConfigError, match=r"standard input; save it as a file or use num_workers"):
        choose(monkeypatch, script, GUARDED, ARRAYS, "darwin")
