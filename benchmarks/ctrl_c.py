"""Whether Ctrl-C at random moments of ``evener pretrain --demo`` ever prints a traceback.

    python benchmarks/ctrl_c.py --json ctrl_c.json

Moments are drawn evenly between evener's start and ``--within`` seconds later. One row tells how
often a run ended in which way. The command fails if one printed a traceback.
"""

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile

from machine import load_before, write_report
from options import make_parser
from runs import RUN_TIMEOUT_S, clean_environment


def main() -> None:
    """Presses Ctrl-C as often as was asked for."""
    arguments = parse_arguments()
    before = load_before()
    draw = random.Random(arguments.seed)
    codes: collections.Counter[int] = collections.Counter()
    told = []
    for _ in range(arguments.moments):
        moment_s = draw.uniform(0.0, arguments.within)
        code, output = interrupted_after(moment_s)
        codes[code] += 1
        if "Traceback" in output:
            told.append(round(moment_s, 3))
            print(f"after {moment_s:.3f} s:\n{output}", file=sys.stderr)
    print(f"{arguments.moments} moments, {len(told)} tracebacks, exit codes {dict(codes)}")
    row = {
        "name": "pretrain",
        "moments": arguments.moments,
        "tracebacks_at_s": told,
        "exit_codes": {str(code): count for code, count in sorted(codes.items())},
    }
    write_report(arguments, before, [row])
    sys.exit(1 if told else 0)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--within", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def interrupted_after(seconds: float) -> tuple[int, str]:
    """Presses Ctrl-C once, as a terminal does: to the whole foreground group.

    Args:
        seconds: From the first line of evener's own code, before which Python speaks for itself.

    Returns:
        Exit code, and all that was printed.
    """
    said, begun = os.pipe()
    program = (
        f"import os, sys; os.close({begun}); sys.argv[:] = ['evener', *sys.argv[1:]]; "
        "from evener.__main__ import main; sys.exit(main())"
    )
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, "pretrain", "--demo", "--out", folder],
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[begun],
            start_new_session=True,
        )
        os.close(begun)
        os.read(said, 1)  # ends when the program closes its end
        os.close(said)
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
    return process.returncode, output


if __name__ == "__main__":
    main()
