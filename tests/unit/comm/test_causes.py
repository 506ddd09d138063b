"""What an error of torch's means, by its type or by its text."""

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from evener.comm.causes import Cause, cause_of, is_of_an_exchange


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (DistNetworkError("whatever torch may say one day"), Cause.LOST),
        (DistStoreError("whatever torch may say one day"), Cause.TIMED_OUT),
        (DistBackendError("whatever torch may say one day"), Cause.OTHER),
        (RuntimeError("CUDA error: an illegal memory access"), Cause.OTHER),
        # As raised by Gloo in torch 2.13, when a peer was killed, stopped, or had given up.
        ("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1. This", Cause.LOST),
        ("[/gloo/pair.cc:537] Read error [::1]:1: Connection reset by peer. This is", Cause.LOST),
        ("[/gloo/pair.cc:537] Read error [::1]:1: Connection timed out. This", Cause.TIMED_OUT),
        ("[/gloo/unbound_buffer.cc:78] Timed out waiting 2000ms for recv", Cause.TIMED_OUT),
        ("Application timeout caused pair closure", Cause.TIMED_OUT),
        ("[/gloo/allreduce.cc:1] Invariant was not met", Cause.OTHER),
    ],
)
def test_type_and_text_tell_the_cause(error: Exception | str, cause: Cause) -> None:
    assert cause_of(RuntimeError(error) if isinstance(error, str) else error) is cause


def test_errors_of_an_exchange_are_told_from_a_scripts_own() -> None:
    assert is_of_an_exchange(DistBackendError("x"))
    assert is_of_an_exchange(RuntimeError("[/gloo/transport/tcp/pair.cc:553] x"))
    assert not is_of_an_exchange(RuntimeError("Broken pipe"))
    assert not is_of_an_exchange(OSError("/gloo/"))
