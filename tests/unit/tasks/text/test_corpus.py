"""From files to tokens: what is taken, what is refused, and when the cache is used again."""

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ConfigError, DataError
from evener.tasks.text import corpus
from evener.tasks.text.corpus import Corpus
from evener.tasks.text.documents import ignore
from evener.tasks.text.file_source import FileSource
from evener.tasks.text.readers import LARGE_FILE_BYTES, cut_pieces
from evener.tasks.text.sources import find_files, stdlib_sources
from helpers.limits import PATIENCE_S


class Letters:
    """A tokenizer of bytes that counts its calls."""

    def __init__(self, vocab_size=257, fingerprint="letters"):
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.eos_id = 256
        self.texts = []

    def encode(self, text):
        self.texts.append(text)
        return np.frombuffer(text.encode(), np.uint8)

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


def prepare_corpus(paths, tokenizer, cache, *, progress=ignore, on_note=ignore, **options):
    """A corpus of files."""
    names = ("suffixes", "exclude", "text_key")
    of_files = {name: options.pop(name) for name in names if name in options}
    source = FileSource(paths, **of_files)
    return corpus.prepare_corpus(
        source, tokenizer, cache, progress=progress, on_note=on_note, **options
    )


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def text(tmp_path):
    return write(tmp_path / "text", {f"{i:02}.txt": f"document {i}\n" * (i + 1) for i in range(30)})


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def all_documents(corpus: Corpus):
    """The documents in the order of the file, as bytes without end-of-text."""
    spans = corpus.documents[:, :2].astype(int)
    assert all(corpus.tokens[stop - 1] == corpus.eos_id for _, stop in spans)
    assert spans[:, 1].max() == len(corpus.tokens)
    return [corpus.tokens[a : b - 1].astype(np.uint8).tobytes() for a, b in spans]


def labels(files):
    return [file.label for file in files]


# ── which files ──────────────────────────────────────────────────────────────────────────────────


def test_folders_are_walked_in_order_of_labels_without_the_hidden(tmp_path):
    root = write(
        tmp_path / "r",
        {
            "b.txt": "1",
            "a/z.md": "2",
            "a/b/c.py": "3",
            "B.TXT": "4",
            "x.bin": "5",
            ".hidden.txt": "6",
            ".git/config.txt": "7",
            "a.txt": "8",
        },
    )
    assert labels(find_files([root], None, ())) == ["B.TXT", "a.txt", "a/b/c.py", "a/z.md", "b.txt"]
    assert labels(find_files([root], (".md", ".bin"), ())) == ["a/z.md", "x.bin"]
    assert len(find_files([root], ("",), ())) == 6


def test_exclude_matches_names_at_any_depth_or_whole_paths(tmp_path):
    names = ["test/a.py", "pkg/test/b.py", "pkg/c.py", "pkg/test_d.py", "pkg/deep/e.py"]
    root = write(tmp_path / "r", dict.fromkeys(names, "x"))

    def found(*exclude):
        return labels(find_files([root], None, exclude))

    assert found("test") == ["pkg/c.py", "pkg/deep/e.py", "pkg/test_d.py"]
    assert found("test_*") == ["pkg/c.py", "pkg/deep/e.py", "pkg/test/b.py", "test/a.py"]
    assert found("pkg/*.py") == ["test/a.py"]
    assert found("pkg/test") == ["pkg/c.py", "pkg/deep/e.py", "pkg/test_d.py", "test/a.py"]


def test_links_and_repeated_files_are_read_once(tmp_path):
    root = write(tmp_path / "r", {"a/one.txt": "1", "b/two.txt": "2"})
    (root / "a/link.txt").symlink_to(root / "b/two.txt")
    (root / "a/hard.txt").hardlink_to(root / "a/one.txt")
    (root / "broken.txt").symlink_to(root / "nowhere")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    assert labels(find_files([root], None, ())) == ["a/hard.txt", "a/link.txt"]


def test_several_sources_are_told_apart_and_named_files_are_always_taken(tmp_path):
    for side in "xy":
        write(tmp_path / side / "data", {"a.txt": side})
    write(tmp_path, {".odd.bin": "named"})
    sources = [tmp_path / "x/data", tmp_path / "y/data", tmp_path / ".odd.bin", tmp_path / "x/data"]
    assert labels(find_files(sources, None, ())) == [
        "0-data/a.txt",
        "1-data/a.txt",
        "2-.odd.bin",
    ]


def test_what_is_missing_says_so(tmp_path):
    with pytest.raises(DataError, match=r"nowhere does not exist: check the path"):
        find_files([tmp_path / "nowhere"], None, ())
    with pytest.raises(DataError, match="name at least one"):
        find_files([], None, ())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        find_files([tmp_path / "pipe"], None, ())
    root = write(tmp_path / "r", {"a.jpg": "1", "b.jpg": "2", "c": "3"})
    with pytest.raises(DataError, match=r"only others \(2 x \.jpg, 1 x no suffix\)"):
        find_files([root], None, ())
    with pytest.raises(DataError, match="any others are hidden or left out"):
        find_files([root], ("",), ("*",))


def test_standard_library_is_on_every_machine():
    root, exclude = stdlib_sources()
    found = labels(find_files([root], (".py",), exclude))
    assert {"os.py", "json/decoder.py", "asyncio/base_events.py"} <= set(found)
    assert 400 < len(found) < 900
    folders = {part for name in found for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "site-packages", "__pycache__"}


# ── documents ────────────────────────────────────────────────────────────────────────────────────


def test_one_file_is_one_document_with_end_of_text(text, cache):
    corpus = prepare_corpus([text], Letters(), cache)
    files = sorted(text.iterdir())
    assert all_documents(corpus) == [path.read_bytes() for path in files]
    assert (len(corpus.documents), corpus.tokens.dtype.str) == (30, "<u2")
    assert len(corpus.tokens) == sum(path.stat().st_size for path in files) + 30


def test_large_vocabulary_takes_four_bytes(text, cache):
    assert prepare_corpus([text], Letters(65536), cache).tokens.itemsize == 2
    corpus = prepare_corpus([text], Letters(65537), cache)
    assert corpus.tokens.itemsize == 4
    assert all_documents(corpus)[3] == (text / "03.txt").read_bytes()


@pytest.mark.parametrize("batch", [1, 100, 10**9])
def test_documents_are_tokenised_together_and_keep_their_order(text, cache, monkeypatch, batch):
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", batch)
    prepared = prepare_corpus([text], Letters(), cache)
    assert all_documents(prepared) == [path.read_bytes() for path in sorted(text.iterdir())]


def test_empty_files_give_no_document(tmp_path, cache):
    files = {"a.txt": "one", "b.txt": "", "c.txt": " \n\t", "e.txt": "two"}
    root = write(tmp_path / "r", files)
    assert all_documents(prepare_corpus([root], Letters(), cache)) == [b"one", b"two"]


def test_byte_order_mark_is_dropped_and_line_ends_are_kept(tmp_path, cache):
    root = write(tmp_path / "r", {"a.txt": b"\xef\xbb\xbfone\r\ntwo", "b.txt": "\u00e9\U0001f600"})
    corpus = prepare_corpus([root], Letters(), cache)
    assert all_documents(corpus) == [b"one\r\ntwo", "\u00e9\U0001f600".encode()]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine \xff\xfe", r"bad.txt is not UTF-8: .* 0xff at byte 5. Convert"),
        (b"\xef\xbb\xbfab\xc3", r"unexpected end of data 0xc3 at byte 5"),
        (b"h\0i\0", r"bad.txt is not text: NUL at byte 1. .*UTF-16"),
    ],
)
def test_what_is_not_utf8_is_named_with_the_offset(tmp_path, cache, content, message):
    root = write(tmp_path / "r", {"a.txt": "one", "bad.txt": content, "c.txt": "two"})
    with pytest.raises(DataError, match=message):
        prepare_corpus([root], Letters(), cache)
    assert not list(cache.iterdir())


def test_binary_files_are_skipped_when_everything_was_asked_for(tmp_path, cache):
    root = write(tmp_path / "r", {"a": "one", "b": b"\x7fELF\0", "c": "two"})
    notes = []
    corpus = prepare_corpus([root], Letters(), cache, suffixes=("",), on_note=notes.append)
    assert all_documents(corpus) == [b"one", b"two"]
    assert notes == ["left out because binary: 1 files, b"]
    with pytest.raises(DataError, match="NUL"):
        prepare_corpus([root / "a", root / "b"], Letters(), cache, suffixes=("",))


@settings(max_examples=200, deadline=None)
@given(
    content=st.text(alphabet="ab\n \r\u00e9\U0001f600", max_size=400).map(str.encode),
    target=st.integers(4, 60),
)
def test_pieces_join_to_the_whole_and_never_split_a_character(content, target):
    pieces = list(cut_pieces(io.BytesIO(content), target))
    assert b"".join(piece for _, piece in pieces) == content
    assert [offset for offset, _ in pieces] == [
        sum(len(piece) for _, piece in pieces[:i]) for i in range(len(pieces))
    ]
    for _, piece in pieces:
        piece.decode()
        assert 0 < len(piece) <= 2 * target


def test_pieces_end_at_paragraphs_then_at_lines():
    def cut(content, target):
        return [piece for _, piece in cut_pieces(io.BytesIO(content), target)]

    assert cut(b"aaaa\n\n\nbbbbb\nb\n\ncc", 5) == [b"aaaa\n\n\n", b"bbbbb\nb\n\n", b"cc"]
    assert cut(b"aaaaaa\nbbbbbbbbb", 5) == [b"aaaaaa\n", b"bbbbbbbbb"[:10]]
    assert cut(b"a" * 25, 5) == [b"a" * 10, b"a" * 10, b"a" * 5]


def test_a_single_file_is_cut_so_that_some_is_held_out(tmp_path, cache):
    paragraphs = "".join(f"paragraph {i}\n{'word ' * 30}\n\n" for i in range(1000))
    path = write(tmp_path, {"book.txt": paragraphs}) / "book.txt"
    corpus = prepare_corpus([path], Letters(), cache)
    documents = all_documents(corpus)
    assert b"".join(documents) == paragraphs.encode()
    assert 15 <= len(documents) <= 25
    assert all(document.startswith(b"paragraph ") for document in documents)
    train, heldout = corpus.split(32)
    assert len(train) > 0
    assert len(heldout) > 0


def test_a_large_file_among_others_is_cut_as_well_and_read_in_parts(tmp_path, cache):
    line = b"some words of a line\n"
    large = line * (LARGE_FILE_BYTES // len(line) + 1)
    root = write(tmp_path / "r", {"a.txt": "small", "large.txt": large})
    tokenizer = Letters()
    corpus = prepare_corpus([root], tokenizer, cache)
    documents = all_documents(corpus)
    assert documents[0] == b"small"
    assert b"".join(documents[1:]) == large
    assert max(map(len, tokenizer.texts)) <= 2 * 64 * 1024


def test_undecodable_byte_late_in_a_cut_file_is_named_by_its_place_in_the_file(tmp_path, cache):
    content = b"line of text\n" * 50_000 + b"\xff\n"
    path = write(tmp_path, {"book.txt": content}) / "book.txt"
    with pytest.raises(DataError, match=f"0xff at byte {len(content) - 2}"):
        prepare_corpus([path], Letters(), cache)


@pytest.mark.parametrize("files", [{"a.txt": "short"}, {"a.txt": "one", "b.txt": ""}])
def test_one_document_cannot_be_split(tmp_path, cache, files):
    root = write(tmp_path / "r", files)
    for _ in range(2):  # from the cache as well
        with pytest.raises(DataError, match=r"one document only.*held out"):
            prepare_corpus([root], Letters(), cache)


def test_all_empty_is_an_error(tmp_path, cache):
    root = write(tmp_path / "r", {"a.txt": "", "b.txt": "\n"})
    with pytest.raises(DataError, match=r"a\.txt and 1 other file: there is no text in it\. Give"):
        prepare_corpus([root], Letters(), cache)


def test_a_tokenizer_that_breaks_its_promise_is_found(text, cache):
    with pytest.raises(DataError, match=r"ids from 10 to 117.*vocab_size is 110"):
        prepare_corpus([text], Letters(vocab_size=110), cache)


# ── the split ────────────────────────────────────────────────────────────────────────────────────


def heldout_labels(text, cache, **options):
    corpus = prepare_corpus([text], Letters(), cache, **options)
    documents = all_documents(corpus)
    train, heldout = corpus.split(4)

    def side(packed):
        stream = [i for k in range(len(packed)) for i in packed[k]["input_ids"].tolist()]
        return bytes(i for i in stream if i < 256)

    held = {d for d in documents if d in side(heldout)}
    assert train.num_documents + heldout.num_documents == len(documents)
    assert train.num_tokens + heldout.num_tokens == len(corpus.tokens) - len(documents)
    return held


def test_documents_keep_their_side_when_files_are_added(text, cache):
    before = heldout_labels(text, cache, heldout_fraction=0.3)
    write(text, {f"new{i}.txt": f"addition {i}\n" * 9 for i in range(10)})
    after = heldout_labels(text, cache, heldout_fraction=0.3)
    assert 3 <= len(before) <= 20
    assert {d for d in after if d.startswith(b"document")} == before


def test_split_follows_fraction_and_seed_without_tokenising_again(text, cache):
    splits = {}
    tokenizer = Letters()
    for fraction, seed in ((0.3, 0), (0.3, 1), (0.9, 0), (0.3, 0)):
        corpus = prepare_corpus([text], tokenizer, cache, heldout_fraction=fraction, seed=seed)
        train, heldout = corpus.split(8)
        splits[fraction, seed] = (train.num_documents, train.signature, heldout.signature)
    assert len(tokenizer.texts) == 30
    assert splits[0.9, 0][0] < splits[0.3, 0][0]
    assert len({s for _, *pair in splits.values() for s in pair}) == 6
    assert corpus.split(8).train.signature == splits[0.3, 0][1]
    assert corpus.split(9).train.signature != splits[0.3, 0][1]


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_each_side_gets_at_least_one_document(text, cache, fraction):
    train, heldout = prepare_corpus([text], Letters(), cache, heldout_fraction=fraction).split(4)
    assert {train.num_documents, heldout.num_documents} == {1, 29}


def test_held_out_share_is_about_the_fraction(tmp_path, cache):
    root = write(tmp_path / "r", {f"{i}.txt": f"text {i}" for i in range(1000)})
    corpus = prepare_corpus([root], Letters(), cache, heldout_fraction=0.2)
    assert 150 < corpus.split(2).heldout.num_documents < 250


def test_too_short_for_one_sample_names_the_lengths(text, cache):
    corpus = prepare_corpus([text], Letters(), cache)
    with pytest.raises(DataError, match=r"hold \d+ tokens to predict.*seq_len=100000"):
        corpus.split(100_000)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_bad_fraction(text, cache, fraction):
    with pytest.raises(ConfigError, match="heldout_fraction="):
        prepare_corpus([text], Letters(), cache, heldout_fraction=fraction)


# ── the cache ────────────────────────────────────────────────────────────────────────────────────


def test_unchanged_files_are_neither_read_nor_tokenised_again(text, cache, monkeypatch):
    first = prepare_corpus([text], Letters(), cache)
    monkeypatch.setattr(FileSource, "documents", lambda *_, **__: pytest.fail("reads again"))
    assert prepare_corpus([text], Letters(), cache) == first


def test_touched_and_copied_files_are_tokenised_again_to_the_same_signature(text, cache, tmp_path):
    first = prepare_corpus([text], Letters(), cache)
    copy = write(tmp_path / "copy", {path.name: path.read_bytes() for path in text.iterdir()})
    os.utime(text / "04.txt", ns=(10**18, 10**18))
    for root in (text, copy):
        again = prepare_corpus([root], Letters(), cache)
        assert again.folder != first.folder
        assert again.signature == first.signature


def test_changed_files_are_seen_by_size_or_time(text, cache):
    first = prepare_corpus([text], Letters(), cache)
    path = text / "04.txt"
    path.write_bytes(path.read_bytes().replace(b"document", b"DOCUMENT"))
    os.utime(path, ns=(10**18, 10**18))
    second = prepare_corpus([text], Letters(), cache)
    assert second.signature != first.signature
    assert b"DOCUMENT 4\n" * 5 in all_documents(second)


def test_signature_depends_on_content_names_and_tokenizer(text, cache):
    def signature(tokenizer=None, **options):
        return prepare_corpus([text], tokenizer or Letters(), cache, **options).signature

    first = signature()
    assert signature(Letters(fingerprint="other")) != first
    assert signature(Letters(vocab_size=300)) != first
    assert signature(exclude=("05.txt",)) != first
    (text / "05.txt").rename(text / "5.txt")
    assert signature() != first


DAMAGE = {
    "tokens cut short": lambda f: os.truncate(f / "tokens.bin", 100),
    "tokens empty": lambda f: os.truncate(f / "tokens.bin", 0),
    "documents missing": lambda f: (f / "documents.bin").unlink(),
    "documents cut short": lambda f: os.truncate(f / "documents.bin", 100),
    "documents of another corpus": lambda f: os.truncate(f / "documents.bin", 240),
    "documents empty": lambda f: os.truncate(f / "documents.bin", 0),
    "signature missing": lambda f: (f / "signature").unlink(),
    "signature empty": lambda f: (f / "signature").write_text(""),
    "signature not text": lambda f: (f / "signature").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_cache_is_rebuilt_with_a_note(text, cache, damage):
    corpus = prepare_corpus([text], Letters(), cache)
    whole = all_documents(corpus)
    damage(corpus.folder)
    notes = []
    again = prepare_corpus([text], Letters(), cache, on_note=notes.append)
    assert len(notes) == 1
    assert "is damaged" in notes[0]
    assert str(corpus.folder) in notes[0]
    assert (again, all_documents(again)) == (corpus, whole)
    assert sorted(path.name for path in cache.iterdir())[0].startswith("corpus-")
    prepare_corpus([text], Letters(), cache, on_note=lambda note: pytest.fail(note))


def test_a_build_that_fails_leaves_nothing_in_use(text, cache):
    class Failing(Letters):
        def encode(self, text):
            if len(self.texts) == 20:
                raise RuntimeError("out of luck")
            return super().encode(text)

    with pytest.raises(RuntimeError, match="out of luck"):
        prepare_corpus([text], Failing(), cache)
    assert not list(cache.iterdir())
    assert len(prepare_corpus([text], Letters(), cache).documents) == 30


def test_abandoned_builds_are_removed_and_running_ones_are_not(text, cache):
    old, running = cache / "corpus-1.tmp-1-a", cache / "tokenizer-2.tmp-2-b"
    for folder in (old, running):
        write(folder, {"tokens.bin": "half"})
    for path in (old, old / "tokens.bin"):
        os.utime(path, (1, 1))
    corpus = prepare_corpus([text], Letters(), cache, on_note=pytest.fail)
    assert {*cache.iterdir()} == {corpus.folder, running}


def test_whoever_finishes_first_is_kept(text, cache):
    class Slow(Letters):
        """While this one tokenises, another process does all the work."""

        def encode(self, text_):
            if not self.texts:
                prepare_corpus([text], Letters(), cache)
            return super().encode(text_)

    corpus = prepare_corpus([text], Slow(), cache)
    assert [*cache.iterdir()] == [corpus.folder]
    assert len(all_documents(corpus)) == 30
    assert corpus == prepare_corpus([text], Letters(), cache)


def test_a_file_that_changes_while_it_is_read_is_named(text, cache, monkeypatch):
    monkeypatch.setattr(corpus, "BATCH_CHARACTERS", 1)

    class Meddling(Letters):
        def encode(self, text_):
            (text / "29.txt").write_text("something else")
            return super().encode(text_)

    with pytest.raises(DataError, match=r"29.txt has changed while it was read"):
        prepare_corpus([text], Meddling(), cache)


def test_cache_that_cannot_be_written_is_named(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot be written to .*file/cache: .*another cache"):
        prepare_corpus([text], Letters(), tmp_path / "file/cache")


def test_a_full_disk_is_named(text, cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device. Name another"):
        prepare_corpus([text], Letters(), cache)
    assert not list(cache.iterdir())
    monkeypatch.undo()
    assert len(prepare_corpus([text], Letters(), cache).documents) == 30


def test_progress_ends_at_the_total(text, cache):
    calls = []
    prepare_corpus([text], Letters(), cache, progress=lambda *call: calls.append(call))
    size = sum(path.stat().st_size for path in text.iterdir())
    assert {total for _, total in calls} == {size}
    assert calls[-1] == (size, size)
    assert calls == sorted(calls)


def test_two_processes_at_once_do_no_harm(text, cache):
    script = (
        "import sys; from pathlib import Path; from evener.tasks.text.corpus import prepare_corpus;"
        "from evener.tasks.text.file_source import FileSource; cache = Path(sys.argv[2]);"
        "from evener.tasks.text.tokenizer import load_tokenizer;"
        "source = FileSource([Path(sys.argv[1])]);"
        "c = prepare_corpus(source, load_tokenizer(None), cache);"
        "print(c.signature, len(c.tokens), len(c.split(16).train))"
    )
    source = str(Path(__file__).parents[4] / "src")
    environment = os.environ | {"PYTHONPATH": source}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, str(text), str(cache)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in running]
    assert outputs[0] == outputs[1] != ""
    assert [process.returncode for process in running] == [0, 0]
    assert len(list(cache.iterdir())) == 1
