import pytest

from evener.observe.numbers import human_bytes, human_count, human_duration


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (human_duration(0.44), "440 ms"),
        (human_duration(9.96), "10 s"),
        (human_duration(119.6), "2 min"),
        (human_duration(161.2), "2 min 41 s"),
        (human_duration(3599.6), "1 h 0 min"),
        (human_duration(7199.0), "2 h 0 min"),
        (human_duration(86400.0 * 3 + 3600.0 * 4), "3 d 4 h"),
        (human_count(3.14159), "3.14"),
        (human_count(99.96), "100"),
        (human_count(5120.4), "5,120"),
        (human_count(99_951.0), "100k"),
        (human_count(999_900.0), "1M"),
        (human_count(1.5e15), "1,500T"),
        (human_bytes(512), "512 B"),
        (human_bytes(2.26e9), "2.3 GB"),
    ],
)
def test_numbers_for_people(shown: str, text: str) -> None:
    assert shown == text
