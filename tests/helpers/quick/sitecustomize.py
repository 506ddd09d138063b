"""Runs first in every process that tests start: torch's compiler stays out where nobody compiles.

The first optimizer of a process makes torch import ``torch._dynamo``, for more than a second, only
in order to tell it what not to compile. Here that much is answered without it; whoever asks for
anything else gets all of it. Ranks of tests start by the hundred.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class NotLoaded(ModuleType):
    """The compiler, before somebody asks for it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load(self)
        return getattr(self, name)


def load(module: ModuleType) -> None:
    """Makes the module what it would have been."""
    spec = module.__spec__
    assert spec is not None
    assert isinstance(spec.loader, LateLoader)
    module.__class__, module.__loader__, spec.loader = (
        ModuleType,
        spec.loader.real,
        spec.loader.real,
    )
    spec.loader.exec_module(module)


def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """As without a compiler."""
    return function


def graph_break(*_: Any, **__: Any) -> None:
    """As without a compiler."""


class LateLoader(Loader):
    """Gives the compiler the two functions that optimizers call."""

    def __init__(self, real: Loader) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(disable=disable, graph_break=graph_break)
        module.__class__ = NotLoaded


class SameLoader(Loader):
    """Gives a module that is there already."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class Finder(MetaPathFinder):
    """Finds the compiler for ``LateLoader``; what is inside it needs all of it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == COMPILER:
            spec = PathFinder.find_spec(name, path)
            if spec is not None and spec.loader is not None:
                spec.loader = LateLoader(spec.loader)
            return spec
        if name.startswith(f"{COMPILER}.") and isinstance(sys.modules[COMPILER], NotLoaded):
            load(sys.modules[COMPILER])
            if (module := sys.modules.get(name)) is not None:  # just now: not a second time
                module.__spec__ = ModuleSpec(name, SameLoader(module))
                return module.__spec__
        return None


sys.meta_path.insert(0, Finder())
