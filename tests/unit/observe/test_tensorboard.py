import sys
import threading
from pathlib import Path

import pytest

from evener.errors import ConfigError
from evener.observe.events import make_event
from evener.observe.tensorboard import TensorBoardSink
from helpers.event_cases import committed_window, started


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    before = threading.active_count()
    sink = TensorBoardSink(tmp_path / "tb")
    sink.emit(started(unit="tokens"))
    for window in range(3):
        event = committed_window(window, losses=(1.0, 2.0))
        event["ranks"][0] |= {"data_s": 0.25, "sent_bytes": 2_000_000}
        sink.emit(event | {"lr": 0.5, "grad_norm": float("nan") if window else 2.0})
    sink.emit(
        make_event("eval", t=3.0, window=3, loss=1.5, weight=1.0, elapsed_s=0.1, name="heldout")
    )
    sink.close()
    sink.close()
    sink.emit(committed_window(3))
    assert threading.active_count() == before

    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    points = {
        tag: [(point.step, point.wall_time, point.value) for point in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }
    assert points["train/loss"] == [(n + 1, n, pytest.approx(1.4)) for n in range(3)]
    assert points["train/tokens_per_second"] == [(2, 1.0, 100.0), (3, 2.0, 100.0)]
    assert points["train/samples_per_second"] == [(2, 1.0, 10.0), (3, 2.0, 10.0)]
    assert points["train/learning_rate"] == [(n + 1, n, 0.5) for n in range(3)]
    assert points["train/grad_norm"] == [(1, 0.0, 2.0)]
    assert points["train/epoch"][0] == (1, 0.0, 0.0)
    assert points["eval/loss"] == [(3, 3.0, 1.5)]
    assert points["data_s/rank_0"][0] == (1, 0.0, 0.25)
    assert points["sent_mb/rank_0"][0] == (1, 0.0, 2.0)
    assert "data_s/rank_1" not in points
    assert points["share/rank_1"][0] == (1, 0.0, pytest.approx(0.4))
    assert points["wait/rank_0"][0] == (1, 0.0, pytest.approx(0.16))
    assert points["compute_s/rank_0"][0] == (1, 0.0, pytest.approx(0.7))


def test_missing_package_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'evener\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
