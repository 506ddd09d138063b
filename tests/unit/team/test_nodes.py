"""Machines that meet before any rank starts: options, numbers, and what can be wrong."""

import json
import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from evener.errors import ConfigError, LaunchError
from evener.team.environment import DistributedTrainConfig
from evener.team.meeting import DEFAULT_PORT, Node, NodeOptions, choose_node, meet
from evener.team.supervisor import LocalRanks, rank_environment
from evener.version import __version__
from helpers.limits import PATIENCE_S
from helpers.ports import free_port

# ── what the user says ───────────────────────────────────────────────────────────────────────────


def choose(nnodes=2, node_rank=0, master_addr="10.0.0.1", port=None):
    options = NodeOptions(nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, port=port)
    return choose_node(options, 600.0)


def test_without_options_the_run_is_on_this_machine():
    assert choose(None, None, None) is None
    assert choose(1, None, None) is None
    assert choose(1, 0, "10.0.0.1") is None


@pytest.mark.parametrize(
    ("address", "port", "expected"),
    [
        ("10.0.0.1", None, ("10.0.0.1", DEFAULT_PORT)),
        ("10.0.0.1", 1234, ("10.0.0.1", 1234)),
        ("node0:1234", None, ("node0", 1234)),
        ("node0:1234", 1234, ("node0", 1234)),
        ("[fe80::1]:1234", None, ("fe80::1", 1234)),
        ("[fe80::1]", 7, ("fe80::1", 7)),
        ("fe80::1", None, ("fe80::1", DEFAULT_PORT)),
    ],
)
def test_where_machines_meet(address, port, expected):
    node = choose(master_addr=address, port=port)
    assert (node.host, node.port) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"nnodes": None}, "--node-rank is 0, but --nnodes is missing"),
        ({"nnodes": None, "node_rank": None}, "--master-addr is 10.0.0.1, but --nnodes is missing"),
        ({"nnodes": 0}, "--nnodes is 0"),
        ({"node_rank": None}, "--nnodes is 2, but --node-rank is missing"),
        ({"master_addr": None}, "--nnodes is 2, but --master-addr is missing"),
        ({"node_rank": 2}, "--node-rank is 2, but --nnodes is 2; .* 0 to 1"),
        ({"node_rank": -1}, "--node-rank is -1"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank is 1, but --nnodes is 1"),
        ({"master_addr": ""}, "--master-addr is '', which is not a host"),
        ({"master_addr": "a b"}, "--master-addr is 'a b', which is not a host"),
        ({"master_addr": "tcp://a"}, "--master-addr is 'tcp://a'"),
        ({"master_addr": "[fe80::1]x"}, "which is not a host"),
        ({"master_addr": "a:"}, "'a:'; give a port"),
        ({"master_addr": "a:x"}, "'a:x'; give a port"),
        ({"master_addr": "a:70000"}, "'a:70000'; give a port"),
        ({"master_addr": "a:1", "port": 2}, "'a:1', but --port is 2; name one port"),
        ({"port": 70_000}, "--port is 70000"),
    ],
)
def test_options_that_do_not_fit_are_named(given, named):
    with pytest.raises(ConfigError, match=named):
        choose(**given)


def test_a_rank_on_the_second_machine_knows_its_place():
    ranks = LocalRanks(first=2, count=1, world_size=3, host="10.0.0.1", port=29_500)
    environ = rank_environment({}, ranks, 0)
    config = DistributedTrainConfig.from_env(environ)
    assert (config.rank, config.world_size) == (2, 3)
    assert (config.local_rank, config.local_world_size) == (0, 1)
    assert (config.coordinator_addr, config.coordinator_port) == ("10.0.0.1", 29_500)


# ── machines meet ────────────────────────────────────────────────────────────────────────────────


def node(number, port, nnodes=3, timeout_s=PATIENCE_S):
    return Node(number=number, nnodes=nnodes, host="127.0.0.1", port=port, timeout_s=timeout_s)


def run_nodes(*nodes, counts=(2, 1, 3), store_waits=True):
    """Meets on a thread for each node; what each got, or the error that it ended with."""
    results = [None] * len(nodes)

    def body(place):
        try:
            ranks, store, peers = meet(nodes[place], counts[place], store_waits=store_waits)
            peers.close()
            results[place] = ranks
            if store is not None:
                results[place] = (ranks, store)
        except (LaunchError, OSError) as error:
            results[place] = str(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("store_waits", [True, False])
def test_ranks_are_numbered_node_after_node(store_waits):
    port = free_port()
    # The others may well come first.
    third, (first, store), second = run_nodes(
        node(2, port), node(0, port), node(1, port), counts=(3, 2, 1), store_waits=store_waits
    )
    with store:
        host, served = store.getsockname()[:2]
        assert (host, served == port) == ("127.0.0.1", False)
        assert store.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == store_waits
    places = [(r.first, r.count, r.world_size, r.host, r.port) for r in (first, second, third)]
    where = ("127.0.0.1", served)
    assert places == [(0, 2, 6, *where), (2, 1, 6, *where), (3, 3, 6, *where)]


def test_who_does_not_fit_is_told_and_named_by_node_0(capsys):
    port = free_port()
    first, second = run_nodes(node(0, port, nnodes=2, timeout_s=3.0), node(1, port, nnodes=3))
    assert "node 0 was started with --nnodes 2, node 1 with --nnodes 3" in second
    assert "(from 127.0.0.1)" in second
    assert f"node 0 waited 3 s at 127.0.0.1:{port} for node 1 of 2" in first
    assert f"; refused: {second}" in first
    said = capsys.readouterr().err
    assert f"refused a launcher: {second}; still waiting for node 1 of 2" in said


def test_a_number_given_twice_is_refused_where_it_is_the_second():
    port = free_port()
    with first_node(port, nnodes=3) as results:
        with visit(port, hello(nnodes=3)) as second:
            assert second.recv(64) == b'{"waiting": true}\n'
            (said,) = run_nodes(node(1, port))
            assert "two machines were started with --node-rank 1; number them from 0 to 2" in said
            (third,) = run_nodes(node(2, port))
            assert json.loads(second.makefile().readline())["first_rank"] == 2
        assert (third.first, third.world_size) == (3, 5)
    results[0][1].close()


def test_who_does_not_come_is_named():
    port = free_port()
    first, second = run_nodes(node(0, port, timeout_s=3.0), node(1, port))
    assert f"node 0 waited 3 s at 127.0.0.1:{port} for node 2 of 3: start" in first
    assert second == first


def test_nobody_at_the_address():
    port = free_port()
    (said,) = run_nodes(node(1, port, timeout_s=0.3))
    assert f"node 1 waited 0 s for node 0, but nothing listens on 127.0.0.1:{port} (Conn" in said
    assert "firewall" in said


def test_an_address_that_is_unknown_is_said_at_once():
    place = Node(number=1, nnodes=2, host="no.such.host.invalid", port=1, timeout_s=PATIENCE_S)
    (said,) = run_nodes(place)
    assert "'no.such.host.invalid' of node 0 is unknown here" in said


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (said,) = run_nodes(node(0, port))
    assert f"cannot listen on port {port} (Address already in use)" in said
    assert "--port" in said


def hello(**changes):
    said = {"evener": __version__, "node": 1, "nnodes": 2, "nproc": 1, **changes}
    return json.dumps(said).encode() + b"\n"


@contextmanager
def first_node(port, nnodes=2):
    """Node 0, waiting on a thread; gives the list that its result comes into."""
    results = []
    started = threading.Thread(
        target=lambda: results.extend(run_nodes(node(0, port, nnodes=nnodes)))
    )
    started.start()
    try:
        yield results
    finally:
        started.join(50)
        assert not started.is_alive()


def visit(port, text):
    """Connects to node 0 as soon as it listens, and says something."""
    while True:
        with suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port), 40.0)
            connection.sendall(text)
            return connection


def has_been_sent_away(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:  # it was cut short
        return True


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"evener": 1}\n',
        b'{"evener": "x", "node": true, "nnodes": 2, "nproc": 1}\n',
        b"[" * 4000 + b"\n",
        b'{"evener": "x", "node": ' + b"9" * 4000 + b', "nnodes": 2, "nproc": 1}\n',
        b"x" * 10_000,
        b"",
    ],
)
def test_strangers_are_sent_away_and_disturb_nobody(junk):
    port = free_port()
    with first_node(port) as results:
        with visit(port, junk) as stranger:
            assert not junk or has_been_sent_away(stranger)
        ranks, store, peers = meet(node(1, port, nnodes=2), 1, store_waits=True)
        peers.close()
        assert store is None
        assert (ranks.first, ranks.world_size) == (2, 3)
    results[0][1].close()


def test_a_machine_that_goes_before_all_are_there_may_come_again():
    port = free_port()
    with first_node(port, nnodes=3) as results:
        visit(port, hello(nnodes=3)).close()
        answers = run_nodes(node(1, port), node(2, port), counts=(1, 1))
        assert [ranks.first for ranks in answers] == [2, 3]
    results[0][1].close()


def test_another_version_is_refused_and_the_right_one_taken(capsys):
    port = free_port()
    with first_node(port) as results:
        with visit(port, hello(evener="0.0.1\x1b[2J")) as other:
            answer = json.loads(other.makefile().readline())
        assert f"node 0 runs evener {__version__}, node 1 runs 0.0.1?[2J" in answer["error"]
        meet(node(1, port, nnodes=2), 1, store_waits=True)[2].close()
    assert answer["error"] in capsys.readouterr().err
    results[0][1].close()


def test_a_connection_that_is_closed_unheard_is_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            server.accept()[0].close()
            with server.accept()[0] as connection:
                assert json.loads(connection.makefile().readline())["node"] == 1
                connection.sendall(b'{"waiting": true}\n{"first_rank": 2, "world_size": 3, ')
                connection.sendall(b'"host": "h", "port": 9}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        ranks, _, peers = meet(node(1, server.getsockname()[1]), 1, store_waits=True)
        peers.close()
        thread.join(PATIENCE_S)
    assert (ranks.first, ranks.world_size, ranks.host, ranks.port) == (2, 3, "h", 9)


def test_a_name_that_is_none_is_said_at_once():
    place = Node(number=1, nnodes=2, host="a" * 70, port=1, timeout_s=PATIENCE_S)
    (said,) = run_nodes(place)
    assert "of node 0 is unknown here" in said


def test_something_else_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = node(1, server.getsockname()[1])

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"220 welcome\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (said,) = run_nodes(place)
        thread.join(PATIENCE_S)
    assert "answered something else when node 1 asked for its ranks" in said


def test_who_gives_up_early_does_not_tell_of_a_long_wait(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        (said,) = run_nodes(node(1, server.getsockname()[1], timeout_s=0.2))
    assert said.startswith("node 1 waited 0 s at 127.0.0.1")
    assert capsys.readouterr().err == ""
