"""A rank's report of its part of a window. Pure."""

from typing import Final, NamedTuple

#: Values of ``non_finite``, beside k + 1 for the gradient of trainable parameter k.
LOSS: Final = -1
PARAMETERS: Final = -2


class Report(NamedTuple):
    """One rank's part of a window, whatever the policy; all zeros where it had none.

    In a ``WindowResult``, where it is called ``RankRecord``, the last eleven (``LATE_FIELDS``) are
    about that window. They are 0 until it has been committed.

    Attributes:
        weight: Sum of the weights of its micro-batches; steps left out count nothing.
        loss_sum: Sum of weight times loss.
        compute_s: Seconds of compute, without any wait for other ranks.
        update_s: How much of ``compute_s`` was the optimizer's update, in SYNC: that of the window
            before, as this window's comes after the report.
        update_parts: Into how many parts ranks had divided that update, 1 for none.
        busy_s: Seconds of compute, and of waiting for data in between.
        micro_batches: Micro-batches computed.
        samples: Samples computed, those of steps left out included.
        steps: Local steps done, in CADENCE and ASYNC: batches off the front of its queue.
        skipped: How many of these it left out, because they were not finite.
        overflows: How many it left out because fp16 overflowed.
        non_finite: 0 if everything is finite; k > 0 if the gradient of trainable parameter k - 1
            (in flat order) is not; -1 if the loss is not; -2 if the parameters are not.
        own_norm: 2-norm of its own gradient; 0 without one, and where the update is divided among
            ranks, which then measure the mean alone.
        buffers_changed: Whether a buffer of its model was written.
        loss_scale: Its own loss scale; 0 where it has none.
        limit: Largest micro-batch that fits into its memory; 0 while there was enough.
        warmup_s: How much of ``compute_s`` does not show the rank's speed: the first micro-batch
            of each size includes one-time work (caches, autotuning, compiling).
        warmup_busy_s: And how much of ``busy_s``.
        warmup_micro_batches: How many of ``micro_batches`` these were.
        warmup_steps: How many of ``steps``.
        warmup_samples: And how many of ``samples``.
        wait_s: Seconds for which it waited for others in the previous window: known only after it.
        sync_s: Seconds that averaging then took of its time.
        hidden_s: Seconds for which gradients had travelled by then while it computed, in SYNC. On
            ranks that are ahead of others, waiting for theirs is included.
        elapsed_s: Seconds on its clock from applying the window before that one, or the beginning
            of the epoch, to applying it; evaluating and saving in between are included.
        divergence: Its distance from the average of the previous window, relative to that.
        stale_steps: Local steps that it had made when that average landed.
        data_s: Seconds for which it waited for data in that window.
        sent_bytes: Bytes that it sent to other ranks between applying the window before that one
            and applying it; see ``Communicator.sent_bytes``.
        work_ago_s: Seconds from asking for the first data of that window to applying it.
        wait_ago_s: Seconds from beginning to wait for others to applying it.
        sync_ago_s: Seconds from beginning to average to applying it.
    """

    weight: float = 0.0
    loss_sum: float = 0.0
    compute_s: float = 0.0
    update_s: float = 0.0
    update_parts: int = 0
    busy_s: float = 0.0
    micro_batches: int = 0
    samples: int = 0
    steps: int = 0
    skipped: int = 0
    overflows: int = 0
    non_finite: int = 0
    own_norm: float = 0.0
    buffers_changed: bool = False
    loss_scale: float = 0.0
    limit: int = 0
    warmup_s: float = 0.0
    warmup_busy_s: float = 0.0
    warmup_micro_batches: int = 0
    warmup_steps: int = 0
    warmup_samples: int = 0
    wait_s: float = 0.0
    sync_s: float = 0.0
    hidden_s: float = 0.0
    elapsed_s: float = 0.0
    divergence: float = 0.0
    stale_steps: int = 0
    data_s: float = 0.0
    sent_bytes: int = 0
    work_ago_s: float = 0.0
    wait_ago_s: float = 0.0
    sync_ago_s: float = 0.0


#: Fields of a window that ranks report only with the next one.
LATE_FIELDS: Final = Report._fields[Report._fields.index("wait_s") :]

#: What users call it, in a ``WindowResult``.
RankRecord = Report

NOTHING = Report()
