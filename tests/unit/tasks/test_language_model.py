from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener.config.runs import ModelConfig
from evener.errors import ConfigError
from evener.tasks.language_model import (
    build_model,
    mean_loss,
    printable,
    summed_loss,
    vocabulary_size,
    write_text,
)
from evener.tasks.lm_batch import LMBatch

TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CPU = torch.device("cpu")
PLACE = {"vocab_size": 40, "seq_len": 12, "eos_id": 39}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(config=TINY), **PLACE)


def refusal(**config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(**config), **PLACE)
    return str(caught.value)


# ── building ─────────────────────────────────────────────────────────────────────────────────────


def test_a_model_from_scratch_fits_tokenizer_and_samples(model: nn.Module) -> None:
    assert vocabulary_size(model) == 40
    assert model.config.max_position_embeddings == 12
    assert model.config.eos_token_id == model.config.bos_token_id == 39
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("keys", "learnt"), [({}, False), ({"pad_token_id": None}, True)])
def test_the_end_of_a_text_is_learnt_only_where_it_is_no_padding(
    keys: dict[str, Any], learnt: bool
) -> None:
    model = build_model(ModelConfig(config=TINY | keys), **PLACE)
    batch = LMBatch.of_documents([[1, 39, 5, 1, 39, 7]])
    mean_loss(model, batch, CPU).backward()
    embedding = model.get_input_embeddings().weight
    moves = embedding.grad.abs().sum(dim=1) > 0
    assert moves[[1, 5, 39]].tolist() == [True, True, learnt]
    assert bool((embedding[39] == 0).all()) is not learnt


def test_keys_of_the_configuration_go_before_what_evener_would_choose() -> None:
    config = {**TINY, "vocab_size": 64, "max_position_embeddings": 99, "eos_token_id": 1}
    model = build_model(ModelConfig(config=config), **PLACE)
    assert vocabulary_size(model) == 64
    assert (model.config.max_position_embeddings, model.config.eos_token_id) == (99, 1)


def test_keys_count_by_the_names_of_their_type_too() -> None:
    config = {"n_positions": 99, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = build_model(ModelConfig(type="gpt2", config=config), **PLACE)
    assert model.config.max_position_embeddings == 99


@pytest.mark.parametrize(
    "config",
    [
        {"type": "gpt2", "config": {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}},
        {"type": "llama", "config": {**TINY, "max_position_embeddings": 8}},
    ],
)
def test_samples_longer_than_the_model_takes_are_refused(config: dict[str, Any]) -> None:
    assert refusal(**config).startswith("data.seq_len is 12, the model of model.type")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama", ["'lama' is not known to transformers", "llama"]),
        ("t5", ["'t5' is not a causal language model"]),
    ],
)
def test_a_type_that_is_no_causal_language_model(name: str, words: list[str]) -> None:
    message = refusal(type=name)
    assert all(word in message for word in words)
    assert len(message) < 200


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hiden_size": 8}, ["unknown key 'model.config.hiden_size' (value 8)", "LlamaConfig"]),
        ({"hidden_size": 15}, ["'hidden_size': 15", "15"]),
        ({"num_attention_heads": 0}, ["'num_attention_heads': 0", "ZeroDivisionError"]),
    ],
)
def test_numbers_that_make_no_model_are_refused_in_one_line(
    changes: dict[str, Any], words: list[str]
) -> None:
    message = refusal(config={**TINY, **changes})
    assert all(word in message for word in words)
    assert "\n" not in message
    assert len(message) < 600


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    message = refusal(path=str(tmp_path))
    assert message.startswith(
        f"model.path is '{tmp_path}', which has no config.json; give a folder"
    )
    (tmp_path / "config.json").write_text("{}")
    message = refusal(path=str(tmp_path))
    assert message.startswith(
        f"model.path '{tmp_path}' cannot be loaded as a causal language model: "
    )
    assert "checkpoint of evener" in message
    assert "\n" not in message


# ── losses ───────────────────────────────────────────────────────────────────────────────────────


def batch() -> LMBatch:
    ids = torch.arange(24).reshape(2, 12) % 40
    labels = ids.roll(-1, 1).clone()
    labels[0, -1] = -100
    labels[1, 3:] = -100
    return LMBatch(ids, labels)


def test_losses_are_over_counted_tokens_only(model: nn.Module) -> None:
    data = batch()
    assert data.num_tokens == 11 + 3
    with torch.no_grad():
        logits = model(input_ids=data.input_ids).logits.double()
    logs = torch.log_softmax(logits, -1)
    expected = -sum(
        float(logs[row, place, label])
        for row, place in (data.labels != -100).nonzero().tolist()
        for label in [int(data.labels[row, place])]
    )
    assert summed_loss(model, data, CPU) == pytest.approx(expected, rel=1e-6)
    mean = mean_loss(model, data, CPU)
    assert mean.item() == pytest.approx(expected / 14, rel=1e-6)
    assert mean.requires_grad


# ── text ─────────────────────────────────────────────────────────────────────────────────────────


def write(model: nn.Module, prompt: list[int], **changes: Any) -> list[int]:
    options = {"num_tokens": 30, "temperature": 0.0, "seq_len": 12, "seed": 0, "device": CPU}
    return write_text(model.eval(), prompt, **{**options, **changes})


def test_likeliest_tokens_are_those_that_the_whole_context_gives(model: nn.Module) -> None:
    written = write(model, [1, 2, 3], num_tokens=8)
    context = [1, 2, 3]
    with torch.no_grad():
        for _ in range(8):
            logits = model(input_ids=torch.tensor([context])).logits[0, -1]
            context.append(int(logits.argmax()))
    assert written == context[3:]


def test_text_may_be_longer_than_the_model_takes(model: nn.Module) -> None:
    assert len(write(model, list(range(30)))) == 30
    assert write(model, [1], num_tokens=0) == []


def test_draws_depend_on_the_seed_alone(model: nn.Module) -> None:
    state = torch.random.get_rng_state()
    first = write(model, [1], temperature=1.0, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert write(model, [1], temperature=1.0, seed=1) == first
    assert write(model, [1], temperature=1.0, seed=2) != first


def test_an_architecture_without_a_cache_of_keys_writes_too() -> None:
    config = ModelConfig(type="mamba", config={"hidden_size": 16, "num_hidden_layers": 1})
    model = build_model(config, **PLACE)
    assert write(model, [1, 2], num_tokens=4) == write(model, [1, 2], num_tokens=4)


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\tb\n\x1b[31m\x07\r\u200bé中") == "a\tb\n\\x1b[31m\\x07\\r\\u200bé中"
