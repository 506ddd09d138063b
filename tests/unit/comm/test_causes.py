"""What an error of torch's means: by its type, by the operation's state, last by its text."""

from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from evener.comm.causes import Cause, cause_of, is_of_an_exchange


class Operation:
    """An operation that has ended, as NCCL's: with a result beside the exception."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def get_future_result(self) -> Any:
        future: torch.futures.Future[int] = torch.futures.Future()
        if self._result is not None:
            future.set_result(int(self._result))
        return future


class GlooOperation:
    """An operation of Gloo's: it keeps no result."""

    def get_future_result(self) -> Any:
        raise RuntimeError("Work::getFutureResult not implemented.")


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DistNetworkError("whatever torch may say one day"), Cause.LOST),
        (DistStoreError("whatever torch may say one day"), Cause.TIMED_OUT),
        (DistBackendError("whatever torch may say one day"), Cause.OTHER),
        (RuntimeError("CUDA error: an illegal memory access"), Cause.OTHER),
    ],
)
def test_the_type_decides_where_it_can(error: Exception, cause: Cause) -> None:
    assert cause_of(error, [GlooOperation()]) is cause


@pytest.mark.parametrize(
    ("result", "cause"),
    [("TIMEOUT", Cause.TIMED_OUT), ("COMM_ERROR", Cause.LOST), ("UNKNOWN", Cause.OTHER)],
)
def test_the_operations_state_decides_next(result: str, cause: Cause) -> None:
    known = getattr(torch._C._distributed_c10d.WorkResult, result).value
    works = [Operation(None), Operation(0), Operation(known)]
    assert cause_of(DistBackendError("NCCL says what it says"), works) is cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        # As raised by Gloo in torch 2.13, when a peer was killed, stopped, or had given up.
        ("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1. This", Cause.LOST),
        ("[/gloo/pair.cc:537] Read error [::1]:1: Connection reset by peer. This is", Cause.LOST),
        ("[/gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", Cause.TIMED_OUT),
        ("Application timeout caused pair closure", Cause.TIMED_OUT),
        ("[/gloo/allreduce.cc:1] Invariant was not met", Cause.OTHER),
    ],
)
def test_the_text_decides_last(text: str, cause: Cause) -> None:
    assert cause_of(RuntimeError(text), [GlooOperation()]) is cause


def test_errors_of_an_exchange_are_told_from_a_scripts_own() -> None:
    assert is_of_an_exchange(DistBackendError("x"))
    assert is_of_an_exchange(RuntimeError("[/gloo/transport/tcp/pair.cc:553] x"))
    assert not is_of_an_exchange(RuntimeError("Broken pipe"))
    assert not is_of_an_exchange(OSError("/gloo/"))
