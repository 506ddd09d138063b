"""End the ranks if their launcher was killed without a message, by SIGKILL for example.

A separate program, run by path, that needs only the standard library. Its standard input is a pipe
that only the launcher holds: a line with the process group of a rank adds it, the same line again
removes it, and end-of-file means that the launcher has ended. Ranks die with their parent, but the
processes that *they* started do not, so the groups are killed. A line that begins with a slash
names a file to be removed then.
"""

import os
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[str]) -> set[str]:
    """Read the pipe to its end and return the process groups and files that are left."""
    left: set[str] = set()
    for line in lines:
        left ^= {line.rstrip("\n")}
    return left


def main() -> None:
    """Wait for the launcher's end, then kill the remaining process groups."""
    for left in watch(sys.stdin):
        try:
            if left.startswith("/"):
                os.unlink(left)  # noqa: PTH108  (importing pathlib takes long)
            else:
                os.killpg(int(left), signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            continue  # ended by itself


if __name__ == "__main__":
    main()
