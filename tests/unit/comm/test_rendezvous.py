"""How ranks find one another, without processes: over an in-memory store."""

import socket
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from evener.comm import rendezvous
from evener.comm.notices import Notice, StoreNotices
from evener.comm.rendezvous import (
    call_roll,
    choose_devices,
    first_line,
    open_store,
)
from evener.errors import LaunchError
from helpers.limits import PATIENCE_S
from helpers.ports import free_port


def call_all(store: HashStore, world_sizes: list[int], timeout_s: float = 100.0) -> list[Any]:
    results: list[Any] = [None] * len(world_sizes)

    def body(rank: int, world_size: int) -> None:
        try:
            results[rank] = call_roll(store, rank, world_size, hosts=True, timeout_s=timeout_s)
        except LaunchError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=body, args=item) for item in enumerate(world_sizes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return results


def test_the_roll_gives_all_the_same_new_key() -> None:
    store = HashStore()
    keys = set()
    for _ in range(3):  # over one store, as under an agent
        first, *others = call_all(store, [3, 3, 3])
        assert others == [first, first]
        assert first[1] == 0
        keys.add(first[0])
    assert len(keys) == 3


def test_keys_of_the_dead_are_not_believed() -> None:
    store = HashStore()
    store.set("evener/hello/1", "0123456789abcdef")
    store.set("evener/roll/1", "0123456789abcdef feedfeedfeedfeed 2")
    store.set("evener/here/1", "feedfeedfeedfeed 2")
    store.set("evener/go/feedfeedfeedfeed", "rank")
    first, second = call_all(store, [2, 2])
    assert first == second
    assert first[0] != "feedfeedfeedfeed"
    (alone,) = call_all(store, [2], timeout_s=0.2)
    assert "rank 0 waited 0 s for rank 1 of 2 to join" in alone


def test_who_is_missing_is_named_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def pause(patience: Any) -> bool:
        """The deadline passes one round after rank 1 has come."""
        time.sleep(0.001)
        came, patience.came = getattr(patience, "came", False), store.check(["evener/here/1"])
        return not came

    monkeypatch.setattr(rendezvous._Patience, "pause", pause)
    first, second = call_all(store, [3, 3])
    assert "rank 0 waited 100 s for rank 2 of 3 to join" in first
    assert "rank 1 of 3 waited 100 s for some rank to join (rank 0 says which)" in second


def test_unlike_world_sizes_are_told_on_both_sides() -> None:
    first, second = call_all(HashStore(), [2, 3])
    assert "rank 0 was started for 2 ranks and rank 1 for 3" in first
    assert "rank 1 was started for 3 ranks and rank 0 for 2" in second


def test_rank_0_at_the_address_of_another_host_says_so_in_time() -> None:
    # 192.0.2.0/24 is set aside for documentation: no host has such an address.
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"rank 0 .* does not reach itself at 192\.0\.2\.7:"):
        open_store("192.0.2.7", free_port(), hosts=True, listen_fd=None, timeout_s=1.0)
    assert time.monotonic() - began < PATIENCE_S


def test_notices_by_rank() -> None:
    board = StoreNotices(HashStore(), range(3), None)
    assert board.read() == {}
    late, early = Notice(2, 1.0, "gradients: of window 3"), Notice(1, 0.5, "")
    assert board.post(2, late)
    assert board.read() == {2: late}
    assert board.post(0, early)
    assert board.read() == {0: early, 2: late}


def test_a_board_whose_host_is_gone_answers_nothing() -> None:
    board = StoreNotices(HashStore(), range(2), ("127.0.0.1", 1))  # nothing listens on port 1
    assert board.read() is None
    assert not board.post(0, Notice(1, 1.0, "x"))


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
    assert len(choose_devices("127.0.0.1", 1)) == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    assert len(choose_devices("127.0.0.1", 1)) == 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-if")
    with pytest.raises(LaunchError, match=r"GLOO_SOCKET_IFNAME is 'no-such-if'.*: name "):
        choose_devices("127.0.0.1", 1)


def test_a_server_that_says_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"127.0.0.1:{port} takes .* \(silent for 1 s\)"):
            open_store("127.0.0.1", port, hosts=False, listen_fd=None, timeout_s=1.0)
