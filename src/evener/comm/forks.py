"""Close a forked child's copies of descriptors, which would outlive this process's death.

A peer learns of a death when the last descriptor of a connection is closed. A child that holds
copies (a worker of the user's ``DataLoader``, for example) delays that until it ends. Loads no
torch, as agents have connections, too.
"""

import gc
import os
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from weakref import WeakSet


class NotInherited(ABC):
    """A resource of this process alone. Every forked child closes its copy."""

    @abstractmethod
    def close_in_child(self) -> None:
        """Close the copied descriptors; called in the child, in which no other thread exists.

        It must not send anything: the connections belong to the parent, which still uses them.
        No lock of C++ code may be taken, for a thread of the parent may have held it.
        """


_resources: WeakSet[NotInherited] = WeakSet()
_kept: list[object] = []
_is_registered = False


def close_in_children(resource: NotInherited) -> None:
    """Make every child forked from now on close its copy of ``resource``.

    Args:
        resource: Known for as long as other code refers to it.
    """
    global _is_registered
    if not _is_registered and sys.platform != "win32":
        os.register_at_fork(after_in_child=_start_child)  # cannot be undone, so once only
        _is_registered = True
    _resources.add(resource)


def never_destroy(thing: object) -> None:
    """Keep a C++ object of the parent until this forked child ends.

    Its destructor would join threads that exist in the parent only, and so wait for ever.
    """
    _kept.append(thing)


def _start_child() -> None:
    never_destroy(_kept)  # a cycle, which outlives even this module when the interpreter ends
    for resource in list(_resources):
        with suppress(OSError):
            resource.close_in_child()
    _resources.clear()
    gc.freeze()  # the collector leaves alone whatever the parent had, the cycle included
    # The pools of threads did not survive the fork: an operation on several threads would hang.
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
