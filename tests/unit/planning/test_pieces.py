"""The size of pieces: what is hidden, what the last one costs, and when it does not pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.planning.pieces import ExchangeCost, choose_pieces, describe, processor_part

MB = 10**6


def cost(mbit_per_s: float, call_s: float = 0.0005, processor_part: float = 0.0) -> ExchangeCost:
    """On two ranks, a sum sends each byte once."""
    return ExchangeCost(8 / (mbit_per_s * 1e6), call_s, processor_part)


def test_a_long_backward_hides_all_but_the_last_piece() -> None:
    chosen = choose_pieces(8 * MB, 1.0, cost(200))
    last_s = chosen.num_bytes * 8 / 200e6
    assert chosen.seconds == pytest.approx(1.0 + last_s, abs=0.002)
    assert 0.85 < (chosen.after_s - chosen.seconds) / (chosen.after_s - 1.0) < 1.0


def test_pieces_are_larger_where_calls_cost_more_than_bytes() -> None:
    links = [cost(rate, processor_part=0.5) for rate in (100, 1000)]
    sizes = [choose_pieces(100 * MB, 9.0, each).num_bytes for each in links]
    assert sizes[0] < sizes[1]


def test_pieces_are_no_smaller_than_pays() -> None:
    """Over a fast link each further piece would save less than it takes from backward."""
    chosen = choose_pieces(8 * MB, 0.43, cost(4000, call_s=0.001))
    smaller = chosen.num_bytes * 8 / 4e9
    assert chosen.num_bytes >= 1 * MB
    assert smaller < 0.01 * chosen.seconds


@pytest.mark.parametrize(
    ("backward_s", "of"),
    [
        pytest.param(0.0, cost(200), id="no-backward"),
        pytest.param(0.1, cost(1000, processor_part=1.0), id="the-exchange-needs-the-same-core"),
        pytest.param(10.0, cost(1000), id="the-exchange-is-short-anyway"),
    ],
)
def test_all_travels_after_backward_where_little_would_be_hidden(
    backward_s: float, of: ExchangeCost
) -> None:
    chosen = choose_pieces(8 * MB, backward_s, of)
    assert chosen.num_bytes == 0
    assert chosen.seconds == chosen.after_s
    assert "after backward" in describe(chosen, backward_s)


def test_the_line_says_how_large_pieces_are_and_why() -> None:
    text = describe(choose_pieces(8 * MB, 0.3, cost(200)), 0.3)
    assert "pieces of 0.5 MB" in text
    assert "backward takes 300 ms, the exchange 320 ms" in text


@given(
    num_bytes=st.integers(1, 10**10),
    backward_s=st.floats(0.0, 1e3),
    byte_s=st.floats(0.0, 1e-6),
    call_s=st.floats(0.0, 0.1),
    part=st.floats(0.0, 1.0),
)
def test_a_choice_is_never_predicted_to_be_slower(
    num_bytes: int, backward_s: float, byte_s: float, call_s: float, part: float
) -> None:
    chosen = choose_pieces(num_bytes, backward_s, ExchangeCost(byte_s, call_s, part))
    assert 0 <= chosen.num_bytes <= num_bytes
    assert chosen.seconds <= chosen.after_s
    assert chosen.seconds >= max(backward_s, byte_s * num_bytes) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("needed", "left", "part"),
    [
        pytest.param(1.0, 0.2, 0.8, id="one-core-for-both"),
        pytest.param(2.0, 1.0, 0.5, id="one-of-two-cores"),
        pytest.param(1.0, 3.0, 0.0, id="cores-to-spare"),
        pytest.param(0.1, 0.2, 0.0, id="backward-waits-for-a-device"),
        pytest.param(1.0, -0.5, 1.0, id="no-core-is-left"),
        pytest.param(0.0, -0.5, 0.0, id="no-backward"),
    ],
)
def test_an_exchange_slows_backward_by_the_cores_that_both_need(
    needed: float, left: float, part: float
) -> None:
    assert processor_part(needed, left) == pytest.approx(part)
