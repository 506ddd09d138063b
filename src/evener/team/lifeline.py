"""Ends the ranks when their launcher has gone without a word, killed by SIGKILL for example.

A program of its own, run by path, that needs nothing but the standard library. Its standard input
is a pipe that only the launcher holds: a line with the process group of a rank adds it, the same
line again removes it, and end-of-file means that the launcher is no more. The ranks' own request to
die with their parent does not reach the processes that *they* started; killing the groups does.
"""

import os
import signal
import sys
from collections.abc import Iterable


def watch(lines: Iterable[str]) -> set[int]:
    """Read the pipe to its end and return the process groups that are left."""
    groups: set[int] = set()
    for line in lines:
        groups ^= {int(line)}
    return groups


def main() -> None:
    """Wait for the launcher's end, then kill what it has left."""
    for group in watch(sys.stdin):
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            continue  # ended by itself


if __name__ == "__main__":
    main()
