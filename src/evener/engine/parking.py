"""The warning that ranks are parked."""

from evener.planning.policies import Parking


def describe_parking(parking: Parking, batch_size: int, recall_at: int) -> str:
    """Return the warning that ranks are parked, with the forecasts that led to it.

    Args:
        parking: The decision.
        batch_size: Samples of a window.
        recall_at: The window at which they are tried again.
    """
    ranks, before, after = parking.ranks, parking.before, parking.after
    each = [
        f"rank {rank} alone does {speed:.3g} samples/s"
        if speed
        else f"rank {rank} is too slow for a single sample of a batch, by the calibration"
        for rank, speed in parking.alone.items()
    ]
    whom, are = ("it", "is") if len(ranks) == 1 else ("them", "are")
    text = f"{' and '.join(f'rank {rank}' for rank in ranks)} {are} parked: {', '.join(each)}"
    if 0.0 < after.window_s < before.window_s:
        text += (
            f"; the team is predicted to do {batch_size / before.window_s:.3g} samples/s with "
            f"{whom} (a window takes {1000 * before.window_s:.3g} ms, of which the exchange "
            f"{1000 * before.exchange_s:.3g} ms) and {batch_size / after.window_s:.3g} without"
        )
    elif after.window_s:
        text += f"; a window takes no longer without {whom}"
    return f"{text}. The team tries again with {whom} at window {recall_at}"
