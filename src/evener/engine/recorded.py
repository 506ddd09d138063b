"""Results of exchanges between epochs, for the scripts of workers that join later."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

#: Most results that are kept: a coordinator passes them on in one message.
MOST_RESULTS: Final = 2048


class RecordedSums:
    """Sums over ranks, by where the script was: a worker that joins runs it from the top.

    A *place* is the time from one mark of the script to the next: before its first epoch, and after
    the beginning of each. In one place, a script asks for the same sums in the same order on every
    rank. Sums within a window (``ddp.on_commit``, the body of a training loop) are not recorded,
    because no window is computed again. Of too many results, the oldest places are dropped first.
    """

    def __init__(self) -> None:
        self._results: dict[str, list[Sequence[float]]] = {}
        self._place, self._next = "start", 0

    @property
    def is_at_start(self) -> bool:
        """Return whether the script is before its first epoch."""
        return self._place == "start"

    def move(self, place: str) -> None:
        """Note that the script has come to another place."""
        self._place, self._next = place, 0

    def add(self, result: Sequence[float]) -> None:
        """Keep a result of this place."""
        kept = self._results.setdefault(self._place, [])
        self._next += 1
        if len(kept) < MOST_RESULTS:
            kept.append(result)
        while sum(map(len, self._results.values())) > MOST_RESULTS:
            del self._results[next(iter(self._results))]

    def take(self) -> Sequence[float] | None:
        """Return the next result of this place; ``None`` where none is kept."""
        kept = self._results.get(self._place, [])
        self._next += 1
        return kept[self._next - 1] if self._next <= len(kept) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the kept results, in JSON."""
        return {place: [*results] for place, results in self._results.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adopt the results of another rank; the script's place does not change."""
        self._results = {place: [*results] for place, results in state.items()}
