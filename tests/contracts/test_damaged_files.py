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
from evener.observe.table import RunTable
from evener.tasks.classification.labelled_data import read_records
from evener.tasks.language_model import build_model
from evener.tasks.text.tokenizer import load_tokenizer
from helpers.event_cases import committed_window, started, to_line
from helpers.lineage import check_exactly_once
from helpers.tampering import NESTED, damaged, read_or_refuse

# ── events ───────────────────────────────────────────────────────────────────────────────────────

EVENTS = [
    started(),
    *(
        committed_window(window) | {"skipped": False, "update_parts": 1, "parked": []}
        for window in range(3)
    ),
    {"t": 9.0, "type": "eval", "window": 3, "name": "heldout", "loss": 1.0, "weight": 2.0,
     "elapsed_s": 0.5},
    {"t": 9.5, "type": "run_finished", "window": 3, "reason": "stopped", "message": None},
    {"t": 10.0, "type": "run_resumed", "window": 2, "path": None, "new_data": False},
]  # fmt: skip

BAD_LINES = {
    "nested": b'{"t": 1.0, "type": "window", "window": ' + NESTED + b"}",
    "not UTF-8": b'{"t": 1.0, "type": "window", "window": "\xff\xfe"}',
    "binary": bytes(range(1, 9)) + bytes(range(11, 256)),
    "another type": b'{"t": 1.0, "type": "window", "window": "3"}',
    "a huge number": b'{"t": 1.0, "type": "run_resumed", "window": 1' + b"0" * 30 + b"}",
    "5,000 digits": b'{"t": 1.0, "type": "x", "n": ' + b"1" * 5000 + b"}",
    "no ranks": b'{"t": 1.0, "type": "window", "window": 3, "epoch": 0, "committed": []}',
    "true for a number": b'{"t": true, "type": "window"}',
    "null": b"null",
}


def read_all(path: Path) -> None:
    """What a resume and a report do with the events of a run."""
    events = read_events(path)
    RunTable.of(events)
    check_exactly_once(events, 10)


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_left_out_of_the_events_and_named(kind: str, tmp_path: Path) -> None:
    good = [to_line(event).strip() for event in EVENTS]
    path, skipped = tmp_path / "events.jsonl", []
    path.write_bytes(b"\n".join([*good[:3], BAD_LINES[kind], *good[3:]]) + b"\n" + BAD_LINES[kind])
    events = read_events(path, lambda line, why: skipped.append(line))
    assert events == EVENTS
    assert skipped == [4]  # the last line may be one that is being written
    read_all(path)


@given(damaged(b"".join(map(to_line, EVENTS))))
def test_whatever_bytes_are_in_the_event_file_its_readers_go_on(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(data)
    read_all(path)


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
