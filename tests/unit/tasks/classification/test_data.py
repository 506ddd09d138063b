"""Labelled texts: what is read, what is refused with file and line, what is held out."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn  # noqa: F401  # sets environment variables for good, so before any test
import torch

from evener.config.loading import load_config
from evener.config.runs import ClassifyDataConfig, ClassifyRunConfig
from evener.errors import ConfigError, DataError
from evener.tasks.classification.labelled_data import load_data, read_records, split_records
from evener.tasks.classification.samples import LabelSet, Record
from evener.tasks.classification.stdlib_names import stdlib_names
from helpers.source import ROOT


def read(
    folder: Path, content: str | bytes, name: str = "data.jsonl", **keys: str
) -> list[tuple[str, str | int]]:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    found = read_records(folder / name, ClassifyDataConfig.model_validate(keys))
    return [(record.text, record.label) for record in found]


def records(*labels: str | int, groups: list[str] | None = None) -> list[Record]:
    return [
        Record(f"text {i}", label, groups[i] if groups else f"text {i}", f"data.jsonl:{i + 1}")
        for i, label in enumerate(labels)
    ]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def test_json_lines_plain_and_packed(tmp_path: Path) -> None:
    lines = '{"text": "a", "label": "x"}\n\n{"label": 1, "text": "b", "more": 0}\n'
    assert read(tmp_path, lines) == [("a", "x"), ("b", 1)]
    packed = gzip.compress(lines.encode())
    assert read(tmp_path, packed, "data.jsonl.gz") == [("a", "x"), ("b", 1)]


def test_csv_with_quotes_long_texts_and_other_names(tmp_path: Path) -> None:
    rows = f'\ufeffclass,words\nx,"two, words\nand a line"\ny,{"a" * 300_000}\n'
    assert read(tmp_path, rows, "data.csv", text_key="words", label_key="class") == [
        ("two, words\nand a line", "x"),
        ("a" * 300_000, "y"),
    ]


def test_texts_without_labels(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('"a text"\n{"text": "another"}\n')
    found = read_records(tmp_path / "data.jsonl", ClassifyDataConfig(), has_labels=False)
    assert [record.text for record in found] == ["a text", "another"]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.jsonl", '{"text": "a", "label": 0}\n{"text": "b", \n', r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", '\n{"label": 1}\n', r"a\.jsonl:2 lacks 'text'; it has 'label'"),
        ("a.jsonl", '{"text": "a"}\n', ":1 lacks 'label'"),
        ("a.jsonl", '{"text": " ", "label": 0}\n', ":1 has ' ' as its text"),
        ("a.jsonl", '{"text": 3, "label": 0}\n', ":1 has 3 as its text"),
        ("a.jsonl", '{"text": "a", "label": 0.5}\n', ":1: label 0.5 is a float"),
        ("a.jsonl", '{"text": "a", "label": true}\n', ":1: label True is a bool"),
        ("a.jsonl", '{"text": "a\\ud83d", "label": 0}\n', ":1 is not UTF-8"),
        ("a.jsonl", '{"text": "a", "label": "\\udc00"}\n', ":1 is not UTF-8"),
        ("a.jsonl", "[1]\n", ":1 holds a list"),
        ("a.jsonl", "\n", "holds no samples"),
        ("a.csv", "text,label\na,x\nb,x,y\n", r"a\.csv:3 has another number of columns"),
        ("a.csv", "text,label\na\n", ":2 has another number of columns"),
        ("a.csv", 'text,label\n"a,x\n', ":2 is not CSV: unexpected end of data"),
        ("a.csv", "words,label\na,x\n", ":2 lacks 'text'; it has 'words', 'label'"),
        ("a.csv", "text,label\na,\n", ":2: label '' is a str that names no class"),
        ("a.csv", b"text,label\ngood,x\ncaf\xe9,x\n", r":3 is not UTF-8: it holds '\\udce9'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, content: str, where: str) -> None:
    with pytest.raises(DataError, match=where):
        read(tmp_path, content, name)


def test_a_sample_without_a_group_is_named(tmp_path: Path) -> None:
    line = '{"text": "a", "label": 0, "file": null}\n'
    with pytest.raises(DataError, match=r"data\.jsonl:1 lacks 'file'"):
        read(tmp_path, line, group_key="file")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.csv cannot be read: .*No such file"):
        read_records(tmp_path / "data.csv", ClassifyDataConfig())


# ── classes ──────────────────────────────────────────────────────────────────────────────────────


def test_classes_are_the_names_that_occur_or_the_indices() -> None:
    assert LabelSet.of(records("b", "a", "b")).names == ("a", "b")
    assert LabelSet.of(records(0, "2", 1)).names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1, 4_000_000_000], ":3: label '4000000000' is not among the 3 indices from 0 to 2"),
        (["a", "b", 1], ":1: label 'a' is not among the 3 indices"),
        ([1, 2, 2], ":2: label '2' is not among the 2 indices"),
        ([0, -1, 1], ":2: label '-1' is not among"),
        (["a", "a"], "two or more"),
    ],
)
def test_labels_that_make_no_classes(labels: list[str | int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        LabelSet.of(records(*labels))


def test_a_label_is_a_name_or_an_index_of_any_library() -> None:
    labels = LabelSet(["1", "0"])
    assert [labels.index(label, "") for label in ("1", 1, np.int64(1))] == [0, 1, 1]
    assert labels.index(torch.tensor(0), "") == 0
    for bad in ("c", 2, -1):
        with pytest.raises(DataError, match=r"here: label .* is unknown; the 2 classes are '1'"):
            labels.index(bad, "here")


def test_class_weights() -> None:
    labels = LabelSet(["0", "b"])
    assert labels.weights("balanced", [0, 0, 0, 1]) == pytest.approx((4 / 6, 4 / 2))
    of_yaml = ClassifyRunConfig.model_validate({"class_weights": {0: 2, "b": 1.0}})
    assert labels.weights(of_yaml.class_weights, []) == [2.0, 1.0]
    assert labels.weights({"b": 3.0}, []) == [1.0, 3.0]
    with pytest.raises(ConfigError, match="names 'c'"):
        labels.weights({"c": 1.0}, [])
    with pytest.raises(ConfigError, match="'balanced', which needs training samples"):
        labels.weights("balanced", [])
    with pytest.raises(ConfigError, match="3 numbers for 2 classes"):
        labels.weights([1.0, 2.0, 3.0], [])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"class_weights": [0, 1]}, "a number above 0 for each class"),
        ({"class_weights": {"a": -1.0}}, "a number above 0 for each class"),
        ({"seq_len": 8, "end_tokens": 8}, "end_tokens=8 leave no room for text in seq_len=8"),
    ],
)
def test_settings_that_are_invalid_are_named(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ClassifyRunConfig(**keys)


# ── splitting ────────────────────────────────────────────────────────────────────────────────────


def test_groups_stay_together_and_every_class_is_on_both_sides() -> None:
    groups = [f"{label}{i % 6}" for label in "ab" for i in range(60)]
    rows = records(*(["a"] * 60 + ["b"] * 60), groups=groups)
    training, heldout = split_records(rows, 0.25, seed=1, has_groups=True)
    assert not {r.group for r in training} & {r.group for r in heldout}
    assert {r.label for r in training} == {r.label for r in heldout} == {"a", "b"}
    assert len(training) + len(heldout) == 120
    assert 20 <= len(heldout) <= 45


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.9])
def test_equal_texts_are_on_one_side(fraction: float) -> None:
    rows = [Record(f"text {i % 200}", i % 2, f"text {i % 200}", "") for i in range(800)]
    training, heldout = split_records(rows, fraction, seed=0, has_groups=False)
    assert not {r.text for r in training} & {r.text for r in heldout}
    assert len(heldout) == pytest.approx(800 * fraction, abs=8)


def test_a_class_that_cannot_be_on_both_sides_is_named_with_its_line() -> None:
    with pytest.raises(DataError, match=r"data.jsonl:5: its class has too few different texts"):
        split_records(records("a", "a", "b", "b", "c"), 0.5, seed=0, has_groups=False)
    rows = records("a", "a", "b", "b", groups=["1", "2", "3", "3"])
    with pytest.raises(DataError, match=r"data.jsonl:3: its class has too few groups"):
        split_records(rows, 0.5, seed=0, has_groups=True)


def test_classes_of_a_run_are_checked_on_both_sides(tmp_path: Path) -> None:
    def load(train: list[Any], held: list[Any] | None = None, **keys: Any) -> Any:
        for name, labels in (("train", train), ("held", held or [])):
            lines = [json.dumps({"text": f"{name} {i}", "label": x}) for i, x in enumerate(labels)]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        data = {"path": str(tmp_path / "train.jsonl")}
        if held is not None:
            data["heldout_path"] = str(tmp_path / "held.jsonl")
        return load_data(load_config(ClassifyRunConfig, {"data": data, **keys}))

    found = load([0, 1] * 10 + ["0"])  # one class, written in two ways
    assert found.labels.names == ("0", "1")
    assert len(found.train) + len(found.heldout) == 21
    with pytest.raises(DataError, match="no sample of 'b' in the training data"):
        load(["a"] * 4, ["b"], labels=["a", "b"])
    with pytest.raises(DataError, match=r"held\.jsonl:1: label 'c' is unknown"):
        load(["a", "b"], ["c"])
    with pytest.raises(DataError, match=r"train\.jsonl:4: label 'fruti' is unknown"):
        load(["fruit", "tool", "fruit", "fruti"], labels=["fruit", "tool"])


# ── the data set that is always there ────────────────────────────────────────────────────────────


@pytest.mark.long
def test_names_of_the_standard_library_are_split_by_file() -> None:
    found = {record.text: record for record in stdlib_names()}
    assert found["OrderedDict"].label == "class"
    assert found["namedtuple"].label == "function"
    assert found["SEEK_SET"].label == "constant"
    assert len(found) > 5000
    data = load_data(ClassifyRunConfig())
    assert data.labels.names == ("class", "constant", "function", "variable")
    held = {found[text].group for text, _ in data.heldout}
    assert held.isdisjoint(found[text].group for text, _ in data.train)
    assert 0.15 < len(data.heldout) / len(found) < 0.25


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no Python sources"):
        stdlib_names(tmp_path)


def test_the_example_file_names_every_section() -> None:
    config = load_config(ClassifyRunConfig, ROOT / "examples" / "classify.yaml")
    assert config.class_weights == "balanced"
    assert config.model_fields_set >= {"data", "model", "lora", "optimizer", "eval", "checkpoint"}
