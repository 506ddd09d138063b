"""Slices of an evaluation: each sample once, and every rank in each slice."""

from hypothesis import given
from hypothesis import strategies as st

from evener.planning.evaluation_slices import evaluation_slices

RANKS = st.lists(
    st.tuples(st.integers(1, 9), st.floats(1e-3, 1e3)),
    min_size=1,
    max_size=5,
)


def cut(num_samples: int, ranks: list[tuple[int, float]]) -> list[dict[int, list[int]]]:
    slices = evaluation_slices(
        range(num_samples),
        {rank: size for rank, (size, _) in enumerate(ranks)},
        {rank: speed for rank, (_, speed) in enumerate(ranks)},
    )
    return [{rank: [*part] for rank, part in parts.items()} for parts in slices]


def sizes(num_samples: int, ranks: list[tuple[int, float]]) -> list[tuple[int, ...]]:
    return [tuple(map(len, parts.values())) for parts in cut(num_samples, ranks)]


@given(num_samples=st.integers(0, 80), ranks=RANKS)
def test_each_sample_once_in_rank_order_and_every_rank_in_each_slice(
    num_samples: int, ranks: list[tuple[int, float]]
) -> None:
    slices = cut(num_samples, ranks)
    assert [i for parts in slices for part in parts.values() for i in part] == [*range(num_samples)]
    if num_samples < len(ranks):
        assert all([*parts] == [0] for parts in slices)
        return
    for parts in slices:
        assert [*parts] == [*range(len(ranks))]
        assert all(parts.values())
        fits = all(len(part) <= ranks[rank][0] for rank, part in parts.items())
        assert fits or (parts is slices[-1] and sum(map(len, parts.values())) < 2 * len(ranks))


def test_one_rank_has_the_batches_of_a_plain_loader() -> None:
    assert sizes(10, [(4, 123.0)]) == [(4,), (4,), (2,)]


def test_parts_follow_speeds() -> None:
    assert sizes(100, [(16, 100.0), (16, 25.0)]) == [(16, 4)] * 5
    assert sizes(97, [(32, 1.0)] * 3) == [(17, 16, 16), (16, 16, 16)]
    assert sizes(7, [(1, 1.0)] * 3) == [(1, 1, 1), (2, 1, 1)]
