"""Tokenizers: exact round trips, the ids of Hugging Face, nothing from the network, training."""

import json
import logging
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.config.runs import DataConfig
from evener.errors import ConfigError, DataError
from evener.tasks.text import bpe
from evener.tasks.text.bpe import EOS_ID, trained_tokenizer
from evener.tasks.text.documents import RecordSource
from evener.tasks.text.tokenizer import (
    ByteTokenizer,
    CausalTokenizer,
    check_vocabulary,
    load_tokenizer,
)

TEXTS = ["", "hello world", " a  b\n\n\tc ", "\u00e9\u65e5\u672c\U0001f600", "\0\r\n\x7f\ufeff"]
TRICKY = [*TEXTS, "<|endoftext|>", "a<|endoftext|>b", "def f(x):\n    return x's"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(self, address):
        pytest.fail(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail(f"looks up {a}"))


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    """A small byte-level BPE as transformers saves it, with truncation left on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, hello words"] * 5, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    folder = tmp_path_factory.mktemp("bpe")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", model_max_length=8
    )
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────


@given(st.text())
@settings(deadline=None)
def test_every_text_comes_back_exactly(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.ndim == 1
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text


def test_no_spec_is_the_byte_tokenizer():
    tokenizer = load_tokenizer(None)
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (257, 256)
    assert tokenizer.fingerprint == load_tokenizer(None).fingerprint != ""


def test_broken_bytes_show_as_replacement_characters():
    assert ByteTokenizer().decode([0xC3, 0x41]) == "\ufffdA"


def test_saved_bytes_load_in_auto_tokenizer_with_the_same_ids(tmp_path):
    from transformers import AutoTokenizer

    mine = ByteTokenizer()
    mine.save(tmp_path / "new/folder")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new/folder", local_files_only=True)
    assert (len(theirs), theirs.eos_token_id) == (mine.vocab_size, mine.eos_id)
    for text in TRICKY:
        assert theirs(text)["input_ids"] == mine.encode(text).tolist()
        assert theirs.decode(mine.encode(text).tolist()) == text
    assert theirs.decode([104, 105, 256], skip_special_tokens=True) == "hi"


# ── a folder ─────────────────────────────────────────────────────────────────────────────────────


def test_folder_gives_the_ids_of_transformers_without_special_tokens(bpe_folder):
    from transformers import AutoTokenizer

    mine = load_tokenizer(str(bpe_folder))
    theirs = AutoTokenizer.from_pretrained(bpe_folder, local_files_only=True)
    assert (mine.vocab_size, mine.eos_id) == (len(theirs), 1)
    for text in [*TRICKY, "hello world " * 50]:
        ids = mine.encode(text)
        assert ids.dtype == np.uint32
        expected = theirs(text, add_special_tokens=False, truncation=False, padding=False)
        assert ids.tolist() == expected["input_ids"]
        assert mine.decode(ids) == text
    assert mine.decode(np.array([0, *mine.encode("hello"), 1])) == "hello"


def test_files_are_the_folders_own_and_load_again(bpe_folder, tmp_path):
    tokenizer = load_tokenizer(bpe_folder)
    files = tokenizer.files()
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert "model.safetensors" not in files
    assert all((bpe_folder / name).read_bytes() == content for name, content in files.items())
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint


def test_fingerprint_follows_the_definition_only(bpe_folder, tmp_path):
    tokenizer = load_tokenizer(bpe_folder)
    tokenizer.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert "chat_template.jinja" in load_tokenizer(tmp_path).files()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<s>"}))
    assert load_tokenizer(tmp_path).fingerprint != tokenizer.fingerprint
    assert ByteTokenizer().fingerprint != tokenizer.fingerprint


def test_added_tokens_count_for_the_vocabulary(bpe_folder, tmp_path):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(bpe_folder, local_files_only=True)
    theirs.add_tokens(["<one>", "<two>"])
    theirs.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == load_tokenizer(bpe_folder).vocab_size + 2
    assert tokenizer.encode("<two>").tolist() == [tokenizer.vocab_size - 1]


def test_loading_and_long_texts_are_silent(bpe_folder, capfd, caplog):
    from transformers.utils import logging as theirs

    before = theirs.get_verbosity()
    with caplog.at_level(logging.INFO):
        load_tokenizer(bpe_folder).encode("hello world " * 1000)
    assert capfd.readouterr() == ("", "")
    assert theirs.get_verbosity() == before


def test_tokenizer_without_end_of_text_is_refused(bpe_folder, tmp_path):
    load_tokenizer(bpe_folder).save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"has no end-of-text token.*\"eos_token\""):
        load_tokenizer(tmp_path)


def test_what_is_no_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no tokenizer folder gpt2: evener downloads nothing"):
        load_tokenizer("gpt2")
    with pytest.raises(DataError, match=r"does not load as a tokenizer: .*save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(DataError, match=r"does not load as a tokenizer"):
        load_tokenizer(tmp_path)


def test_vocabulary_must_fit_the_model():
    check_vocabulary(257, 257)
    check_vocabulary(257, 32000)
    with pytest.raises(ConfigError, match=r"has 257 ids, the model only 256 .*vocab_size to 257"):
        check_vocabulary(257, 256)


# ── trained on the corpus ────────────────────────────────────────────────────────────────────────

CORPUS = [f"the quick brown fox number {k} jumps over the lazy dog\n" for k in range(40)]


def source(texts: list[str] = CORPUS, *, quiet: bool = True) -> RecordSource:
    return RecordSource(texts, DataConfig(), quiet=quiet)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> CausalTokenizer:
    return trained_tokenizer(source(), 300, tmp_path_factory.mktemp("cache"))


def test_texts_come_back_exactly_in_fewer_ids(trained: CausalTokenizer) -> None:
    assert trained.eos_id == EOS_ID
    assert 257 < trained.vocab_size <= 300
    together = trained.encode_batch([*CORPUS, *TRICKY])
    for text, ids in zip([*CORPUS, *TRICKY], together, strict=True):
        assert trained.decode(ids) == text
        assert EOS_ID not in ids  # the end of a text is never inside it, whatever it says
        assert np.array_equal(trained.encode(text), ids)
    assert len(together[0]) < len(CORPUS[0]) / 2


def test_transformers_gives_the_same_ids_from_what_a_checkpoint_holds(
    trained: CausalTokenizer, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert theirs.eos_token_id == EOS_ID
    for text in [*CORPUS[:3], *TRICKY]:
        assert trained.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    assert load_tokenizer(tmp_path).fingerprint == trained.fingerprint


def test_it_is_trained_once_for_each_text_and_size(
    trained: CausalTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(size: int, texts: list[str] = CORPUS) -> tuple[str, str]:
        found = trained_tokenizer(source(texts, quiet=False), size, tmp_path).fingerprint
        return found, capsys.readouterr().err

    assert train(300)[0] == trained.fingerprint  # the same text gives the same tokenizer
    (folder,) = tmp_path.iterdir()
    said = "note: trained a tokenizer of 270 ids on the data set (list)\n"
    assert train(270)[1] == said
    assert train(270)[1] == ""
    assert "trained a tokenizer" in train(270, CORPUS[1:])[1]
    (folder / "tokenizer.json").write_text("{")
    found, said = train(300)
    assert found == trained.fingerprint
    assert f"{folder} is damaged" in said


def test_of_a_large_corpus_a_part_is_read_that_is_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = source()
    monkeypatch.setattr(bpe, "SAMPLE_BYTES", large.num_bytes // 4)
    taken: list[list[str]] = []
    monkeypatch.setattr(bpe, "_train", lambda texts, _: taken.append(list(texts)) or 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trained_tokenizer(large, 300, tmp_path)
    assert taken[0] == taken[1]
    assert 3 <= len(taken[0]) <= 20
