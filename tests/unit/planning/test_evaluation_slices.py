"""Rounds of an evaluation: each sample once, and every rank told of all of them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.planning.evaluation_slices import evaluation_slices

RANKS = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.just(0.0), st.floats(1e-3, 1e3))),
    min_size=1,
    max_size=5,
).filter(lambda ranks: any(speed for _, speed in ranks))


@settings(deadline=None)
@given(num_samples=st.integers(0, 80), ranks=RANKS)
def test_each_sample_once_and_every_rank_in_the_last_round(
    num_samples: int, ranks: list[tuple[int, float]]
) -> None:
    slices = evaluation_slices(num_samples, [b for b, _ in ranks], [s for _, s in ranks])
    working = [rank for rank, (_, speed) in enumerate(ranks) if speed]
    assert sum(map(sum, slices)) == num_samples
    for parts in slices:
        assert sum(parts) > 0
        assert all(0 <= p <= (b if s else 0) for p, (b, s) in zip(parts, ranks, strict=True))
    short = [parts for parts in slices if not all(parts[rank] for rank in working)]
    assert len(short) <= 1
    if num_samples >= len(working):
        assert short in ([], slices[-2:-1])


def test_one_rank_has_the_batches_of_a_plain_loader() -> None:
    assert evaluation_slices(10, [4], [123.0]) == [(4,), (4,), (2,)]


def test_parts_follow_speeds() -> None:
    assert evaluation_slices(100, [16, 16], [100.0, 25.0]) == [(16, 4)] * 5
    assert evaluation_slices(97, [32] * 3, [1.0] * 3) == [(16, 16, 16), (17, 16, 16)]
    assert evaluation_slices(7, [1] * 3, [1.0] * 3) == [(1, 1, 1), (1, 0, 0), (1, 1, 1)]
