"""The adaptive deadline after which a silent rank is named. Pure."""

from collections.abc import Sequence
from statistics import median
from typing import Final

#: No rank is named sooner: an evaluation or a checkpoint of one rank alone takes this long.
FLOOR_S: Final = 10.0
#: Before enough windows are known: the first ones load libraries, compile and warm up.
FIRST_S: Final = 60.0

_FEWEST = 3
_DEVIATIONS = 8.0  # far out in any distribution of window times: a named rank is late


def silence_deadline_s(windows_s: Sequence[float]) -> float:
    """Return after how many seconds, from the first arrival, a rank that does not come is named.

    It is median + k·MAD of the windows, with a floor. It does not end the run: a rank may be busy
    with what others do not do.

    Args:
        windows_s: Seconds that the latest windows took.
    """
    if len(windows_s) < _FEWEST:
        return FIRST_S
    middle_s = median(windows_s)
    deviation_s = median(abs(each - middle_s) for each in windows_s)
    return max(FLOOR_S, middle_s + _DEVIATIONS * deviation_s)
