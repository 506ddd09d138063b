"""What ``evener classify`` prints for a file, and to whom."""

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from evener.config.options import ClassifyOptions
from evener.tasks.classification.command import predict_file
from evener.tasks.classification.pipeline import ClassifyPipeline
from helpers.classification import TINY_LLAMA, config


def test_a_reader_that_has_seen_enough_ends_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClassifyPipeline.build(TINY_LLAMA, config()).save(tmp_path / "runs" / "run")
    (tmp_path / "runs" / "run" / "checkpoints").mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": TINY_LLAMA}))
    (tmp_path / "texts.jsonl").write_text('"a text"\n')
    options = ClassifyOptions(
        config=tmp_path / "run.yaml",
        out=tmp_path / "runs",
        predict=tmp_path / "texts.jsonl",
        quiet=True,
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        with pytest.raises(SystemExit) as ended:
            predict_file(options)
        assert ended.value.code == 128 + signal.SIGPIPE
        nobody.write("and Python's own flush at the end is no error")
