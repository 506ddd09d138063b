"""Data positions of loaders that are made one after another."""

from collections.abc import Mapping
from typing import Any

from evener.engine.positions import Positions


class Place:
    """A position that is a number."""

    cursor = None

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def restore(self, state: Mapping[str, Any], *, allow_new_data: bool = False) -> None:
        self.at = state["at"]


def test_loader_made_after_rank_was_brought_up_to_date_continues_from_checkpoint() -> None:
    saved = [{"at": 7}, {"at": 30}]
    ranks = [Positions(), Positions()]
    first = [Place(), Place()]
    for positions, place in zip(ranks, first, strict=True):
        positions.restore(saved)
        positions.hold(place)
    first[0].at = 9  # while the other rank was parked

    ranks[1].load_state_dict(ranks[0].state_dict(None))
    second = [Place(), Place()]
    for positions, place in zip(ranks, second, strict=True):
        positions.hold(place)

    assert [place.at for place in first] == [9, 9]
    assert [place.at for place in second] == [30, 30]
