"""Data positions of loaders that are made one after another."""

from evener.data.cursor import Cursor
from evener.engine.positions import Positions


def test_loader_made_after_rank_was_brought_up_to_date_continues_from_checkpoint() -> None:
    saved = [Cursor(5, 0).state_dict() | {"epoch": epoch} for epoch in (7, 30)]
    ranks = [Positions(), Positions()]
    first = [Cursor(5, 0), Cursor(5, 0)]
    for positions, cursor in zip(ranks, first, strict=True):
        positions.restore(saved)
        positions.hold(cursor)
    first[0].begin(9)  # while the other rank was parked

    ranks[1].load_state_dict(ranks[0].state_dict(None))
    second = [Cursor(5, 0), Cursor(5, 0)]
    for positions, cursor in zip(ranks, second, strict=True):
        positions.hold(cursor)

    assert [cursor.epoch for cursor in first] == [9, 9]
    assert [cursor.epoch for cursor in second] == [30, 30]
