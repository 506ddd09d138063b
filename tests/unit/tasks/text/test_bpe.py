"""A tokenizer trained on a corpus: exact, deterministic, cached, what AutoTokenizer loads."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evener.errors import DataError
from evener.tasks.text import bpe
from evener.tasks.text.bpe import EOS_ID, trained_tokenizer
from evener.tasks.text.cache import UNUSED_DAYS
from evener.tasks.text.documents import IterableSource
from evener.tasks.text.file_source import FileSource
from evener.tasks.text.tokenizer import CausalTokenizer, load_tokenizer

TEXTS = [f"the quick brown fox number {k} jumps over the lazy dog\n" for k in range(40)]
TRICKY = [
    "",
    " a  b\n\n\tc ",
    "\u00e9\u65e5\u672c\U0001f600",
    "\0\r\n\x7f\ufeff",
    "a<|endoftext|>b",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CausalTokenizer:
    return trained_tokenizer(IterableSource(TEXTS, "text"), 300, tmp_path_factory.mktemp("cache"))


def test_texts_come_back_exactly_in_fewer_ids(tokenizer: CausalTokenizer) -> None:
    assert tokenizer.eos_id == EOS_ID
    assert 257 < tokenizer.vocab_size <= 300
    for text in [*TEXTS, *TRICKY]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        # The end of a text is never inside it, whatever it says.
        assert EOS_ID not in ids
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    together = tokenizer.encode_batch([*TEXTS, *TRICKY])
    alone = [tokenizer.encode(text) for text in [*TEXTS, *TRICKY]]
    assert all(map(np.array_equal, together, alone))


def test_transformers_gives_the_same_ids_from_what_a_checkpoint_holds(
    tokenizer: CausalTokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.eos_token_id == EOS_ID
    for text in [*TEXTS[:3], *TRICKY]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert np.array_equal(tokenizer.encode(text), np.array(expected, np.uint32))
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_the_same_text_gives_the_same_tokenizer(tokenizer: CausalTokenizer, tmp_path: Path) -> None:
    again = trained_tokenizer(IterableSource(TEXTS, "text"), 300, tmp_path)
    assert again.fingerprint == tokenizer.fingerprint


def test_it_is_trained_once_for_each_text_and_size(tmp_path: Path) -> None:
    notes: list[str] = []

    def train(size: int, texts: list[str] = TEXTS) -> str:
        source = IterableSource(texts, "text")
        return trained_tokenizer(source, size, tmp_path, on_note=notes.append).fingerprint

    first = train(270)
    trained = "trained a tokenizer of 270 ids on the data set (list)"
    assert notes == [trained]
    (folder,) = tmp_path.iterdir()
    train(271)
    train(270, TEXTS[1:])
    assert len(notes) == 3
    notes.clear()
    assert train(270) == first
    assert notes == []
    (folder / "tokenizer.json").unlink()
    assert train(270) == first
    assert notes == [f"{folder} is damaged (a file is missing); it is made again", trained]


def test_what_is_used_stays_in_the_cache(tmp_path: Path) -> None:
    def train(size: int) -> Path:
        before = {*tmp_path.iterdir()}
        trained_tokenizer(IterableSource(TEXTS, "text"), size, tmp_path)
        return ({*tmp_path.iterdir()} - before or {tmp_path}).pop()

    used, unused = train(270), train(271)
    long_ago_s = time.time() - (UNUSED_DAYS + 1) * 86_400
    for path in (used, *used.iterdir(), unused, *unused.iterdir()):
        os.utime(path, (long_ago_s, long_ago_s))
    train(270)
    train(272)  # makes room
    assert used.exists()
    assert not unused.exists()


def test_of_a_large_corpus_a_part_is_read_that_is_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = IterableSource(TEXTS, "text")
    monkeypatch.setattr(bpe, "SAMPLE_BYTES", source.num_bytes // 4)
    taken: list[list[str]] = []
    monkeypatch.setattr(bpe, "_train", lambda texts, _: taken.append(list(texts)) or 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trained_tokenizer(source, 300, tmp_path)
    assert taken[0] == taken[1]
    assert 3 <= len(taken[0]) <= 20


def test_progress_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{")
    with pytest.raises(DataError, match=r"web\.jsonl:41: not JSON"):
        trained_tokenizer(FileSource([path]), 300, tmp_path / "cache")
    calls: list[tuple[int, int]] = []
    source = FileSource([path], on_error="skip")
    trained_tokenizer(source, 300, tmp_path / "cache", progress=lambda *call: calls.append(call))
    assert calls[-1] == (source.num_bytes, source.num_bytes)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data cannot be written to .*file/cache: "):
        trained_tokenizer(IterableSource(TEXTS, "text"), 300, tmp_path / "file/cache")


def test_of_two_processes_that_train_the_same_the_first_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = bpe._train

    def beaten(*args: Any) -> Any:
        monkeypatch.undo()
        trained_tokenizer(IterableSource(TEXTS, "text"), 300, tmp_path)
        return train(*args)

    monkeypatch.setattr(bpe, "_train", beaten)
    tokenizer = trained_tokenizer(IterableSource(TEXTS, "text"), 300, tmp_path)
    assert tokenizer.eos_id == EOS_ID
    assert len([*tmp_path.iterdir()]) == 1
