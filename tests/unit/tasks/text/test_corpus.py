"""From documents to samples: what is tokenised, how it is split, when the cache is used again."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from evener.config.runs import DataConfig
from evener.errors import DataError
from evener.tasks.text import corpus
from evener.tasks.text.cache import UNUSED_DAYS
from evener.tasks.text.corpus import CorpusSplits, prepare_corpus
from evener.tasks.text.documents import FileSource
from evener.tasks.text.packing import PackedDocuments
from evener.tasks.text.tokenizer import CausalTokenizer
from helpers.limits import PATIENCE_S

EOS = 256


class Letters(CausalTokenizer):
    """A tokenizer of bytes that counts its texts."""

    eos_id = EOS

    def __init__(self, vocab_size: int = 257, fingerprint: str = "letters") -> None:
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str], /) -> list[NDArray[Any]]:
        self.texts += texts
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | NDArray[Any], /) -> str:
        raise NotImplementedError

    def files(self) -> dict[str, bytes]:
        return {}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(f"document {i}\n" * (i + 1))
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def prepare(
    path: Path, cache: Path, tokenizer: CausalTokenizer | None = None, *, seed: int = 0, **keys: Any
) -> CorpusSplits:
    data = DataConfig(**{"path": str(path), "seq_len": 8, **keys})
    source = FileSource(data, quiet=True)
    return prepare_corpus(source, tokenizer or Letters(), cache, data, seed=seed)


def documents_of(side: PackedDocuments) -> list[bytes]:
    stream = [i for k in range(len(side)) for i in side[k]["input_ids"].tolist()]
    parts = bytes(0 if i == EOS else i for i in stream).split(b"\0")
    return [part for part in parts if part]


def test_every_document_is_on_one_side_whole(text: Path, cache: Path) -> None:
    sides = prepare(text, cache, heldout_fraction=0.3)
    found = [document for side in sides for document in documents_of(side)]
    assert sorted(found) == sorted(path.read_bytes() for path in text.iterdir())
    size = sum(path.stat().st_size for path in text.iterdir())
    assert sum(side.num_tokens for side in sides) == size  # each ends, and has a first token


@pytest.mark.parametrize("batch", [1, 100, 10**9])
def test_documents_are_tokenised_together_and_keep_their_order(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", batch)
    train, _ = prepare(text, cache, heldout_fraction=1e-9)
    in_order = [path.read_bytes() for path in sorted(text.iterdir())]
    found = documents_of(train)
    assert found == [document for document in in_order if document in found]
    assert len(found) == 29


def test_large_vocabulary_takes_four_bytes(text: Path, cache: Path) -> None:
    sizes = []
    for vocab_size in (65536, 65537):
        prepare(text, cache / str(vocab_size), Letters(vocab_size))
        (folder,) = (cache / str(vocab_size)).iterdir()
        sizes.append((folder / "tokens.bin").stat().st_size)
    assert sizes[1] == 2 * sizes[0]


# ── the split ────────────────────────────────────────────────────────────────────────────────────


def test_documents_keep_their_side_when_files_are_added(text: Path, cache: Path) -> None:
    before = documents_of(prepare(text, cache, heldout_fraction=0.3).heldout)
    for i in range(10):
        (text / f"new{i}.txt").write_text(f"addition {i}\n" * 9)
    after = documents_of(prepare(text, cache, heldout_fraction=0.3).heldout)
    assert 3 <= len(before) <= 20
    assert [d for d in after if d.startswith(b"document")] == before


def test_split_follows_fraction_and_seed_without_tokenising_again(text: Path, cache: Path) -> None:
    tokenizer, signatures, sizes = Letters(), set(), {}
    for fraction, seed in ((0.3, 0), (0.3, 1), (0.9, 0), (0.3, 0)):
        splits = prepare(text, cache, tokenizer, heldout_fraction=fraction, seed=seed)
        signatures |= {side.signature for side in splits}
        sizes[fraction, seed] = splits.train.num_documents
    assert len(tokenizer.texts) == 30
    assert sizes[0.9, 0] < sizes[0.3, 0]
    assert len(signatures) == 6
    assert prepare(text, cache, seq_len=9).train.signature not in signatures


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_gets_at_least_one_document(text: Path, cache: Path, fraction: float) -> None:
    splits = prepare(text, cache, heldout_fraction=fraction)
    assert {side.num_documents for side in splits} == {1, 29}


def test_too_little_text_is_named(text: Path, cache: Path) -> None:
    with pytest.raises(DataError, match=r"hold \d+ tokens to predict.*seq_len=100000"):
        prepare(text, cache, seq_len=100_000)
    for _ in range(2):  # from the cache as well
        with pytest.raises(DataError, match=r"only one document.*held out"):
            prepare(text / "00.txt", cache)


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


def test_files_are_tokenised_again_when_their_size_or_time_has_changed(
    text: Path, cache: Path
) -> None:
    tokenizer = Letters()
    first = prepare(text, cache, tokenizer).train
    prepare(text, cache, tokenizer)
    assert len(tokenizer.texts) == 30
    path = text / "04.txt"
    path.write_bytes(path.read_bytes().replace(b"document", b"DOCUMENT"))
    os.utime(path, ns=(10**18, 10**18))
    splits = prepare(text, cache, tokenizer)
    assert b"DOCUMENT 4\n" * 5 in [d for side in splits for d in documents_of(side)]
    assert splits.train.signature == first.signature  # as many tokens in each document


def test_a_copy_is_the_same_data_and_other_names_are_not(
    text: Path, cache: Path, tmp_path: Path
) -> None:
    first = prepare(text, cache).train.signature
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in text.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert prepare(copy, cache).train.signature == first
    assert prepare(text, cache, Letters(fingerprint="other")).train.signature != first
    assert prepare(text, cache, exclude=["05.txt"]).train.signature != first
    (copy / "05.txt").rename(copy / "5.txt")
    assert prepare(copy, cache).train.signature != first


DAMAGE = {
    "tokens cut short": lambda f: os.truncate(f / "tokens.bin", 100),
    "tokens empty": lambda f: os.truncate(f / "tokens.bin", 0),
    "documents cut short": lambda f: os.truncate(f / "documents.bin", 100),
    "documents of another corpus": lambda f: os.truncate(f / "documents.bin", 240),
    "documents empty": lambda f: os.truncate(f / "documents.bin", 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_is_made_again(
    text: Path, cache: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = prepare(text, cache)
    expected = documents_of(whole.train)
    (folder,) = cache.iterdir()
    DAMAGE[damage](folder)
    again = prepare(text, cache)
    assert (again.train.signature, documents_of(again.train)) == (whole.train.signature, expected)
    assert f"{folder} is damaged" in capsys.readouterr().err
    prepare(text, cache)
    assert capsys.readouterr().err == ""


def test_a_build_that_fails_leaves_nothing_in_use(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device. Name another"):
        prepare(text, cache)
    assert not list(cache.iterdir())
    monkeypatch.undo()
    assert prepare(text, cache).train.num_documents > 20


def test_a_cache_that_cannot_be_used_is_named(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/cache cannot be read: .*data\.cache"):
        prepare(text, tmp_path / "file/cache")


def test_what_nobody_has_used_for_long_is_removed(text: Path, cache: Path, tmp_path: Path) -> None:
    def make(name: str) -> Path:
        before = {*cache.glob("*")}
        prepare(text, cache, Letters(fingerprint=name))
        return ({*cache.iterdir()} - before or {cache}).pop()

    old, used, recent = make("old"), make("used"), make("recent")
    unfinished = cache / "corpus-1.tmp-1-a"
    unfinished.mkdir()
    (tmp_path / "mine").mkdir()
    (cache / "corpus-link").symlink_to(tmp_path / "mine")
    (cache / "notes.txt").touch()
    long_ago_s = time.time() - (UNUSED_DAYS + 1) * 86_400
    for path in (old, used, unfinished, tmp_path / "mine", cache / "notes.txt"):
        os.utime(path, (long_ago_s, long_ago_s))
    make("used")  # opened again: nothing is made, so nothing is removed
    assert old.exists()
    new = make("new")
    kept = {used, recent, new, cache / "corpus-link", cache / "notes.txt"}
    assert {*cache.iterdir()} == kept


def test_two_processes_at_once_do_no_harm(text: Path, cache: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from evener.tasks.text.corpus import prepare_corpus;"
        "from evener.tasks.text.documents import FileSource; cache = Path(sys.argv[2]);"
        "from evener.tasks.text.tokenizer import load_tokenizer;"
        "from evener.config.runs import DataConfig;"
        "data = DataConfig(path=sys.argv[1], seq_len=16);"
        "splits = prepare_corpus(FileSource(data), load_tokenizer(None), cache, data);"
        "print(splits.train.signature, sum(splits.train[i]['input_ids'].sum().item()"
        " for i in range(len(splits.train))))"
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(text), str(cache)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    assert outputs[0] == outputs[1] != ""
    assert [process.returncode for process in running] == [0, 0]
    assert len(list(cache.iterdir())) == 1
