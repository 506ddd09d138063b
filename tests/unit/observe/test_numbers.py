import pytest

from evener.observe.numbers import human_bytes, human_count, human_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.44, "440 ms"),
        (9.96, "10 s"),
        (12.4, "12 s"),
        (119.4, "119 s"),
        (119.6, "2 min"),
        (240.0, "4 min"),
        (7140.0, "119 min"),
        (7199.0, "2 h 0 min"),
        (4800.0 + 3600.0, "2 h 20 min"),
        (86400.0 * 3 + 3600.0 * 4, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0"),
        (3.14159, "3.14"),
        (99.94, "99.9"),
        (99.96, "100"),
        (5120.4, "5,120"),
        (99_949.0, "99,949"),
        (99_951.0, "100k"),
        (999_400.0, "999k"),
        (999_900.0, "1M"),
        (1_234_567.0, "1.23M"),
        (2.5e9, "2.5G"),
        (7e12, "7T"),
        (1.5e15, "1,500T"),
    ],
)
def test_counts(number: float, text: str) -> None:
    assert human_count(number) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(512, "512 B"), (1500, "1.5 kB"), (2.26e9, "2.3 GB"), (1e13, "10.0 TB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert human_bytes(num_bytes) == text
