"""The one-rank leaf, and what all leaves word alike."""

import pytest
import torch

from evener.comm.base import (
    Communicator,
)
from evener.comm.messages import lost_message, mismatch_message, timeout_message
from evener.errors import CollectiveError, ConfigError


def test_one_rank_is_as_strict_as_many() -> None:
    comm = Communicator()
    with pytest.raises(ConfigError, match="strides"):
        comm.all_reduce(torch.zeros(4, 4).t()[::2], what="x")
    with pytest.raises(ConfigError, match="no rank 1"):
        comm.broadcast(torch.zeros(1), 1, what="x")
    comm.close()
    comm.close()
    for call in (
        lambda: comm.all_reduce(torch.zeros(1), what="sum"),
        lambda: comm.all_gather_rows([], what="sum"),
        lambda: comm.all_gather_bytes(b"", what="sum"),
        lambda: comm.barrier(what="sum"),
        lambda: comm.split([0], name="sum"),
    ):
        with pytest.raises(CollectiveError, match=r"sum.*: rank 0 has closed this communicator"):
            call()


def test_messages_name_who_and_what() -> None:
    text = timeout_message(0, "gradients of window 12", 30.04, (1,))
    assert text.startswith("rank 0 waited 30.0 s in 'gradients of window 12' for rank 1: ")
    assert "for the others (which of them is not known)" in timeout_message(0, "x", 1.0, ())
    assert lost_message(2, "header", "reset").startswith("rank 2 lost a peer in 'header': reset; ")
    assert "rank 0 in 'a', rank 1 in 'b', rank 3 in 'c'" in mismatch_message(
        0, "'a'", [(1, "'b'"), (3, "'c'")]
    )
