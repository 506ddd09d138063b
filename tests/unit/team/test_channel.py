"""What processes tell one another arrives whole, and what is no message harms nobody."""

import os
import socket
import threading
import time

import pytest

from evener.team.wire import Channel
from helpers.limits import PATIENCE_S


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_whole_however_they_are_cut(ends):
    channel, other = ends
    assert channel.receive() == []
    message = {"state": {"a": [1.5, None]}, "long": "x" * 1_000_000}
    sender = threading.Thread(target=other.send, args=(message,))
    sender.start()
    assert channel.next(time.monotonic() + PATIENCE_S) == message
    sender.join()
    other.send({"number": 1})
    other.send({"nan": float("inf")})
    other.close()
    assert [[*m] for m in channel.receive()] == [["number"], ["nan"]]
    assert channel.has_ended
    assert channel.receive() == []
    assert channel.next(0.0) is None
    channel.send({"to": "nobody"})


def test_messages_are_taken_one_by_one_and_waited_for_until_a_deadline(ends):
    channel, other = ends
    for number in range(3):
        other.send({"number": number})
    assert channel.next(time.monotonic() + PATIENCE_S) == {"number": 0}
    assert channel.receive() == [{"number": 1}, {"number": 2}]
    with pytest.raises(TimeoutError):
        channel.next(time.monotonic() + 0.01)


@pytest.mark.parametrize(
    ("said", "messages", "ends_it"),
    [
        (b"GET / HTTP/1.1\r\n", [{}], False),
        (b"[]\n", [{}], False),
        (b"[" * 90 + b"\n", [{}], False),
        (b"x" * 200, [{}], True),
    ],
)
def test_a_stranger_says_nothing_that_harms(said, messages, ends_it):
    ours, theirs = socket.socketpair()
    channel = Channel(ours, limit_bytes=100)
    with theirs:
        theirs.sendall(said)
        assert channel.receive() == messages
        assert channel.has_ended is ends_it
    channel.close()


def test_a_forked_child_does_not_keep_it_open(ends):
    channel, other = ends
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    other.close()
    assert channel.next(time.monotonic() + PATIENCE_S) is None
    os.close(writer)
    os.waitpid(child, 0)


def test_a_line_is_sent_whole_on_a_socket_with_a_timeout() -> None:
    """As after ``socket.setdefaulttimeout``: ``sendall`` would give up in the middle of a line."""
    one, other = socket.socketpair()
    one.setblocking(False)
    ours, theirs = Channel(one), Channel(other)
    text = "x" * 4_000_000
    sender = threading.Thread(target=lambda: [ours.send({"text": text}), ours.send({"last": 1})])
    sender.start()
    time.sleep(0.1)  # the buffers of the kernel are full by now
    assert theirs.next(time.monotonic() + PATIENCE_S) == {"text": text}
    assert theirs.next(time.monotonic() + PATIENCE_S) == {"last": 1}
    sender.join(PATIENCE_S)
    ours.close()
    theirs.close()


def test_an_end_that_takes_nothing_in_ends_the_connection_after_send_s() -> None:
    one, other = socket.socketpair()
    ours = Channel(one, send_s=0.2)
    ours.send({"text": "x" * 4_000_000})
    assert ours.has_ended
    other.settimeout(PATIENCE_S)
    while other.recv(1 << 20):  # what was sent of it, and then the end
        pass
    other.close()
