"""Packed samples against the rule, written down token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import DataError
from evener.tasks.lm_batch import IGNORED
from evener.tasks.text.packing import PackedDocuments

EOS = 99


def naive_samples(documents, seq_len):
    """The rule: a stream of (token, is first of its document), cut into samples."""
    stream = [(token, place == 0) for document in documents for place, token in enumerate(document)]
    samples = []
    for first in range(0, len(stream) - 1, seq_len):
        inputs, labels = [], []
        for place in range(first, first + seq_len):
            inputs.append(stream[place][0] if place < len(stream) else EOS)
            is_target = place + 1 < len(stream) and not stream[place + 1][1]
            labels.append(stream[place + 1][0] if is_target else IGNORED)
        samples.append((inputs, labels))
    return samples


def pack(documents, seq_len, gaps=None, dtype=np.uint16):
    """Lays documents out in one array, with foreign tokens between them where gaps say so."""
    tokens, rows = [], []
    for number, document in enumerate(documents):
        tokens += [7777] * (gaps[number] if gaps else 0)
        rows.append((len(tokens), len(tokens) + len(document)))
        tokens += document
    table = np.array(rows, np.int64).reshape(-1, 2)
    return PackedDocuments(np.array(tokens, dtype), table, seq_len, eos_id=EOS, signature="s")


documents_of = st.lists(
    st.lists(st.integers(0, 98), min_size=1, max_size=40).map(lambda ids: [*ids, EOS]), max_size=40
)


@settings(max_examples=200, deadline=None)
@given(documents=documents_of, seq_len=st.integers(2, 50), seed=st.integers(0, 9), data=st.data())
def test_every_token_that_begins_no_document_is_a_target_exactly_once(
    documents, seq_len, seed, data
):
    gap = st.integers(0, 3)
    gaps = data.draw(st.lists(gap, min_size=len(documents), max_size=len(documents)))
    packed = pack(documents, seq_len, gaps)
    expected = naive_samples(documents, seq_len)
    assert len(packed) == len(expected)
    counted = []
    order = list(range(len(packed)))
    np.random.default_rng(seed).shuffle(order)
    for index in order:
        sample = packed[index]
        assert sample["input_ids"].tolist() == expected[index][0]
        assert sample["labels"].tolist() == expected[index][1]
        counted += [label for label in sample["labels"].tolist() if label != IGNORED]
        assert any(label != IGNORED for label in sample["labels"].tolist())
    assert sorted(counted) == sorted(token for document in documents for token in document[1:])
    assert packed.num_tokens == len(counted)


@pytest.mark.parametrize("index", [2, -1, 10**9])
def test_index_out_of_range(index):
    packed = pack([[1, 2, 3, EOS], [4, EOS]], 3)
    with pytest.raises(IndexError, match=f"sample {index} of 2"):
        packed[index]
    assert len(list(packed)) == 2  # iteration ends


def test_too_little_data_for_a_batch_names_the_counts():
    packed = pack([[1, 2, 3, EOS], [4, EOS]], 3)
    packed.require_windows(2)
    with pytest.raises(DataError, match=r"2 samples of 3 tokens \(4 targets\).*batch_size=3"):
        packed.require_windows(3)
