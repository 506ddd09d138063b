"""The held-out loss of a language model, computed by the whole team."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from evener.data.packing import PackedDocuments
from evener.ddp import Ddp
from evener.planning.apportion import apportion
from evener.tasks.language_model import summed_loss
from evener.tasks.text_data import collate


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutLoss:
    """What an evaluation came to; the same on every rank but for the time.

    Attributes:
        loss: Mean cross-entropy per counted token, in nats.
        num_tokens: Tokens that it is the mean of.
        elapsed_s: Seconds that it took.
    """

    loss: float
    num_tokens: int
    elapsed_s: float


def heldout_loss(
    ddp: Ddp,
    model: nn.Module,
    data: PackedDocuments,
    *,
    shares: Sequence[int],
    micro_batch_size: int,
    max_sequences: int | None,
) -> HeldoutLoss | None:
    """Mean loss per token over held-out text, exact over ranks; all ranks call it together.

    Args:
        ddp: The team.
        model: The model that the team trains.
        data: The held-out side.
        shares: Relative amounts of work by rank, the same on every rank; zeros are an equal split.
        micro_batch_size: Most samples of one forward.
        max_sequences: Take only so many first samples; ``None`` takes all.

    Returns:
        ``None`` when a rank was told to stop meanwhile.
    """
    count = min(len(data), max_sequences or len(data))
    split = apportion(count, shares if sum(shares) else [1] * ddp.world_size)
    first = sum(split[: ddp.rank])
    stop = first + split[ddp.rank]
    loss_sum, num_tokens = 0.0, 0
    began_s = time.perf_counter()
    with ddp.evaluating():
        for start in range(first, stop, micro_batch_size):
            if ddp.wants_stop():
                break
            batch = collate([data[i] for i in range(start, min(start + micro_batch_size, stop))])
            with ddp.emulated_slowness():
                loss_sum += summed_loss(model, batch, ddp.device)
            num_tokens += batch.num_tokens
    loss = ddp.weighted_mean(loss_sum / num_tokens if num_tokens else 0.0, num_tokens)
    if ddp.stopping:
        return None
    return HeldoutLoss(
        loss=loss,
        num_tokens=data.count_targets(count),
        elapsed_s=time.perf_counter() - began_s,
    )
