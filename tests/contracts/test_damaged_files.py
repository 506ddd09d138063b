"""Files that were damaged or tampered with: named, within bounded time, and nothing half-read."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given

from evener.config.folders import FolderLock
from evener.config.runs import ClassifyDataConfig, ModelConfig
from evener.errors import EvenerError
from evener.observe.following import read_events
from evener.observe.jsonl import JsonlSink
from evener.tasks.classification.labelled_data import read_records
from evener.tasks.language_model import build_model
from evener.tasks.text.tokenizer import load_tokenizer
from helpers.tampering import NESTED, damaged, read_or_refuse


def test_a_fifo_in_place_of_the_event_file_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)

    def use_folder() -> None:
        FolderLock(tmp_path).require()

    for use in (lambda: read_events(path), lambda: JsonlSink(path), use_folder):
        with pytest.raises(EvenerError, match=r"events\.jsonl cannot be .*"):
            use()


# ── data, its cache, and adapters ────────────────────────────────────────────────────────────────

LABELLED = b'{"text": "one", "label": "a"}\n{"text": "two", "label": 1}\n'
TABLE = b'text,label\r\none,a\r\n"two\nlines",b\r\n'


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.jsonl.gz"])
def test_whatever_is_in_a_labelled_file_it_is_read_or_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    content = TABLE if name.endswith(".csv") else LABELLED
    content = gzip.compress(content, mtime=0) if name.endswith(".gz") else content

    @given(damaged(content))
    def check(data: bytes) -> None:
        path.write_bytes(data)
        read_or_refuse(path, lambda: read_records(path, ClassifyDataConfig()))

    check()
    path.write_bytes(b'{"text": ' + NESTED + b"}\n")
    assert read_or_refuse(path, lambda: read_records(path, ClassifyDataConfig()))
    path.unlink()
    os.mkfifo(path)
    assert read_or_refuse(path, lambda: read_records(path, ClassifyDataConfig()))


def test_a_fifo_among_the_files_of_a_model_or_tokenizer_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / "tokenizer.json")
    assert read_or_refuse(tmp_path, lambda: load_tokenizer(str(tmp_path)))
    model = ModelConfig(path=str(tmp_path))
    build = lambda: build_model(model, vocab_size=257, seq_len=8, eos_id=256)  # noqa: E731
    assert read_or_refuse(tmp_path, build)
