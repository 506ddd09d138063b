"""Runs the code blocks of a Markdown file, in their order, in one folder.

- A ```python block is a script of its own: it must run as it stands.
- In a ```console block each line that starts with `$ ` is a command (`\\` at the end goes on in the
  next line) and must end with status 0. Other lines show its output and are not compared.

A comment on the line before a block changes that:

- ``<!-- file: train.py -->``: the block is written to that file, for the commands that follow.
- ``<!-- continues -->``: the Python block goes on where the one before ended.
- ``<!-- not run: REASON -->``: what cannot run here, such as an installation or two machines.
- ``<!-- port: NAME -->``: a diff of two scripts, for ``tests/recipes/test_porting.py``.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NOTES = ("file", "continues", "not run", "port")
RUN = ("python", "console")


@dataclass(frozen=True)
class Block:
    """A fenced block: ``line`` is that of its fence, ``note`` the comment before it, split."""

    language: str
    text: str
    line: int
    note: tuple[str, str] = ("", "")


def blocks(text: str) -> Iterator[Block]:
    """Every fenced block of a Markdown text.

    Raises:
        ValueError: A fence is not closed, a comment is misspelt, or a block is left out without a
            reason.
    """
    lines = text.splitlines()
    i = 0
    while i < len(lines):
        fence = re.match(r"( *)(```+)(\{?[\w-]*\}?)\s*$", lines[i])
        if not fence:
            i += 1
            continue
        indent, ticks, language = fence.groups()
        end = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == ticks), None)
        if end is None:
            raise ValueError(f"line {i + 1}: this block is not closed")
        body = "".join(f"{line.removeprefix(indent)}\n" for line in lines[i + 1 : end])
        yield Block(language, body, i + 1, note(lines[i - 1] if i else "", i))
        i = end + 1


def note(line: str, number: int) -> tuple[str, str]:
    """The comment before a block as (what, value)."""
    comment = re.fullmatch(r"\s*<!--\s*([a-z ]+?)\s*(?::\s*(.*?))?\s*-->\s*", line)
    if not comment:
        return "", ""
    what, value = comment[1], comment[2] or ""
    if what not in NOTES:
        raise ValueError(f"line {number}: unknown comment {what!r}; use one of {', '.join(NOTES)}")
    if bool(value) == (what == "continues"):
        raise ValueError(f"line {number}: {what!r} {'takes no' if value else 'needs a'} value")
    return what, value


def commands(text: str) -> list[str]:
    """The commands of a console block."""
    joined = re.sub(r"\\\n\s*(?:> )?", " ", text)
    return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def is_example(block: Block) -> bool:
    """Whether it is a script that trains."""
    return block.language == "python" and ("Ddp." in block.text or "Trainer(" in block.text)


def is_example_of_a_loop(block: Block) -> bool:
    """Whether it is a script that trains in its own process: one rank, or each of several.

    One that kills a rank runs under the launcher that its page starts.
    """
    runs = is_example(block) and block.note[0] != "not run"
    return runs and "Ddp.builder" not in block.text and "os.kill(" not in block.text


def run_blocks(
    document: Path,
    folder: Path,
    *,
    timeout_s: float,
    leave_out: Callable[[Block], bool] = lambda block: False,
) -> int:
    """Runs all blocks; returns how many commands and scripts that were.

    Args:
        document: The Markdown file.
        folder: Where they run; the files of the repository are linked into it.
        timeout_s: For each script and command.
        leave_out: Which scripts are not run.

    Raises:
        AssertionError: One failed; the message says where, and what it printed.
    """
    count, script = 0, ""
    for block in blocks(document.read_text(encoding="utf-8")):
        what, value = block.note
        place = f"{document.name}:{block.line}"
        if what == "not run" or (block.language not in RUN and what != "file"):
            continue
        if what == "file":
            target = folder / value
            if target.is_symlink():
                target.unlink()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text)
        elif block.language == "python":
            script = script + block.text if what == "continues" else block.text
            if leave_out(block):
                continue
            (folder / "block.py").write_text(script)
            run([sys.executable, "block.py"], folder, place, timeout_s)
            count += 1
        else:
            found = commands(block.text)
            assert found, f"{place}: no line starts with '$ '; use ```text for output"
            for command in found:
                words = shlex.split(command, comments=True)
                assert "test" not in words or "dev.py" not in " ".join(words), (
                    f"{place}: {command!r} would run this test again; mark it as not run"
                )
                run(["bash", "-euo", "pipefail", "-c", command], folder, place, timeout_s)
                count += 1
    return count


def run(command: list[str], folder: Path, place: str, timeout_s: float) -> None:
    programs = Path(sys.executable).parent
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ
        | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "EVENER_DEV_FROZEN": "1",  # dev.py must not make .venv anew under the running tests
            "HF_HUB_OFFLINE": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (
        f"{place}: {command[-1]!r} ended with status {done.returncode}\n{done.stdout[-4000:]}"
    )
