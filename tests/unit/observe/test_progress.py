import io
import re
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from evener.observe.events import make_event
from evener.observe.progress_line import ProgressSink
from evener.observe.sentences import describe
from helpers.event_cases import committed_window, started

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def show(events: Iterable[dict[str, Any]], stream: io.StringIO) -> str:
    with ProgressSink(stream) as sink:
        for event in events:
            sink.emit(event)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_plain_lines_are_few() -> None:
    text = show(
        [started(total_windows=100), *(committed_window(window) for window in range(60))],
        io.StringIO(),
    )
    steps = [int(number) for number in re.findall(r"^step (\d+)/100", text, re.MULTILINE)]
    # Windows are a second apart: the first three, then every ten seconds.
    assert steps == [1, 2, 3, 13, 23, 33, 43, 53]
    assert text.splitlines()[1] == (
        "step 2/100  loss 2  100 tokens/s  10 samples/s  ETA 98 s"
        "  | rank 0: 60% wait 20%  | rank 1: 40% wait 0%"
    )
    assert "\x1b" not in text
    assert "\r" not in text


def test_many_ranks_are_summed_up() -> None:
    six = {"samples": (1,) * 6, "losses": (2.0,) * 6}
    times_s = [(1.0, 0.0, 0.0)] * 5 + [(0.4, 0.6, 0.0)]
    text = show([committed_window(0, times_s=times_s, **six)], io.StringIO())
    assert text.splitlines()[-1] == "step 1  loss 2  | 6 ranks, rank 5 waits most: 60%"


def test_loss_is_smoothed_a_little_and_survives_one_that_is_not_finite() -> None:
    losses = [1.0, 2.0, float("nan"), 3.0]
    stream = io.StringIO()
    with ProgressSink(stream) as sink:
        for window, loss in enumerate(losses):
            sink.emit(committed_window(window, t=window * 20.0, losses=(loss, loss)))
    assert re.findall(r"loss (\S+)", stream.getvalue()) == ["1", "1.2", "nan", "3"]


def test_a_window_without_weight_has_no_loss() -> None:
    nothing = {"weight_per_sample": 0.0, "losses": (None, None)}
    events = [committed_window(0, t=0.0, **nothing), committed_window(1, t=20.0)]
    events.append(committed_window(2, t=40.0, **nothing))
    lines = [line.split("  |")[0] for line in show(events, io.StringIO()).splitlines()]
    assert lines[0] == "step 1"
    assert [line.split("  ")[1] for line in lines[1:]] == ["loss 2", "loss 2"]


def test_a_straggler_is_told_by_the_engine_and_described_for_reports() -> None:
    slow = {"rank": 1, "member": "b", "window": 5, "since": 2}
    times = {"compute_s": 3.0, "expected_s": 1.0}
    one = make_event("straggler", t=1.0, **slow, **times, cause="it waits for its data")
    over = make_event("straggler_over", t=2.0, **slow, delay_s=4.0)
    assert show([one, over], io.StringIO()) == ""
    assert describe(one) == (
        "straggler: rank 1 (b) took 3.0 s for window 5 instead of 1.0 s, since window 2: it waits "
        "for its data"
    )
    assert describe(over) == (
        "rank 1 (b) is as fast as before window 2 again; windows would have ended 4.0 s sooner"
    )


def test_other_events_have_lines() -> None:
    path = "runs/x/checkpoints/step-5"
    lines = show(
        [
            make_event("run_resumed", t=0.0, window=5, path=path, new_data=False),
            make_event("run_resumed", t=0.0, window=5, path=None, new_data=False),
            make_event("checkpoint", t=1.0, window=5, path=path, num_bytes=2_500_000, write_s=0.4),
            make_event(
                "straggler", t=1.0, rank=1, member="b", window=5, compute_s=3.0, expected_s=1.0
            ),
            make_event(
                "eval",
                t=1.0,
                window=6,
                loss=float("nan"),
                weight=1.0,
                elapsed_s=1.0,
                name="heldout",
            ),
            make_event("run_finished", t=1.0, window=6, reason="failed", message="disk gone"),
            make_event(
                "run_finished", t=1.0, window=6, reason="stopped", message="go on with --resume"
            ),
            make_event("run_finished", t=1.0, window=6, reason="completed", message=None),
        ],
        io.StringIO(),
    ).splitlines()
    assert lines == [
        f"resumed after 5 windows from {path}",
        "resumed after 5 windows",
        f"checkpoint {path} (2.5 MB, written in 400 ms)",
        "eval after 6 windows: heldout loss nan",
        "stopped after 6 windows: go on with --resume",
        "completed after 6 windows",
    ]


def test_a_change_of_the_team_is_one_line_before_its_next_window() -> None:
    place = {"t": 1.0, "rank": 1, "member": "b", "window": 1}
    events = [
        started(),
        committed_window(0),
        make_event("worker_lost", **place, reason="it died"),
        make_event("reformed", t=1.5, window=1, generation=1, members=["a", "b"], reform_s=0.2),
        make_event("worker_joined", **place, generation=1),
        committed_window(1, t=2.0) | {"redo_s": 0.3},
    ]
    assert show(events, io.StringIO()).splitlines()[1] == (
        "lost rank 1 (b): it died; the team formed again with 2 ranks; rank 1 (b) joined; it cost "
        "500 ms (200 ms until the team had formed again, 300 ms until the next window was "
        "committed)"
    )
    assert show(events[:3], io.StringIO()).splitlines()[1:] == ["lost rank 1 (b): it died"]


def test_events_count_optimizer_steps_as_the_line_does() -> None:
    numbers = {"name": "heldout", "loss": 2.5, "weight": 1.0, "elapsed_s": 0.1}
    evaluation = make_event("eval", t=1.0, window=1, **numbers)
    exact = show([started(), committed_window(0), evaluation], io.StringIO()).splitlines()
    assert exact == [exact[0], "eval after step 1: heldout loss 2.5"], "no line is repeated"
    local = [started(policy="cadence"), committed_window(0) | {"optimizer_steps": 40}, evaluation]
    assert "eval after step 40: heldout loss 2.5" in show(local, io.StringIO())


def test_live_line_is_updated_four_times_a_second_at_most() -> None:
    text = show(
        [
            started(total_windows=100),
            *(committed_window(window, t=window / 20) for window in range(41)),
        ],
        Terminal(),
    )
    # Two seconds of event time: 0, 0.25, ..., 2 and once more at the end.
    assert text.count("step ") == 10
    assert text.count(CLEAR) == 9
    assert text.endswith("\n")
    assert text.count("\n") == 1
    last = text.split(CLEAR)[-1]
    assert last.startswith("step 41/100  ━━━━━━━━──────────── 41%  ")
    assert "2,000 tokens/s  200 samples/s  ETA 2.9 s" in last


def test_after_the_end_nothing_stands_below_what_is_said() -> None:
    finished = make_event("run_finished", t=3.0, window=2, reason="completed", message=None)
    stream = Terminal()
    with ProgressSink(stream) as sink:
        for event in (committed_window(0), committed_window(1), finished):
            sink.emit(event)
        stream.write("the verdict\n")
    lines = stream.getvalue().split(CLEAR)[-1].splitlines()
    assert lines[0].startswith("step 2 ")
    assert lines[1:] == ["completed after 2 windows", "the verdict"]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (
            130,
            "step 3/9  ━━━━━━────────────── 33%  loss 2  100 tokens/s  10 samples/s  ETA 6.0 s"
            "  | rank 0: 60% wait 20%  | rank 1: 40% wait 0%",
        ),
        (
            128,
            "step 3/9  loss 2  100 tokens/s  10 samples/s  ETA 6.0 s"
            "  | rank 0: 60% wait 20%  | rank 1: 40% wait 0%",
        ),
        (40, "step 3/9  100 tokens/s  | share 60/40% "),
        (60, "step 3/9  loss 2  100 tokens/s  | share 60/40% wait 20/0%"),
        (55, "step 3/9  100 tokens/s  | share 60/40% wait 20/0%"),
        (80, "step 3/9  loss 2  100 tokens/s  ETA 6.0 s  | share 60/40% wait 20/0%"),
    ],
)
def test_a_narrow_terminal_keeps_shares_and_waits(
    monkeypatch: pytest.MonkeyPatch, columns: int, line: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    events = [started(total_windows=9), *(committed_window(window) for window in range(3))]
    assert show(events, Terminal()).rstrip("\n").split(CLEAR)[-1] == line


def test_live_line_in_a_terminal_without_unicode() -> None:
    class Old(Terminal):
        encoding = "ascii"

    text = show([started(total_windows=2), committed_window(0)], Old())
    assert "==========---------- 50%" in text
    text.encode("ascii")


def test_no_thread_and_no_hidden_cursor() -> None:
    before = threading.active_count()
    stream = Terminal()
    sink = ProgressSink(stream)
    for window in range(10):
        sink.emit(committed_window(window))
        assert threading.active_count() == before
    assert "\x1b[?25l" not in stream.getvalue()
    sink.close()
    sink.close()
    sink.emit(committed_window(10))
    assert "step 11" not in stream.getvalue()


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_stream_that_breaks_does_not_stop_training(kind: type[io.StringIO]) -> None:
    class Broken(kind):  # type: ignore[misc, valid-type]
        def write(self, text: str) -> int:
            raise BrokenPipeError

    sink = ProgressSink(Broken())
    for window in range(3):
        sink.emit(committed_window(window))
    sink.close()
    closed = io.StringIO()
    sink = ProgressSink(closed)
    closed.close()
    sink.emit(committed_window(0))
    sink.close()


def test_speed_after_a_resume_ignores_the_gap() -> None:
    events = [started(total_windows=3), *(committed_window(window) for window in range(3))]
    events.append(make_event("run_resumed", t=1000.0, window=1, path=None, new_data=False))
    events += [committed_window(window, t=1000.0 + window) for window in range(1, 3)]
    text = show(events, Terminal())
    assert "10 samples/s" in text.split(CLEAR)[-1]
