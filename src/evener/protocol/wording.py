"""Messages about ranks that disagree. Pure."""

from collections.abc import Mapping

from evener.protocol.row import Purpose, Row


def mismatch(rows: Mapping[int, Row], doing: Mapping[int, str]) -> str:
    """Describe the different purposes of ranks in one round.

    Args:
        rows: The row of each rank.
        doing: What each rank does, and where in the user's code, as far as known.
    """
    descriptions = [
        f"rank {rank} is {doing.get(rank) or row.purpose.description}" for rank, row in rows.items()
    ]
    windows = {row.window for row in rows.values()}
    where = f"in window {windows.pop()}" if len(windows) == 1 else f"in windows {sorted(windows)}"
    purposes = {row.purpose for row in rows.values()}
    if purposes == {Purpose.STEP, Purpose.REST}:
        why = (
            "Over a stream, or without ddp.loader, all ranks must make the same number of updates. "
            "Remedy: leave a loop over a stream on all ranks at the same ddp.window. Without a "
            "loader, a rank without further data calls ddp.backward(loss, weight=0) or, with a "
            "DistributedTrainer, train_batch(None); DistributedTrainer.train_epoch does so itself"
        )
    elif any("ddp.gather" in description for description in descriptions):
        why = (
            "Remedy: call ddp.gather on all ranks the same number of times in each round of an "
            "evaluation's loop, and leave that loop on all ranks in the same round. To evaluate on "
            "fewer samples, give ddp.eval_loader a torch.utils.data.Subset instead"
        )
    else:
        why = (
            "All ranks must join a collective: neither `if ddp.rank == 0` nor a counter of the "
            "loop, which differs between ranks, may decide about it. Remedy: call it on every rank "
            "after the epoch, or in ddp.on_commit(fn); to end an epoch early, use "
            "ddp.loader(max_steps=...), as `break` does not reach a rank without a share of the "
            "window"
        )
    return f"ranks joined different collectives {where}: {'; '.join(descriptions)}. {why}"


def other_data(rank: int, row: Row, own_rank: int, own: Row) -> str:
    """Describe data that differs between two ranks, so that shares would not form one epoch."""
    return (
        f"rank {rank} trains on {_data(row)}, rank {own_rank} on {_data(own)}; "
        "give every rank the same data set, batch_size and seed"
    )


def other_reduction(summed: Mapping[int, bool]) -> str:
    """Describe ranks of which some give means and some give sums as losses."""
    reductions = ", ".join(f"{'sum' if s else 'mean'} on rank {rank}" for rank, s in summed.items())
    return (
        f"ranks gave ddp.backward losses of different reductions in one window ({reductions}); "
        "give the same reduction on every rank"
    )


def _data(row: Row) -> str:
    return f"{row.num_samples} samples with batch_size {row.batch_size} and seed {row.seed}"
