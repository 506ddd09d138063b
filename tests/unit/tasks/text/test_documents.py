"""Files of every kind and data sets in memory: which documents they hold, and what is refused."""

import gzip
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from evener.config.runs import DataConfig
from evener.errors import ConfigError, DataError
from evener.tasks.text.documents import (
    LARGE_FILE_BYTES,
    DocumentSource,
    FileSource,
    RecordSource,
    cut_pieces,
)
from evener.tasks.text.sources import find_files

TEXTS = ["one", "two\n\nlines", "\u00e9\u65e5\U0001f600", "  \n", "", "last"]
KEPT = ["one", "two\n\nlines", "\u00e9\u65e5\U0001f600", "last"]
KINDS = ["jsonl", "ndjson", "jsonl.gz", "parquet"]


def files(*paths: Path, **keys: Any) -> FileSource:
    return FileSource(DataConfig(path=[str(path) for path in paths], **keys), quiet=True)


def records(given: Any, **keys: Any) -> RecordSource:
    return RecordSource(given, DataConfig(**keys), quiet=True)


def texts_of(source: DocumentSource) -> list[str]:
    return [document.text for document in source.documents("reading")]


def write(root: Path, contents: dict[str, str | bytes]) -> Path:
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def lines_of(given: list[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in given)


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


# ── which files ──────────────────────────────────────────────────────────────────────────────────


def labels(
    *sources: Path, suffixes: tuple[str, ...] | None = None, exclude: tuple[str, ...] = ()
) -> list[str]:
    return [file.label for file in find_files(sources, suffixes, exclude)]


def test_folders_are_walked_in_order_of_labels_without_the_hidden(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.md", "a/b/c.py", "B.TXT", "x.bin", ".hid.txt", ".git/c.txt", "a.txt"]
    root = write(tmp_path / "r", dict.fromkeys(names, "x"))
    (root / "broken.txt").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    assert labels(root) == ["B.TXT", "a.txt", "a/b/c.py", "a/z.md", "b.txt"]
    assert labels(root, suffixes=(".md", ".bin")) == ["a/z.md", "x.bin"]
    assert len(labels(root, suffixes=("",))) == 6


def test_exclude_matches_names_at_any_depth_or_whole_paths(tmp_path: Path) -> None:
    names = ["test/a.py", "pkg/test/b.py", "pkg/c.py", "pkg/test_d.py", "pkg/deep/e.py"]
    root = write(tmp_path / "r", dict.fromkeys(names, "x"))
    kept = {
        "test": ["pkg/c.py", "pkg/deep/e.py", "pkg/test_d.py"],
        "test_*": ["pkg/c.py", "pkg/deep/e.py", "pkg/test/b.py", "test/a.py"],
        "pkg/*.py": ["test/a.py"],
        "pkg/test": ["pkg/c.py", "pkg/deep/e.py", "pkg/test_d.py", "test/a.py"],
    }
    assert {glob: labels(root, exclude=(glob,)) for glob in kept} == kept


def test_several_sources_are_told_apart_and_named_files_are_always_taken(tmp_path: Path) -> None:
    write(tmp_path, {"x/data/a.txt": "x", "y/data/a.txt": "y", ".odd.bin": "named"})
    sources = [tmp_path / "x/data", tmp_path / "y/data", tmp_path / ".odd.bin"]
    assert labels(*sources) == ["0-data/a.txt", "1-data/a.txt", "2-.odd.bin"]


def test_what_is_missing_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("nowhere", "pipe"):
        with pytest.raises(DataError, match=rf"{name} does not exist, or is not a regular file"):
            labels(tmp_path / name)
    with pytest.raises(DataError, match=r"no file ends in \.md\. Name the folder"):
        labels(write(tmp_path / "r", {"a.jpg": "1"}), suffixes=(".md",))


# ── plain text ───────────────────────────────────────────────────────────────────────────────────


def test_a_file_is_a_document_and_its_line_ends_are_kept(tmp_path: Path) -> None:
    contents = {
        "a.txt": b"\xef\xbb\xbfone\r\ntwo",
        "b.txt": "",
        "c.txt": " \n\t",
        "d.txt": "\u00e9",
    }
    assert texts_of(files(write(tmp_path / "r", contents))) == ["one\r\ntwo", "\u00e9"]
    with pytest.raises(DataError, match=r"and 1 other file: it holds no text"):
        texts_of(files(write(tmp_path / "empty", {"a.txt": "", "b.txt": "\n"})))


def test_what_is_not_utf8_is_named_or_left_out(tmp_path: Path) -> None:
    root = write(tmp_path / "r", {"a.txt": "one", "bad.txt": b"fine \xff", "c.txt": "two"})
    with pytest.raises(DataError, match=r"bad.txt: not UTF-8: invalid start byte 0xff\. Correct"):
        texts_of(files(root))
    assert texts_of(files(root, on_error="skip")) == ["one", "two"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="ab\n \r\u00e9\U0001f600", max_size=400), size=st.integers(4, 60))
def test_pieces_join_to_the_whole(text: str, size: int) -> None:
    pieces = list(cut_pieces(io.StringIO(text, newline=""), size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= 2 * size for piece in pieces)


def test_pieces_end_at_paragraphs_then_at_lines() -> None:
    def cut(text: str) -> list[str]:
        return list(cut_pieces(io.StringIO(text), 5))

    assert cut("aaaa\n\nbbbb\nb\n\ncc") == ["aaaa\n\n", "bbbb\nb\n\n", "cc"]
    assert cut("aaa\naaa\nbbb\nbbb") == ["aaa\naaa\n", "bbb\nbbb"]
    assert cut("a" * 25) == ["a" * 10, "a" * 10, "a" * 5]


def test_a_single_file_and_a_large_one_are_cut(tmp_path: Path) -> None:
    book = "".join(f"paragraph {i}\n{'word ' * 30}\n\n" for i in range(1000))
    pieces = texts_of(files(write(tmp_path, {"book.txt": book}) / "book.txt"))
    assert "".join(pieces) == book
    assert 15 <= len(pieces) <= 25
    assert all(piece.startswith("paragraph ") for piece in pieces)
    line = "some words of a line\n"
    large = line * (LARGE_FILE_BYTES // len(line) + 1)
    small, *parts = texts_of(files(write(tmp_path / "r", {"a.txt": "small", "large.txt": large})))
    assert (small, "".join(parts)) == ("small", large)
    assert max(map(len, parts)) <= 2 * 64 * 1024


# ── records ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_a_document(tmp_path: Path, kind: str) -> None:
    path = write_any(tmp_path, kind, TEXTS)
    documents = list(files(path).documents("reading"))
    first = 0 if kind == "parquet" else 1
    assert [(d.label, d.text) for d in documents] == [
        (f"{path.name}#{first + k}", text) for k, text in enumerate(TEXTS) if text in KEPT
    ]
    done = [document.position for document in documents]
    assert done == sorted(done)
    assert 0 < done[-1] <= path.stat().st_size


def test_other_keys_and_columns(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(lines_of([{"text": "no", "body": "yes"}]))
    table = write_table(tmp_path / "b.parquet", ["also"], "body")
    assert texts_of(files(lines, table, text_key="body")) == ["yes", "also"]
    assert files(lines).identity != files(lines, text_key="body").identity


def test_texts_may_stand_alone_and_windows_may_have_written_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf"first"\r\n\r\n  \n{"text": "second"}')
    assert texts_of(files(path)) == ["first", "second"]


BROKEN = {
    "no JSON": (b'{"text": "a"', "Expecting ',' delimiter"),
    "no object": (b"[1]", r"\[1\] is not a text"),
    "no such key": (b'{"body": 1, "id": 2}', r"None is not a text \(data.text_key is 'text'\)"),
    "a number": (b'{"text": 3}', "3 is not a text"),
    "no UTF-8": (b'{"text": "\xff"}', "0xff in position 10"),
    "half a character": (b'{"text": "a\\ud800"}', "surrogates not allowed"),
    "too deep": (b"[" * 100_000, "lists or objects are nested more than 100 deep"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_line_without_a_text_is_named_or_left_out(
    tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, why = BROKEN[case]
    path = tmp_path / "web.jsonl"
    path.write_bytes(b'\n"one"\n' + line + b'\n"two"\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"web\.jsonl:3: .*{why}.*data\.on_error: skip"):
        texts_of(files(path))
    assert texts_of(files(path, on_error="skip")) == ["one", "two"]
    assert capsys.readouterr().err.count("skipped, like") == 1
    assert files(path).identity != files(path, on_error="skip").identity


def test_a_row_without_a_text_is_named_or_left_out(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", ["one", None, "two", None])
    with pytest.raises(DataError, match=r"a\.parquet, row 1: None is not a text"):
        texts_of(files(path))
    assert texts_of(files(path, on_error="skip")) == ["one", "two"]


def damaged(folder: Path) -> Iterator[tuple[Path, str]]:
    whole = gzip.compress(lines_of([{"text": os.urandom(50).hex()} for _ in range(500)]))
    write(folder, {"cut.jsonl.gz": whole[: len(whole) // 2], "a.jsonl.gz": b"no archive"})
    yield folder / "cut.jsonl.gz", "is damaged: "
    yield folder / "a.jsonl.gz", "is damaged: "
    yield write(folder, {"a.parquet": b"else"}) / "a.parquet", "cannot be read as parquet: "
    yield write_table(folder / "b.parquet", ["x"], "body"), "no column 'text'; it has 'id', 'body'"


def test_a_file_that_is_damaged_as_a_whole_is_an_error_in_any_case(tmp_path: Path) -> None:
    for path, said in damaged(tmp_path):
        with pytest.raises(DataError, match=f"{path.name}.*{said}"):
            texts_of(files(path, on_error="skip"))


def test_without_pyarrow_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install 'evener\[data\]'"):
        texts_of(files(path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path, kind: str) -> None:
    source = files(write_any(tmp_path, kind, TEXTS))
    write_any(tmp_path, kind, ["something", "else"])
    with pytest.raises(DataError, match="changed while it was read"):
        texts_of(source)


# ── data sets in memory ──────────────────────────────────────────────────────────────────────────


def test_a_hugging_face_dataset_and_a_list_are_the_same_documents() -> None:
    dataset = Dataset.from_dict({"text": TEXTS, "label": list(range(6))})
    for rows in (TEXTS, dataset, dataset.with_format("torch"), dataset.to_iterable_dataset()):
        source = records(rows)
        assert texts_of(source) == KEPT
        assert source.identity == records(TEXTS).identity
    assert records([*TEXTS, "more"]).identity != records(TEXTS).identity


def test_records_of_a_data_set_without_a_text_are_named_or_left_out() -> None:
    rows = ["one", {"body": 1}, None, "two"]
    with pytest.raises(DataError, match=r"record 1 of the data set \(list\): None is not a text"):
        records(rows)
    assert texts_of(records(rows, on_error="skip")) == ["one", "two"]


def test_what_is_no_data_set_is_refused() -> None:
    for wrong in ("text", {"text": ["a"]}, 3, None, (text for text in TEXTS)):
        with pytest.raises(ConfigError, match=f"of type {type(wrong).__name__}; give an iterable"):
            records(wrong)
    with pytest.raises(DataError, match=r"the data set \(list\): it holds no text\. Give"):
        records([])
