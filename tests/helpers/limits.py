"""How long tests wait for what should come: so long that only a hang can take longer."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0
"""For one answer, such as the end of a process that imports torch: seconds on a quiet machine, but
others may use the same cores, and there are slower ones. pytest's own limit for a whole test
(pyproject.toml) is longer, so that the wait that failed can say for what."""


def wait_until(condition: Callable[[], object], wait_s: float = PATIENCE_S) -> None:
    """Waits for what nothing tells of, such as the work of other processes."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline_s, f"it did not come within {wait_s:g} s"
        time.sleep(0.01)
