"""``python -m evener`` and the command ``evener``."""

import signal
import sys


def main() -> int:
    """Run the command line; Ctrl-C is held back until ``evener.cli`` is imported and handles it.

    Returns:
        The exit code; see ``evener.cli.main``.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # `run_child` lets it through
    from evener.cli import main as run_command_line

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
