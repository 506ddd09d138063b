"""Network devices, notices in a store, and the words of torch."""

import pytest
from torch.distributed import HashStore

from evener.comm.messages import first_line
from evener.comm.network import devices_at
from evener.comm.notices import Notice, StoreNotices
from evener.errors import LaunchError


class Broken(HashStore):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("the connection has ended")

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the connection has ended")


def test_notices_by_rank() -> None:
    board = StoreNotices(HashStore(), range(3))
    assert board.read() == {}
    late, early = Notice(2, 1.0, "gradients: of window 3"), Notice(1, 0.5, "")
    board.post(2, late)
    assert board.read() == {2: late}
    board.post(0, early)
    assert board.read() == {0: early, 2: late}


def test_a_board_whose_host_is_gone_answers_nothing() -> None:
    board = StoreNotices(Broken(), range(2))
    assert board.read() is None
    board.post(0, Notice(1, 1.0, "x"))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "[/src/gloo/pair.cc:537] Read error [127.0.0.1]:8067: Connection reset by peer. "
            "This is typically caused by a remote worker hanging\nframe #0",
            "Read error [127.0.0.1]:8067: Connection reset by peer",
        ),
        ("Operation timed out!", "Operation timed out!"),
        ("[rank 1] no path here", "[rank 1] no path here"),
        ("", "RuntimeError"),
    ],
)
def test_messages_of_torch_without_paths_and_stacks(message: str, text: str) -> None:
    assert first_line(RuntimeError(message)) == text


def test_devices_are_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(devices_at("127.0.0.1")) == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert len(devices_at("127.0.0.1")) == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-if")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME is 'no-such-if'.*: name "):
        devices_at("127.0.0.1")


def test_an_address_of_another_machine_is_refused_with_the_remedy() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen at 192.*--address"):
        devices_at("192.0.2.1")
