"""A classifier on one device: what it saves loads elsewhere, and what does not fit is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from evener.comm.base import Communicator
from evener.config.runs import ClassifyModelConfig
from evener.errors import ConfigError, EvenerError
from evener.tasks.classification.encoding import EncodedSamples, TextEncoder
from evener.tasks.classification.head import find_head, fit_head
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.classification.samples import LabelSet
from evener.tasks.language_model import quiet
from helpers.classification import LABELS, TINY_BERT, TINY_LLAMA, config, samples
from helpers.teams import run_team, setup


def build(model: dict[str, Any] = TINY_LLAMA, **changes: Any) -> ClassifyPipeline:
    chosen = config(**changes)
    return ClassifyPipeline.build(ClassifyModelConfig(**model), chosen, LabelSet(LABELS))


def disturb(pipeline: ClassifyPipeline) -> None:
    """A new adapter changes nothing: give it something to say."""
    with torch.no_grad():
        for parameter in pipeline.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def logits_of(pipeline: ClassifyPipeline, text: str) -> Tensor:
    batch = pipeline.encoder.collate([(pipeline.encoder.encode(text), 0)])
    with torch.no_grad():
        return pipeline.model(batch.input_ids, batch.attention_mask)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[ClassifyPipeline, Path]:
    torch.manual_seed(5)
    pipeline = build()
    disturb(pipeline)
    folder = tmp_path_factory.mktemp("saved")
    pipeline.save(folder)
    return pipeline, folder


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_peft_loads_the_adapter_and_transformers_the_merged_weights(
    saved: tuple[ClassifyPipeline, Path],
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    pipeline, folder = saved
    expected = logits_of(pipeline, "a text")
    with quiet():
        base = AutoModelForSequenceClassification.from_pretrained(folder / "base")
        adapted = PeftModel.from_pretrained(base, folder / "adapter").eval()
        merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    ids = torch.tensor([tokenizer.encode("a text")])
    with torch.no_grad():
        assert torch.allclose(adapted(ids).logits, expected, atol=1e-6)
        assert torch.allclose(merged(ids).logits, expected, atol=1e-5)
    assert [merged.config.id2label[i] for i in range(3)] == LABELS
    assert not (folder / "adapter" / "README.md").exists()


def test_what_was_saved_predicts_the_same(saved: tuple[ClassifyPipeline, Path]) -> None:
    pipeline, folder = saved
    again = ClassifyPipeline.load(folder)
    texts = [sample.text for sample in samples(9)]
    for one, other in zip(pipeline.predict(texts), again.predict(texts), strict=True):
        assert one.label == other.label
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)


def test_a_folder_that_cannot_be_written_is_named(
    saved: tuple[ClassifyPipeline, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EvenerError, match=r"file/folder cannot be written: .*; free disk space"):
        saved[0].save(tmp_path / "file" / "folder")


def test_an_adapter_of_another_base_is_refused(
    saved: tuple[ClassifyPipeline, Path], tmp_path: Path
) -> None:
    other = build(seed=1)
    other.save(tmp_path)
    with pytest.raises(ConfigError, match="was trained on another base model"):
        ClassifyPipeline.load(saved[1], base=tmp_path / "base")


def test_an_adapter_for_other_classes_is_refused(saved: tuple[ClassifyPipeline, Path]) -> None:
    _, folder = saved
    model = ClassifyModelConfig(path=str(folder / "base"), adapter=str(folder / "adapter"))
    with pytest.raises(ConfigError, match=r"tells first, second, third apart"):
        ClassifyPipeline.build(model, config(), LabelSet(["a", "b", "c"]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", r"the document is \[\], not a JSON object"),
        (
            '{"labels": 3}',
            r"classify\.json cannot be read: labels is 3, not a list; save .*unchanged copy",
        ),
        ('{"labels": ["a", "b"], "seq_len": "x"}', "seq_len is 'x', not a whole number"),
        ('{"labels": [], "seq_len": 8, "end_tokens": 1, "base": {}}', "base.path is missing"),
    ],
)
def test_a_note_that_was_changed_is_named(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "classify.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        ClassifyPipeline.load(tmp_path)


def test_an_adapter_that_fits_no_layer_is_refused(
    saved: tuple[ClassifyPipeline, Path], tmp_path: Path
) -> None:
    """One that peft has saved, without evener's note."""
    wider = {"type": "llama", "config": {**TINY_LLAMA["config"], "hidden_size": 24}}
    build(wider).save(tmp_path)
    (tmp_path / "adapter" / "classify.json").unlink()
    shutil.rmtree(tmp_path / "base")  # which would tell whether it is the one that is given
    model = ClassifyModelConfig(path=str(saved[1] / "base"), adapter=str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="does not fit this base model"):
        ClassifyPipeline.build(model, config(), LabelSet(LABELS))
    with pytest.raises(ConfigError, match="holds no adapter"):
        ClassifyPipeline.build(
            ClassifyModelConfig(path=str(saved[1] / "base"), adapter=str(tmp_path)),
            config(),
            LabelSet(LABELS),
        )


def test_only_adapter_and_head_are_trained() -> None:
    for model in (TINY_LLAMA, TINY_BERT):
        pipeline = build(model)
        trained = [n for n, p in pipeline.model.named_parameters() if p.requires_grad]
        assert trained
        assert all(".lora_" in name or "modules_to_save" in name for name in trained)
        assert set(pipeline.model.state_dict()) == set(trained)


def test_the_base_is_not_dropped_out_and_gets_its_rates_back(tmp_path: Path) -> None:
    from transformers import AutoConfig

    pipeline = build(TINY_BERT)
    pipeline.model.train()
    assert torch.equal(logits_of(pipeline, "a text"), logits_of(pipeline, "a text"))
    pipeline.save(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path / "merged").hidden_dropout_prob == 0.1


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.5, "layerdrop": 0.9}),
        ("falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),  # asks its configuration
        ("bloom", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),  # keeps rates in its layers
    ],
)
def test_dropout_that_is_no_layer_of_its_own_is_switched_off_too(
    kind: str, keys: dict[str, Any]
) -> None:
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    pipeline = build({"type": kind, "config": size | keys})
    expected = logits_of(pipeline, "a text")
    pipeline.model.train()
    for _ in range(4):
        assert torch.allclose(logits_of(pipeline, "a text"), expected, atol=1e-5)


def test_positions_that_a_model_keeps_for_padding_hold_no_text() -> None:
    """RoBERTa and its like: a text of ``max_position_embeddings`` tokens would fail in torch."""
    roberta = {"type": "roberta", "config": dict(TINY_BERT["config"])}
    assert len(build(roberta, seq_len=16).predict(["x" * 99])) == 1
    roberta["config"]["max_position_embeddings"] = 16
    gpt2 = {"type": "gpt2", "config": {"n_embd": 16, "n_head": 2, "n_positions": 15}}
    for model in (roberta, gpt2):
        with pytest.raises(ConfigError, match="seq_len is 16, but the base model takes at most 15"):
            build(model, seq_len=16)


def test_replicas_share_the_frozen_base_and_nothing_else() -> None:
    first = build()
    other = first.replica(torch.device("cpu"))
    pairs = zip(first.model.parameters(), other.model.parameters(), strict=True)
    for one, two in pairs:
        assert torch.equal(one, two)
        assert (one is two) == (not one.requires_grad)


def test_a_classifier_needs_no_more_than_keys_and_follows_its_model() -> None:
    keys = {"labels": LABELS, "seq_len": 24, "class_weights": {"second": 3.0}}
    pipeline = ClassifyPipeline.build(TINY_LLAMA, keys)
    assert pipeline.labels.names == tuple(LABELS)
    batch = pipeline.encoder.collate(pipeline.encode(samples(6)))
    given, counts = pipeline.loss(batch), batch.labels.bincount(minlength=3).tolist()
    assert given.weight == counts[0] + 3.0 * counts[1] + counts[2]
    pipeline.model.to("meta")  # as Ddp.setup moves it to a device
    assert pipeline.device.type == "meta"
    with pytest.raises(ConfigError, match=r"ClassifyConfig\.labels is missing"):
        ClassifyPipeline.build(TINY_LLAMA, {"seq_len": 24})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"target_modules": ["q_prj"]}}, "Its linear layers are .*q_proj"),
        ({"seq_len": 999}, None),
    ],
)
def test_options_that_do_not_fit_the_base(
    changes: dict[str, Any], words: str | None, saved: tuple[ClassifyPipeline, Path]
) -> None:
    model = ClassifyModelConfig(path=str(saved[1] / "base"))
    with pytest.raises(ConfigError, match=words or "seq_len is 999, but the base model takes"):
        ClassifyPipeline.build(model, config(**changes), LabelSet(LABELS))


def test_layers_of_gpt2_are_named_too() -> None:
    """They are of a class of their own, and no nn.Linear."""
    model = {"type": "gpt2", "config": {"n_embd": 16, "n_layer": 1, "n_head": 2}}
    with pytest.raises(ConfigError, match=r"Its linear layers are c_attn, c_fc, c_proj$"):
        build(model, lora={"target_modules": ["q_proj"]})


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"type": "lama"}, "'lama' has no classifier"),
        ({"type": "llama", "config": {"hiden_size": 8}}, "unknown key 'model.config.hiden_size'"),
        ({"path": "/nowhere"}, "has no config.json"),
        ({"type": "bart", "config": {"d_model": 16}}, "is a bart, which reads a text and writes"),
    ],
)
def test_bases_that_are_none(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(model)


def test_spaces_take_no_text_from_what_the_model_sees(tmp_path: Path) -> None:
    words = {"word": 0, "[UNK]": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kind))
    encoder = TextEncoder.load(tmp_path, seq_len=4)
    for text in ("word " * 9, " " * 9999 + "word " * 9):
        assert encoder.encode(text) == [0, 0, 0, 2]


def test_long_texts_are_cut_and_still_end_like_others() -> None:
    encoder = TextEncoder.load(None, seq_len=8)
    assert encoder.encode("abc") == [97, 98, 99, 256]
    assert encoder.encode("a" * 50) == [97] * 7 + [256]
    assert TextEncoder.load(None, seq_len=8, end_tokens=3).encode("a" * 50) == [97] * 5 + [256] * 3
    batch = encoder.collate([(encoder.encode("abc"), 1), (encoder.encode("a" * 50), 0)])
    assert batch.input_ids.shape == (2, 8)
    assert batch.attention_mask.sum(1).tolist() == [4, 8]
    assert batch.labels.tolist() == [1, 0]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_head_is_fitted_to_as_many_samples_as_memory_is_given_for(world_size: int) -> None:
    # Texts of a class are equal, so that any 40 samples with all classes tell as much as all 60.
    # The last third holds a class of its own: a head that is fitted to the first 40 never sees it.
    labels = [0] * 20 + [1] * 20 + [2] * 20
    texts = ["alpha beta", "gamma", "kappa sigma kappa"]

    def body(comm: Communicator) -> tuple[float, float, list[str]]:
        pipeline, said = build(), []
        data = EncodedSamples(pipeline.encoder, [texts[label] for label in labels], labels)
        (head,) = [one for one in [find_head(pipeline.model)] if one is not None]
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        with setup(comm, pipeline.model, optimizer) as ddp:
            found = []
            for most in ({}, {"most_bytes": 4 * 16 * 40}):
                assert fit_head(ddp, pipeline, data, said.append, **most)
                logits = pipeline.judge([data[k] for k in range(60)])
                found.append((logits.argmax(-1) == torch.tensor(data.indices)).double().mean())
        return float(found[0]), float(found[1]), said

    for on_all, on_some, said in run_team(world_size, body):
        assert on_all == 1.0
        assert on_some == 1.0
        assert said == [
            "fitting the head to the frozen base ...",
            "fitting the head to the frozen base on 40 of 60 training samples, as the features of "
            "all would take more than 2.6 kB ...",
        ]
