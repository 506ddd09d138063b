import io
import signal
import subprocess
import sys

import pytest

from evener.team.terminal import say


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "written"), [(Terminal(), "\r\x1b[2Kwords\n"), (io.StringIO(), "words\n")]
)
def test_words_take_the_place_of_a_line_of_progress(monkeypatch, stream, written):
    monkeypatch.setattr(sys, "stderr", stream)
    say("words")
    assert stream.getvalue() == written


def test_a_reader_of_the_answer_may_leave() -> None:
    script = "from evener.team.terminal import answer\nfor _ in range(99): answer('x' * 9999)"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), errors) == (128 + signal.SIGPIPE, "")
