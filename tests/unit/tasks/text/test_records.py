"""JSON Lines, parquet and data sets in memory: a document per record, and what holds none."""

import gzip
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from pyarrow import parquet

from evener.errors import ConfigError, DataError
from evener.tasks.text import readers
from evener.tasks.text.cache import UNUSED_DAYS
from evener.tasks.text.corpus import Corpus, prepare_corpus
from evener.tasks.text.documents import DocumentSource, IterableSource
from evener.tasks.text.file_source import FileSource
from evener.tasks.text.tokenizer import ByteTokenizer

TEXTS = ["one", "two\n\nlines", "\u00e9\u65e5\U0001f600", "  \n", "", "last"]
KEPT = ["one", "two\n\nlines", "\u00e9\u65e5\U0001f600", "last"]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def texts_of(source: DocumentSource, notes: list[str] | None = None) -> list[str]:
    note = pytest.fail if notes is None else notes.append
    return [document.text for document in source.documents(note=note)]


def lines_of(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_table(path: Path, texts: list[Any], column: str = "text", **options: Any) -> Path:
    table = pa.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, **options)
    return path


def write_any(folder: Path, kind: str, texts: list[str]) -> Path:
    """The same texts in a file of any kind."""
    path = folder / f"data.{kind}"
    content = lines_of([{"id": k, "text": text} for k, text in enumerate(texts)])
    if kind == "parquet":
        return write_table(path, texts, row_group_size=2)
    path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    return path


KINDS = ["jsonl", "ndjson", "jsonl.gz", "parquet"]


# ── whole files ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_a_document(tmp_path: Path, cache: Path, kind: str) -> None:
    path = write_any(tmp_path, kind, TEXTS)
    source = FileSource([path])
    assert texts_of(source) == KEPT
    seen: list[tuple[int, int]] = []
    documents = list(source.documents(progress=lambda *call: seen.append(call)))
    first = 0 if kind == "parquet" else 1
    places = [first + k for k, text in enumerate(TEXTS) if text in KEPT]
    assert [d.label for d in documents] == [f"{path.name}#{place}" for place in places]
    assert seen[-1] == (path.stat().st_size, path.stat().st_size)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    corpus = prepare_corpus(source, ByteTokenizer(), cache)
    assert len(corpus.tokens) == sum(len(text.encode()) + 1 for text in KEPT)


def test_records_and_plain_text_lie_in_one_folder(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for kind in KINDS:
        write_any(folder, kind, [f"{kind} {k}" for k in range(3)])
    (folder / "plain.txt").write_text("plain")
    expected = sorted(f"{kind} {k}" for kind in KINDS for k in range(3))
    assert sorted(texts_of(FileSource([folder]))) == [*expected, "plain"]


def test_other_keys_and_columns(tmp_path: Path, cache: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(lines_of([{"text": "no", "body": "yes"}]))
    table = write_table(tmp_path / "b.parquet", ["also"], "body")
    assert texts_of(FileSource([lines, table], text_key="body")) == ["yes", "also"]
    by_text, by_body = (FileSource([lines], text_key=key) for key in ("text", "body"))
    assert by_text.identity != by_body.identity
    plain = tmp_path / "c.txt"
    plain.write_text("x")
    both = [FileSource([plain], text_key=key).identity for key in ("text", "body")]
    assert both[0] == both[1]  # which decides nothing about plain text


def test_texts_may_stand_alone_and_windows_may_have_written_them(
    tmp_path: Path, cache: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf"first"\r\n\r\n  \n{"text": "second"}')
    assert texts_of(FileSource([path])) == ["first", "second"]


@pytest.mark.parametrize(
    "kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_type_of_text_column(tmp_path: Path, cache: Path, kind: Any) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": pa.array(["one", "two", "one"]).cast(kind)}), path)
    assert texts_of(FileSource([path])) == ["one", "two", "one"]


def test_parquet_is_read_in_parts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", [str(k) for k in range(50)], row_group_size=20)
    monkeypatch.setattr(readers, "_ROWS_AT_ONCE", 7)
    sizes: list[int] = []
    iterate = parquet.ParquetFile.iter_batches

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        for batch in iterate(self, *args, **options):
            sizes.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", watched)
    assert texts_of(FileSource([path])) == [str(k) for k in range(50)]
    assert max(sizes) <= 7


# ── records without a text ───────────────────────────────────────────────────────────────────────

BROKEN = {
    "no JSON": (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
    "no object": (b"[1]", "a list and no object with a key 'text'"),
    "no such key": (b'{"body": 1, "id": 2}', "no key 'text' (data.text_key); it has 'body', 'id'"),
    "null": (b'{"text": null}', "'text' is null and no text"),
    "a number": (b'{"text": 3}', "'text' is of type int and no text"),
    "no UTF-8": (b'{"text": "\xff"}', "not UTF-8: 0xff at byte 10"),
    "half a character": (b'{"text": "a\\ud800"}', "half a surrogate pair at character 1"),
    "too deep": (b"[" * 100_000, "lists or objects are nested more than 100 deep"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_line_without_a_text_is_named_or_left_out(tmp_path: Path, cache: Path, case: str) -> None:
    line, why = BROKEN[case]
    path = tmp_path / "web.jsonl"
    good = lines_of([{"text": "one"}, {"text": "two"}])
    path.write_bytes(b"\n" + good + line + b"\n" + lines_of([{"text": "three"}]) + line + b"\n")
    notes: list[str] = []
    skipping = FileSource([path], on_error="skip")
    corpus = prepare_corpus(skipping, ByteTokenizer(), cache, on_note=notes.append)
    assert len(corpus.documents) == 3
    assert notes == [f"left out 2 records without a text, the first: {path}:4: {why}"]
    # What is in the cache is no excuse: who wants an error gets one.
    with pytest.raises(DataError) as caught:
        prepare_corpus(FileSource([path]), ByteTokenizer(), cache)
    assert str(caught.value) == (
        f"{path}:4: {why}. Mend it, or leave such records out with data.on_error: skip"
    )


def test_a_row_without_a_text_is_named_or_left_out(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", ["one", None, "two", None])
    with pytest.raises(DataError, match=r"a\.parquet, row 1: 'text' is null and no text\. Mend"):
        texts_of(FileSource([path]))
    notes: list[str] = []
    assert texts_of(FileSource([path], on_error="skip"), notes) == ["one", "two"]
    why = f"{path}, row 1: 'text' is null and no text"
    assert notes == [f"left out 2 records without a text, the first: {why}"]


def test_only_records_without_a_text(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    path.write_bytes(lines_of([{"body": "x"}] * 3))
    with pytest.raises(
        DataError,
        match=r"no text in it \(left out: 3 records .* first: .*web\.jsonl:1: no key 'text'",
    ):
        texts_of(FileSource([path], on_error="skip"))


# ── files that cannot be read at all ─────────────────────────────────────────────────────────────


def test_a_damaged_archive_is_an_error_even_where_lines_are_skipped(
    tmp_path: Path, cache: Path
) -> None:
    whole = gzip.compress(lines_of([{"text": os.urandom(50).hex()} for _ in range(500)]))
    for name, content in {"cut": whole[: len(whole) // 2], "other": b"no archive"}.items():
        path = tmp_path / f"{name}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}\.jsonl\.gz is damaged after line \d+: "):
            texts_of(FileSource([path], on_error="skip"))


def test_what_is_no_parquet_or_has_no_text_is_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as parquet: "):
        texts_of(FileSource([path], on_error="skip"))
    write_table(path, ["x"], "body")
    with pytest.raises(
        DataError, match=r"no column 'text'; it has 'id', 'body': set data\.text_key"
    ):
        texts_of(FileSource([path]))
    with pytest.raises(DataError, match=r"a\.parquet, row 0: 'id' is of type int and no text"):
        texts_of(FileSource([path], text_key="id"))


def test_without_pyarrow_the_remedy_is_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"a\.parquet needs pyarrow: pip install 'evener\[data\]'"
    ):
        texts_of(FileSource([path]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_read_is_named(
    tmp_path: Path, cache: Path, kind: str
) -> None:
    source = FileSource([write_any(tmp_path, kind, TEXTS)])
    write_any(tmp_path, kind, ["something", "else"])
    with pytest.raises(DataError, match="has changed while it was read"):
        texts_of(source)


# ── data sets in memory ──────────────────────────────────────────────────────────────────────────


def test_a_hugging_face_dataset_and_a_list_are_the_same_corpus(cache: Path) -> None:
    dataset = Dataset.from_dict({"text": TEXTS, "label": list(range(6))})
    source = IterableSource(dataset, "text")
    assert texts_of(source) == KEPT
    assert source.identity == IterableSource(TEXTS, "text").identity
    assert source.identity == IterableSource(dataset.with_format("torch"), "text").identity
    assert source.identity != IterableSource([*TEXTS, "more"], "text").identity
    first = prepare_corpus(source, ByteTokenizer(), cache)

    again = prepare_corpus(
        IterableSource(TEXTS, "text"),
        ByteTokenizer(),
        cache,
        progress=lambda *_: pytest.fail("it tokenises again"),
    )
    assert again == first


def test_a_dataset_that_is_streamed(tmp_path: Path) -> None:
    dataset = Dataset.from_dict({"text": TEXTS}).to_iterable_dataset()
    assert texts_of(IterableSource(dataset, "text")) == KEPT


def test_records_of_a_data_set_without_a_text_are_named_or_left_out() -> None:
    records = ["one", {"body": 1}, None, "two"]
    with pytest.raises(DataError, match=r"record 1 of the data set \(list\): no key 'text'"):
        IterableSource(records, "text")
    notes: list[str] = []
    assert texts_of(IterableSource(records, "text", on_error="skip"), notes) == ["one", "two"]
    assert notes[0].startswith("left out 2 records without a text, the first: record 1 of the data")


def test_what_is_no_data_set_is_refused() -> None:
    for records in ("text", {"text": ["a"]}, 3, None):
        with pytest.raises(ConfigError, match=f"of type {type(records).__name__}; give a list"):
            IterableSource(records, "text")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="of type generator, which can be iterated over only once"
    ):
        IterableSource((text for text in TEXTS), "text")
    with pytest.raises(DataError, match=r"the data set \(list\): there is no text in it\. Give"):
        IterableSource([], "text")


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


def test_what_nobody_has_used_for_long_is_removed_and_said(cache: Path, tmp_path: Path) -> None:
    def make(word: str) -> Corpus:
        return prepare_corpus(
            IterableSource([word, "and another"], "text"),
            ByteTokenizer(),
            cache,
            on_note=notes.append,
        )

    notes: list[str] = []
    old, used, recent = make("old"), make("used"), make("recent")
    long_ago_s = time.time() - (UNUSED_DAYS + 1) * 86_400
    for path in (old.folder, *old.folder.iterdir(), used.folder):
        os.utime(path, (long_ago_s, long_ago_s))
    (tmp_path / "mine").mkdir()
    (cache / "corpus-link").symlink_to(tmp_path / "mine")
    (cache / "notes.txt").touch()
    make("used")  # opened again: nothing is made, so nothing is removed
    assert notes == []
    make("new")
    assert notes == [
        f"removed from {cache}, where nobody has used it for 30 days: {old.folder.name}"
    ]
    assert not old.folder.exists()
    assert used.folder.exists()
    assert recent.folder.exists()
    assert (tmp_path / "mine").exists()
    assert (cache / "notes.txt").exists()
