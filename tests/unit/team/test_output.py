import os
import socket
import time
from contextlib import suppress

import pytest

from evener.team.output import OutputPump
from helpers.limits import PATIENCE_S


@pytest.fixture
def pumped(tmp_path):
    """What reaches the target when the source is written in these chunks."""

    def run(chunks):
        path = tmp_path / "target"
        source = os.pipe()
        with os.fdopen(source[0], "rb") as reader, path.open("wb") as target:
            pump = OutputPump()
            pump.carry(b"[rank 1] ", reader, target.fileno())
            for chunk in chunks:
                os.write(source[1], chunk)
            os.close(source[1])
            assert pump.finish(PATIENCE_S)
        return path.read_bytes()

    return run


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"one\ntwo\n"], b"[rank 1] one\n[rank 1] two\n"),
        ([b"on", b"e\ntw", b"o\n"], b"[rank 1] one\n[rank 1] two\n"),
        ([b"no end"], b"[rank 1] no end\n"),
        ([b"\n\n"], b"[rank 1] \n[rank 1] \n"),
        ([b"\xff\x00\xfe\n"], b"[rank 1] \xff\x00\xfe\n"),
        ([b" 10%\r 20%\r\n"], b"[rank 1]  10%\r 20%\r\n"),
        ([], b""),
    ],
)
def test_every_line_gets_its_mark(pumped, chunks, expected):
    assert pumped(chunks) == expected


def test_a_line_without_end_is_cut_and_nothing_is_lost(pumped):
    sent = b"".join(bytes([65 + i]) * 10_000 for i in range(20))
    written = pumped([sent[i : i + 30_000] for i in range(0, len(sent), 30_000)])
    assert 2 <= written.count(b"[rank 1] ") <= 4
    assert written.replace(b"[rank 1] ", b"").replace(b"\n", b"") == sent


def test_a_closed_target_does_not_stop_the_reading():
    source, target = os.pipe(), os.pipe()
    os.close(target[0])
    with os.fdopen(source[0], "rb") as reader:
        pump = OutputPump()
        pump.carry(b"", reader, target[1])
        for _ in range(64):  # far more than a pipe holds
            os.write(source[1], b"line\n" * 8_000)
        os.close(source[1])
        assert pump.finish(PATIENCE_S)
    os.close(target[1])


def test_a_reader_that_pauses_is_waited_for():
    ours, theirs = socket.socketpair()
    source = os.pipe()
    with ours, theirs, os.fdopen(source[0], "rb") as reader:
        theirs.setblocking(False)
        full = 0
        with suppress(BlockingIOError):
            while True:
                full += theirs.send(b"x" * 4096)
        pump = OutputPump()
        pump.carry(b"", reader, theirs.fileno())
        os.write(source[1], b"the end\n")
        os.close(source[1])
        deadline = time.monotonic() + PATIENCE_S
        while not pump.is_writing and time.monotonic() < deadline:
            assert not pump.finish(0.01)
        assert pump.is_writing
        received = bytearray()
        while len(received) < full + len(b"the end\n"):
            received += ours.recv(1 << 20)
        assert received.endswith(b"xthe end\n")
        assert pump.finish(PATIENCE_S)
        assert not pump.is_writing
