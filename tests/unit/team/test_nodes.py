"""Machines that meet before any rank starts: options, numbers, and what can be wrong."""

import socket
import threading

import pytest

from evener.errors import ConfigError, EvenerError
from evener.team.launch import LaunchPlan, open_team
from evener.team.nodes import DEFAULT_PORT, Nodes, choose_nodes
from helpers.limits import PATIENCE_S
from helpers.ports import free_port

# ── what the user says ───────────────────────────────────────────────────────────────────────────


def choose(nnodes="2", node_rank=0, master_addr="10.0.0.1", port=None):
    return choose_nodes(nnodes, node_rank, master_addr, port, timeout_s=600.0)


def test_without_options_the_run_is_on_this_machine():
    assert choose(None, None, None) is None
    assert choose("1", None, None) is None
    assert choose("1", 0, "10.0.0.1") is None


@pytest.mark.parametrize(
    ("address", "port", "expected"),
    [
        ("10.0.0.1", None, ("10.0.0.1", DEFAULT_PORT)),
        ("10.0.0.1", 1234, ("10.0.0.1", 1234)),
        ("[fe80::1]:1234", None, ("fe80::1", 1234)),
        ("node0:1234", 1234, ("node0", 1234)),
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
        ({"nnodes": "0"}, "--nnodes is '0:0'; give the fewest"),
        ({"nnodes": "2:x"}, "--nnodes is '2:x'; give the fewest"),
        ({"node_rank": None}, "--nnodes is 2, but --node-rank is missing"),
        ({"master_addr": None}, "--nnodes is 2, but --master-addr is missing"),
        ({"node_rank": 2}, "--node-rank is 2, but --nnodes is 2; .* 0 to 1"),
        ({"node_rank": -1}, "--node-rank is -1"),
        ({"nnodes": "1", "node_rank": 1}, "--node-rank is 1, but --nnodes is 1"),
        ({"master_addr": "a b"}, "--master-addr is 'a b', which is not a host"),
        ({"master_addr": "a:1", "port": 2}, "'a:1', but --port is 2; name one port"),
    ],
)
def test_options_that_do_not_fit_are_named(given, named):
    with pytest.raises(ConfigError, match=named):
        choose(**given)


# ── machines meet ────────────────────────────────────────────────────────────────────────────────


def plan(number, port, nnodes=3, nproc=1, timeout_s=PATIENCE_S, host="127.0.0.1"):
    nodes = Nodes(
        least=nnodes, most=nnodes, number=number, host=host, port=port, timeout_s=timeout_s
    )
    return LaunchPlan(nproc=nproc, nodes=nodes)


def enter(*plans):
    """Enters a team on a thread for each host; the ranks of each, or the error it ended with."""
    results = [None] * len(plans)
    are_in = threading.Barrier(len(plans))

    def body(place):
        try:
            with open_team(plans[place]) as team:
                results[place] = team.ranks
                are_in.wait(PATIENCE_S)
        except EvenerError as error:
            results[place] = str(error)
            are_in.abort()
        except threading.BrokenBarrierError:
            pass

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


def test_ranks_are_numbered_host_after_host():
    port = free_port()
    # The others may well come first.
    third, first, second = enter(plan(2, port, nproc=3), plan(0, port, nproc=2), plan(1, port))
    places = [(r.first, r.count, r.world_size, r.host) for r in (first, second, third)]
    assert places == [
        (0, 2, 6, "127.0.0.1"),
        (2, 1, 6, "127.0.0.1"),
        (3, 3, 6, "127.0.0.1"),
    ]
    # A script's own process group has another port than the machines.
    assert first.port == second.port == third.port != port


def test_a_machine_that_is_missing_is_named(capsys):
    (said,) = enter(plan(0, free_port(), timeout_s=1.5))
    assert said.startswith("node 0 waited 2 s at 127.0.0.1:")
    assert "for nodes 1, 2 of 3: start the same command there" in said
    assert "node 0 waits at 127.0.0.1:" in capsys.readouterr().err


def test_a_number_given_twice_and_another_number_of_machines_are_refused(capsys):
    port = free_port()
    with open_team(plan(0, port, nnodes=1)) as team:
        assert (team.ranks.first, team.ranks.world_size) == (0, 1)
        (twice,) = enter(plan(0, port, nnodes=1))
        assert "cannot listen" in twice
        (other,) = enter(plan(1, port, nnodes=2))
    words = "node 0 was started with --nnodes 1, node 1 with --nnodes 2"
    assert other.startswith(words)
    assert f"refused a launcher: {words}" in capsys.readouterr().err


def test_something_else_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 welcome\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (said,) = enter(plan(1, server.getsockname()[1], timeout_s=0.5))
        thread.join(PATIENCE_S)
    assert "waited" in said
