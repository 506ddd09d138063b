"""What people are told when ranks do not agree. Pure."""

from collections.abc import Mapping

from evener.planning.plan import WindowPlan
from evener.protocol.row import ALL, DATA_LENGTH, Drop, Purpose, Row


def mismatch(rows: Mapping[int, Row], places: Mapping[int, str]) -> str:
    """Ranks have come for different things.

    Args:
        rows: What each rank said.
        places: Where each is in the user's code, as far as that is known.
    """
    deeds = [
        f"rank {rank} is {_deed(row)}{place and f' at {place}'}"
        for rank, row in rows.items()
        for place in (places.get(rank, ""),)
    ]
    windows = {row.window for row in rows.values()}
    where = f"in window {windows.pop()}" if len(windows) == 1 else f"in windows {sorted(windows)}"
    purposes = {row.purpose for row in rows.values()}
    if purposes == {Purpose.STEP, Purpose.REST}:
        why = (
            "Over a stream, or without ddp.loader, every rank has to make as many updates. Remedy: "
            "leave a loop over a stream on all ranks at the same ddp.window; without a loader, one "
            "that has nothing left goes along, by ddp.backward(loss, weight=0) or, with a "
            "DistributedTrainer, train_batch(None); DistributedTrainer.train_epoch does so itself"
        )
    elif Purpose.GATHER in purposes:
        why = (
            "Remedy: call ddp.gather on all ranks equally often in each round of an evaluation's "
            "loop, and leave that loop on all ranks in the same round. To evaluate on fewer "
            "samples, give ddp.eval_loader a torch.utils.data.Subset instead"
        )
    else:
        why = (
            "Ranks go round the loop a different number of times, so a local counter must not "
            "decide about a collective. Remedy: call it in ddp.on_commit(fn), which runs on every "
            "rank, or after the epoch"
        )
    return f"ranks joined different collectives {where}: {'; '.join(deeds)}. {why}"


def _deed(row: Row) -> str:
    """What a rank does; one that has left its loop closes only what it had announced."""
    purpose = Purpose.REST if row.drop is Drop.LEFT else row.purpose
    return purpose.deed


def other_parameters(rows: Mapping[int, Row]) -> str:
    """Ranks train different numbers of parameters."""
    said = ", ".join(f"{row.trainable} on rank {rank}" for rank, row in rows.items())
    return (
        f"ranks train different numbers of parameter tensors ({said}): requires_grad_(True) "
        "was called on some of them only. Call it on every rank, at the beginning of an epoch "
        "or when ddp.window, which is the same everywhere, reaches a number"
    )


def other_part(first: int, part: int, other: int, other_part: int) -> str:
    """Two ranks step different optimizers."""
    words = ["all optimizers" if p == ALL else f"optimizer {p}" for p in (part, other_part)]
    return (
        f"rank {first} steps {words[0]}, rank {other} {words[1]}: every rank "
        "must step the same optimizers in the same order; decide by ddp.window, never by a "
        "local counter"
    )


def other_work(rank: int, samples: int, plan: WindowPlan) -> str:
    """A rank computed something else than its share."""
    return (
        f"rank {rank} computed {samples} samples of window {plan.window}, planned "
        f"were {plan.shares[rank]}; ranks run different code, or this is a bug of evener"
    )


def other_data(rank: int, row: Row, own_rank: int, own: Row) -> str:
    """Two ranks would draw other samples: their shares would not make one epoch."""
    return (
        f"rank {rank} trains on {_data(row)}, rank {own_rank} on {_data(own)}; "
        "give every rank the same data set, batch_size and seed"
    )


def _data(row: Row) -> str:
    num_samples, batch_size, seed = (int(number) for number in row.body[:DATA_LENGTH])
    return f"{num_samples} samples with batch_size {batch_size} and seed {seed}"
