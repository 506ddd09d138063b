"""What every communicator must do while nothing goes wrong: one table for all leaves.

A case is a function of one rank's communicator and device; all ranks run it. ``run_cases`` runs the
whole table on one team, so that a team of processes is started once.
"""

import traceback
from collections.abc import Callable

from evener.comm.base import Communicator

Case = Callable[[Communicator, str], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_cases(comm: Communicator, device: str = "cpu") -> dict[str, str]:
    """Runs the table; the trace of what failed, by case."""
    failures = {}
    for name, function in CASES.items():
        try:
            function(comm, device)
        except BaseException:
            failures[name] = traceback.format_exc()
        # One rank's failed assertion must not be the next case's puzzle.
        comm.barrier(what=f"end of {name}")
    return failures


# ── sums ─────────────────────────────────────────────────────────────────────────────────────────


# ── copies ───────────────────────────────────────────────────────────────────────────────────────

# ── rows and bytes ───────────────────────────────────────────────────────────────────────────────


# ── splits ───────────────────────────────────────────────────────────────────────────────────────


# ── arguments ────────────────────────────────────────────────────────────────────────────────────
