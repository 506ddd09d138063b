"""What is kept of rounding: by buffer, in the units of what is exchanged, for one set of ranks."""

import gc

import torch

from evener.averaging.feedback import ErrorFeedback
from evener.comm.base import Communicator
from evener.comm.threads import ThreadTeam, ThreadTransport


class RoundingTransport(ThreadTransport):
    """Ranks that could round."""

    can_round = True


def rounding_comm():
    return Communicator(RoundingTransport(ThreadTeam(2), 0))


def test_each_buffer_has_its_own_and_other_ranks_begin_without():
    feedback, comm = ErrorFeedback("bfloat16"), rounding_comm()
    one, other = torch.ones(10), torch.ones(10)
    feedback.use(comm)
    feedback.of(one).fill_(3.0)
    assert (feedback.of(one) == 3.0).all()
    assert not feedback.of(other).any()
    feedback.use(comm)
    assert (feedback.of(one) == 3.0).all()
    feedback.use(rounding_comm())
    assert not feedback.of(one).any()


def test_another_scale_changes_units_and_nothing_else():
    feedback, buffer = ErrorFeedback("bfloat16"), torch.ones(4)
    feedback.use(rounding_comm())
    feedback.rescale(64.0)  # numbers are gradients divided by it
    feedback.of(buffer).copy_(torch.tensor([1.0, -3.0, 1e30, 0.0]))
    feedback.rescale(64.0)
    feedback.rescale(16.0)
    assert feedback.of(buffer).tolist() == [4.0, -12.0, float(torch.tensor(1e30)) * 4, 0.0]
    feedback.rescale(2.0**-100)  # more than float32 holds: let go, never infinite
    assert feedback.of(buffer).isfinite().all()


def test_nothing_is_kept_where_nothing_is_rounded():
    comm, exact = rounding_comm(), ErrorFeedback()
    exact.use(comm)
    assert exact.of(torch.ones(4)) is None
    feedback = ErrorFeedback("bfloat16")
    assert feedback.of(torch.ones(4)) is None
    feedback.use(comm)
    assert feedback.of(torch.ones(4, dtype=torch.float64)) is None
    feedback.use(Communicator())
    assert feedback.of(torch.ones(4)) is None


def test_a_buffer_that_is_gone_takes_its_own_along():
    feedback, buffer = ErrorFeedback("bfloat16"), torch.ones(4)
    feedback.use(rounding_comm())
    feedback.of(buffer)
    del buffer
    gc.collect()
    assert len(feedback._lost) == 0
