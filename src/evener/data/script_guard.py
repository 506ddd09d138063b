"""A script that starts worker processes needs a guard, or each of them would train as well."""

import ast
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from evener.errors import ConfigError

_hiding = threading.Lock()


class ByValue:
    """What pickles whole: a process that is given it needs no import of the user's script."""


@contextmanager
def hidden_script() -> Iterator[None]:
    """Processes spawned inside do not import the main script, as where there is none.

    ``multiprocessing`` knows the script by these two attributes, and does without in a notebook.
    """
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _hiding:
        hidden = {str(n): main.pop(n) for n in ("__file__", "__spec__") if n in main}
        main["__spec__"] = None
        try:
            yield
        finally:
            del main["__spec__"]
            main.update(hidden)


def refuse_unguarded_script(num_workers: int) -> None:
    """Refuses to spawn where each worker would run the user's whole script again.

    A spawned process imports the main script to find its classes. A script without a guard would
    there join the team a second time as the same rank, before multiprocessing could object.

    Args:
        num_workers: The option that asked for processes, for the message.

    Raises:
        ConfigError: The statement of the main script that is running now is not under an
            ``if __name__ == "__main__":``.
    """
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "<module>" and frame.f_globals is vars(main)
    ):
        frame = frame.f_back
    if path is None or frame is None:
        return
    try:
        statements = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return  # a zip application or the like: multiprocessing decides
    if any(_is_guard(node, frame.f_lineno) for node in statements):
        return
    raise ConfigError(
        f"num_workers={num_workers} starts processes that import {path}, and line "
        f"{frame.f_lineno} would train in each of them again. Put it under "
        f'`if __name__ == "__main__":` or use num_workers=0'
    )


def _is_guard(node: ast.stmt, line: int) -> bool:
    return (
        isinstance(node, ast.If)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and any(
            isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test)
        )
    )
