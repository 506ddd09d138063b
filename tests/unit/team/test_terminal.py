import io
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
