"""Run a user's script as a rank, like ``python SCRIPT ARGS``, with ``run_child`` around it.

Used as ``python -P -m evener.team.script SCRIPT ARGS``, or with ``-m MODULE ARGS``;
with ``-P`` the current folder cannot shadow modules, as when Python runs a script.
"""

import atexit
import gc
import io
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

from evener.errors import LaunchError
from evener.team.child import run_child, write_lines_at_once
from evener.team.signals import end_in_silence


def run_program(argv: Sequence[str]) -> None:
    """Run a script or a module as ``__main__``.

    Args:
        argv: The script's path, then its arguments; or ``-m``, the module's name, its arguments.

    Raises:
        LaunchError: There is no such module.
    """
    # A new module, so that multiprocessing's children import the script (and not this file) to find
    # objects that were pickled under `__main__`. It stays after the run, because threads and exit
    # handlers may still use it.
    module = ModuleType("__main__")
    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        sys.path.insert(0, str(Path.cwd()))
        spec, code = _find_module(argv[1])
        sys.argv[0] = module.__file__ = spec.origin or argv[1]
        module.__spec__, module.__loader__ = spec, spec.loader
        module.__package__ = spec.parent
    else:
        path = argv[0]
        sys.argv[:] = argv
        sys.path.insert(0, str(Path(path).resolve().parent))
        module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102 - the user asked for it


def _find_module(name: str) -> tuple[ModuleSpec, CodeType]:
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")  # which Python runs for a package
    code = (
        spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    )
    if spec is None or code is None:
        raise LaunchError(f"there is no module {name!r} to run; check the name after -m")
    return spec, code


if __name__ == "__main__":
    # At exit Python's garbage collector would traverse all of torch, for up to three seconds.
    atexit.register(gc.freeze)
    write_lines_at_once()  # also if torchrun or SLURM has started this rank
    try:
        code = run_child(lambda: run_program(sys.argv[1:]))
    finally:
        end_in_silence()
    sys.exit(code)
