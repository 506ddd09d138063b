"""Hosts of a fixed team are counted, and ranks are numbered host by host."""

import pytest

from evener.protocol.hosts import Host, Hosts


def node(number, nproc=1, nnodes=3, port=7):
    return Host(number=number, nnodes=nnodes, nproc=nproc, port=port, where=f"10.0.0.{number}")


def test_ranks_follow_the_numbers_of_hosts_and_not_their_arrival():
    nodes = Hosts(3)
    assert nodes.missing == "nodes 0, 1, 2 of 3"
    for agent, each in (("c", node(2, 3)), ("a", node(0, 2, port=9)), ("b", node(1, 1))):
        assert nodes.arrive(agent, each) == ""
    assert nodes.missing == ""
    assert nodes.first_ranks() == {"a": 0, "b": 2, "c": 3}
    assert (nodes.world_size, nodes.master_port) == (6, 9)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (node(1, nnodes=2), "node 0 was started with --nnodes 3, node 1 with --nnodes 2"),
        (node(3), "node 3 of 3 with 1 ranks is invalid"),
        (node(-1), "node -1 of 3"),
        (node(0), "two machines were started with --node-rank 0"),
    ],
)
def test_who_does_not_fit_is_refused(wrong, why):
    nodes = Hosts(3)
    nodes.arrive("a", node(0))
    assert nodes.arrive("b", wrong).startswith(why)
    assert nodes.missing == "nodes 1, 2 of 3"


def test_who_goes_before_all_are_there_may_come_again():
    nodes = Hosts(2)
    nodes.arrive("b", node(1, nnodes=2))
    assert nodes.depart("b") is None
    assert nodes.missing == "nodes 0, 1 of 2"
    nodes.arrive("b again", node(1, nnodes=2))
    nodes.arrive("a", node(0, nnodes=2))
    assert nodes.depart("b again") == node(1, nnodes=2)
    # A team that has begun keeps its numbers.
    assert nodes.missing == ""
    assert nodes.arrive("late", node(1, nnodes=2)).startswith("two machines")
