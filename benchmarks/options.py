"""The options that several benchmarks have, and how they read lists."""

import argparse
from collections.abc import Callable, Collection


def make_parser(description: str) -> argparse.ArgumentParser:
    """A command line with ``--json``; its help begins with the first line of the description."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the report there")
    return parser


def some_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Reads some of these names, with commas between them."""

    def read(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [n for n in names if n not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return read


def numbers(text: str) -> list[int]:
    """Reads ``2,4`` as numbers."""
    values = [int(t) if t.isdecimal() else 0 for t in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0, such as 2,4")
    return values
