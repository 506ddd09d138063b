"""Labelled files: what is read, what is refused with file and line, what is held out."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.config.loading import load_config
from evener.config.runs import ClassifyRunConfig
from evener.errors import ConfigError, DataError
from evener.tasks.classification.label_files import read_labelled
from evener.tasks.classification.run_data import load_data
from evener.tasks.classification.samples import LabelSet, Record
from evener.tasks.classification.splits import split_records
from evener.tasks.classification.stdlib_functions import PACKAGES, stdlib_functions
from helpers.source import ROOT


def read(path: Path, **keys: Any) -> list[tuple[str, str | int]]:
    keys = {"text_key": "text", "label_key": "label"} | keys
    return [(record.text, record.label) for record in read_labelled(path, **keys)]


def write(folder: Path, content: str, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def records(*labels: str | int, groups: list[str] | None = None) -> list[Record]:
    return [
        Record(f"text {i}", label, groups[i] if groups else f"text {i}", f"data.jsonl:{i + 1}")
        for i, label in enumerate(labels)
    ]


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def test_json_lines_hold_names_or_indices(tmp_path: Path) -> None:
    path = write(tmp_path, '{"text": "a", "label": "x"}\n\n{"label": 1, "text": "b", "more": 0}\n')
    assert read(path) == [("a", "x"), ("b", 1)]


def test_packed_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a", "label": 0}\n'))
    assert read(path) == [("a", 0)]


def test_csv_with_quotes_and_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, '﻿class,words\nx,"two, words\nand a line"\ny,one\n', "data.csv")
    assert read(path, text_key="words", label_key="class") == [
        ("two, words\nand a line", "x"),
        ("one", "y"),
    ]


def test_a_file_of_texts_alone_can_be_predicted(tmp_path: Path) -> None:
    path = write(tmp_path, '"a text"\n{"text": "another"}\n')
    assert [text for text, _ in read(path, label_key=None)] == ["a text", "another"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a", "label": 0}\n{"text": "b", \n', r"data\.jsonl:2 is malformed: not JSON"),
        (
            '{"text": "a", "label": 0}\n\n{"label": 1}\n',
            r"data\.jsonl:3 lacks 'text'; it has 'label'",
        ),
        ('{"text": "a"}\n', r":1 lacks 'label'"),
        ('{"text": " ", "label": 0}\n', r":1 has an empty text"),
        ('{"text": 3, "label": 0}\n', r":1 has 3 as its text"),
        ('{"text": "a", "label": 0.5}\n', r":1: label 0\.5 is a float"),
        ('{"text": "a", "label": true}\n', r":1: label True is a bool"),
        ("[1]\n", r":1 holds a list"),
        ('{"text": "a\\ud83d", "label": 0}\n', r":1 is malformed: 'text' holds '\\ud83d'"),
        ('{"text": "a", "label": "\\udc00"}\n', r":1 is malformed: 'label' holds '\\udc00'"),
        ("\n", "holds no samples"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "text,label\na,x\nb,x,y\n",
            r"data\.csv:3 is malformed: 3 columns where the first row names 2",
        ),
        ("text,label\na\n", r":2 is malformed: 1 columns"),
        ('text,label\n"a,x\n', r":2 is malformed: unexpected end of data"),
        ("words,label\na,x\n", r":2 lacks 'text'; it has 'words', 'label'"),
        ("text,label\n,x\n", r":2 has an empty text"),
        ("text,label\na,\n", r":2: label '' is empty"),
        ("text,label,text\na,x,b\n", r":1 names two columns 'text'"),
    ],
)
def test_bad_csv_is_named(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(write(tmp_path, content, "data.csv"))


def test_csv_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    """However much of the file is decoded at once."""
    path = tmp_path / "data.csv"
    path.write_bytes(b"text,label\n" + b"good,x\n" * 900 + b"caf\xe9,x\n" + b"good,x\n" * 9)
    with pytest.raises(DataError, match=r"data\.csv:902 is malformed: 'text' holds '\\udce9'"):
        read(path)
    path.write_bytes("text,label\na,x\n".encode("utf-16"))
    with pytest.raises(DataError, match=r"data\.csv:1 is malformed: .* save the file as UTF-8"):
        read(path)


def test_long_texts_in_csv(tmp_path: Path) -> None:
    path = write(tmp_path, f"text,label\n{'a' * 300_000},x\n", "data.csv")
    assert [len(text) for text, _ in read(path)] == [300_000]
    assert csv.field_size_limit() < 300_000  # the module's setting is given back


@pytest.mark.parametrize("group", ["null", '""'])
def test_a_sample_without_a_group_is_named(tmp_path: Path, group: str) -> None:
    """All of them would count as one group, and be held out together or not at all."""
    path = write(tmp_path, f'{{"text": "a", "label": 0, "file": {group}}}\n')
    with pytest.raises(DataError, match=r"data\.jsonl:1 has .* as its 'file'; give every sample"):
        read(path, group_key="file")


def test_a_file_of_another_kind_and_one_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither JSON Lines nor CSV"):
        read(tmp_path / "data.txt")
    with pytest.raises(DataError, match="does not exist"):
        read(tmp_path / "data.csv")


# ── classes ──────────────────────────────────────────────────────────────────────────────────────


def test_classes_are_the_names_that_occur_or_the_indices() -> None:
    assert LabelSet.of(records("b", "a", "b")).names == ("a", "b")
    assert LabelSet.of(records(0, 2, 1)).names == ("0", "1", "2")
    assert LabelSet.of(records("1", "0")).names == ("0", "1")  # as a CSV has them


def test_names_go_before_indices() -> None:
    labels = LabelSet(["1", "0"])
    assert labels.index("1", "here") == 0
    assert labels.index(1, "here") == 1


def test_labels_that_are_unknown_or_out_of_range() -> None:
    labels = LabelSet(["a", "b"])
    with pytest.raises(
        DataError, match=r"data:7: label 'c' is unknown; the 2 classes are 'a', 'b'"
    ):
        labels.index("c", "data:7")
    with pytest.raises(DataError, match=r"data:7: label 2 is out of range.* 0 to 1"):
        labels.index(2, "data:7")


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1, 4_000_000_000], r":3: label 4000000000 would make 4,000,000,001 classes"),
        (
            ["a", "b", 1],
            r":3 has the index 1 as its label, and data.jsonl:1 the name 'a'",
        ),
        ([2, 1, 1], r":2: the lowest label is 1, and indices begin with 0"),
        ([0, -1, 1], r":2: the lowest label is -1, and indices begin with 0"),
        (["0", "x" * 9, 1], r"data.jsonl:3 has the index 1 .* data.jsonl:2 the name 'xxxxxxxxx'"),
    ],
)
def test_labels_that_make_no_classes(labels: list[str | int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        LabelSet.of(records(*labels))


def test_indices_may_be_written_as_texts_here_and_there() -> None:
    labels = LabelSet.of(records(0, "0", 1, "1"))
    assert labels.names == ("0", "1")
    assert [labels.index(label, "") for label in (0, "0", 1, "1")] == [0, 0, 1, 1]


def test_one_class_written_in_two_ways_is_split_as_one(tmp_path: Path) -> None:
    rows = [{"text": f"text {i}", "label": i % 2} for i in range(20)] + [
        {"text": "a", "label": "0"}
    ]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(load_config(ClassifyRunConfig, {"data": {"path": str(path)}}))
    assert data.labels.names == ("0", "1")
    assert len(data.train.texts) + len(data.heldout.texts) == 21


def test_labels_of_other_libraries_are_numbers() -> None:
    labels = LabelSet(["a", "b"])
    assert labels.index(np.int64(1), "") == labels.index(torch.tensor(1), "") == 1
    for label in (np.float32(1.0), torch.tensor([0.5]), 1.0, True, None):
        with pytest.raises(DataError, match=r"data:7: label .* give a class by name or by index"):
            labels.index(label, "data:7")  # type: ignore[arg-type]


def test_digits_without_end_are_a_name() -> None:
    assert len(LabelSet.of(records("1" * 5_000, "a"))) == 2


@pytest.mark.parametrize(
    ("label", "words"),
    [("fruti", r"data.jsonl:41: label 'fruti' is unknown"), (7, r":41: label 7 is out of range")],
)
def test_a_label_that_is_not_among_those_given_is_named_with_its_line(
    tmp_path: Path, label: str | int, words: str
) -> None:
    rows = [{"text": f"text {i}", "label": ("fruit", "tool")[i % 2]} for i in range(40)]
    lines = [json.dumps(row) + "\n" for row in (*rows, {"text": "one", "label": label})]
    path = write(tmp_path, "".join(lines))
    config = load_config(
        ClassifyRunConfig, {"data": {"path": str(path)}, "labels": ["fruit", "tool"]}
    )
    with pytest.raises(DataError, match=words):
        load_data(config)


def test_one_class_is_none() -> None:
    with pytest.raises(DataError, match="two or more"):
        LabelSet.of(records("a", "a"))


def test_balanced_weights_give_every_class_the_same_say() -> None:
    labels = LabelSet(["a", "b"])
    weights = labels.weights("balanced", [0, 0, 0, 1])
    assert weights == (pytest.approx(4 / 6), pytest.approx(4 / 2))
    assert labels.weights({"b": 3.0}, []) == (1.0, 3.0)
    with pytest.raises(ConfigError, match="names 'c'"):
        labels.weights({"c": 1.0}, [])
    with pytest.raises(ConfigError, match="3 numbers for 2 classes"):
        labels.weights([1.0, 2.0, 3.0], [])


# ── splitting ────────────────────────────────────────────────────────────────────────────────────


def test_groups_stay_together_and_every_class_is_on_both_sides() -> None:
    groups = [f"{label}{i % 6}" for label in "ab" for i in range(60)]
    rows = records(*(["a"] * 60 + ["b"] * 60), groups=groups)
    training, heldout = split_records(rows, 0.25, seed=1)
    assert not {r.group for r in training} & {r.group for r in heldout}
    assert {r.label for r in training} == {r.label for r in heldout} == {"a", "b"}
    assert len(training) + len(heldout) == 120
    assert 20 <= len(heldout) <= 45
    assert split_records(rows[::-1], 0.25, seed=1)[1] == heldout[::-1]


def test_equal_texts_are_on_one_side() -> None:
    rows = [Record(f"text {i % 20}", i % 2, f"text {i % 20}", "") for i in range(80)]
    training, heldout = split_records(rows, 0.3, seed=0)
    assert not {r.text for r in training} & {r.text for r in heldout}


def test_something_of_every_class_is_left_to_train_on() -> None:
    training, heldout = split_records(records(*"ab" * 20), 0.99, seed=0)
    assert {r.label for r in training} == {r.label for r in heldout} == {"a", "b"}


def test_a_class_of_one_text_is_named_with_its_line() -> None:
    with pytest.raises(DataError, match=r"data.jsonl:5: class 'c' has 1 different text"):
        split_records(records("a", "a", "b", "b", "c"), 0.5, seed=0)


def test_a_class_of_one_group_cannot_be_split() -> None:
    with pytest.raises(DataError, match=r"class 'b' has 1 group\(s\), too few"):
        split_records(records("a", "a", "b", "b", groups=["1", "2", "3", "3"]), 0.5, seed=0)


def test_a_class_that_is_missing_in_training(tmp_path: Path) -> None:
    train = write(
        tmp_path, "".join(json.dumps({"text": f"{i}", "label": "a"}) + "\n" for i in range(4))
    )
    held = write(tmp_path, '{"text": "x", "label": "b"}\n', "held.jsonl")
    keys = {"data": {"path": str(train), "heldout_path": str(held)}, "labels": ["a", "b"]}
    with pytest.raises(DataError, match="no sample of 'b' in the training data"):
        load_data(ClassifyRunConfig.model_validate(keys))


def test_a_class_of_the_held_out_part_that_training_lacks(tmp_path: Path) -> None:
    train = write(tmp_path, '{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n')
    held = write(tmp_path, '{"text": "z", "label": "c"}\n', "held.jsonl")
    keys = {"data": {"path": str(train), "heldout_path": str(held)}}
    with pytest.raises(DataError, match=r"held\.jsonl:1: label 'c' is unknown"):
        load_data(ClassifyRunConfig.model_validate(keys))


# ── the data set that is always there ────────────────────────────────────────────────────────────


def test_functions_of_the_standard_library_are_split_by_file() -> None:
    rows = stdlib_functions()
    assert {row.label for row in rows} == set(PACKAGES)
    assert len({row.text for row in rows}) == len(rows) > 2000
    training, heldout = split_records(rows, 0.25, seed=0)
    assert not {r.group for r in training} & {r.group for r in heldout}
    assert {r.label for r in heldout} == set(PACKAGES)
    assert 0.15 < len(heldout) / len(rows) < 0.4


def test_a_python_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks the sources"):
        stdlib_functions(tmp_path)


def test_the_example_file_names_every_section() -> None:
    config = load_config(ClassifyRunConfig, ROOT / "examples" / "classify.yaml")
    assert config.class_weights == "balanced"
    assert config.model_fields_set >= {"data", "model", "lora", "optimizer", "eval", "checkpoint"}


def test_classes_that_are_numbers_are_weighted_as_yaml_has_them() -> None:
    config = ClassifyRunConfig.model_validate({"class_weights": {0: 2, 1: 1.0}})
    assert LabelSet(["0", "1"]).weights(config.class_weights, []) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"class_weights": [0, 1]}, "a number above 0 for each class"),
        ({"class_weights": {"a": -1.0}}, "a number above 0 for each class"),
        ({"class_weights": {True: 1.0}}, "a number above 0 for each class"),
        ({"class_weights": [1.0, "b"]}, "a number above 0 for each class"),
        ({"seq_len": 8, "end_tokens": 8}, "end_tokens=8 leave no room for text in seq_len=8"),
    ],
)
def test_settings_that_cannot_be_are_named(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClassifyRunConfig(**keys)
