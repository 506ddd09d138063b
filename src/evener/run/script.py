"""Runs a user's script as a rank: as ``python SCRIPT ARGS`` would, plus what ``run_child`` adds.

Used as ``python -P -m evener.run.script SCRIPT ARGS``; ``-P`` keeps the current folder from
shadowing modules, as it does when Python runs a script.
"""

import io
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from evener.run.child import run_child


def run_script(argv: Sequence[str]) -> None:
    """Runs a script as ``__main__``.

    Args:
        argv: The script's path, then its arguments.
    """
    path = argv[0]
    sys.argv[:] = argv
    sys.path.insert(0, str(Path(path).resolve().parent))
    # A module of its own without a spec, so that multiprocessing's children import the script (and
    # not this file) to find what was pickled under `__main__`. It stays after the run: threads and
    # exit handlers may still look into it.
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    sys.modules["__main__"] = module
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - the user asked for it


if __name__ == "__main__":
    sys.exit(run_child(lambda: run_script(sys.argv[1:])))
