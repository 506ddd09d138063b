"""A classifier on one device: what it saves loads elsewhere, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.comm.base import Communicator
from evener.config.runs import ClassifyModelConfig
from evener.errors import ConfigError, EvenerError
from evener.tasks.classification.encoding import load_encoder
from evener.tasks.classification.head import find_head, fit_head
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.language_model import quiet
from evener.tasks.text.tokenizer import ByteTokenizer
from helpers.classification import LABELS, TINY_BERT, TINY_LLAMA, config, samples
from helpers.teams import run_team, setup

TEXTS = ["a", "a longer text", "Ā <|endoftext|> 漢", "x" * 99]
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZE |= {"num_attention_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 32}

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def build(model: dict[str, Any] = TINY_LLAMA, **changes: Any) -> ClassifyPipeline:
    return ClassifyPipeline.build(model, config(**changes))


def save_base(kind: str, folder: Path, seed: int = 0) -> Path:
    """A language model with evener's bytes: no head, no pooler, and padding that ends texts."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(seed)
    with quiet():
        if kind == "llama":
            ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256)
            built = AutoConfig.for_model(
                kind, **SIZE, num_key_value_heads=2, vocab_size=257, **ends
            )
            model = AutoModelForCausalLM.from_config(built)
        else:
            built = AutoConfig.for_model(kind, **SIZE, vocab_size=257)
            model = AutoModelForMaskedLM.from_config(built)
        model.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def on_base(base: Path, adapter: Path | None = None, **changes: Any) -> ClassifyPipeline:
    model = {"path": str(base), "adapter": str(adapter) if adapter else None}
    return build(model, **changes)


def disturbed(pipeline: ClassifyPipeline) -> ClassifyPipeline:
    """A new adapter changes nothing: give it something to say."""
    with torch.no_grad():
        for parameter in pipeline.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return pipeline


def logits_of(pipeline: ClassifyPipeline) -> Tensor:
    with torch.no_grad():
        return pipeline.logits(pipeline.collate([(text, 0) for text in TEXTS]))


def logits_of_others(model: nn.Module, folder: Path) -> Tensor:
    """As anybody computes them who has the folder and no evener."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found: Tensor = model.eval()(batch["input_ids"], batch["attention_mask"]).logits
    return found


# ── saving ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["llama", "bert", "scratch"])
def test_peft_and_transformers_compute_the_same_from_what_was_saved(
    kind: str, tmp_path: Path
) -> None:
    """The pooler of a masked language model is new, its padding another: the folders say so."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    base = tmp_path / "base"
    scratch = kind == "scratch"
    pipeline = disturbed(build() if scratch else on_base(save_base(kind, base), end_tokens=3))
    expected = logits_of(pipeline)
    pipeline.save(tmp_path)
    torch.manual_seed(7)  # whatever is not in the files becomes something else
    with quiet():
        beside = AutoConfig.from_pretrained(tmp_path / "adapter" / "base_config.json")
        model = AutoModelForSequenceClassification.from_pretrained(base, config=beside)
        adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
        merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of_others(adapted, tmp_path / "adapter"), expected, atol=1e-5)
    assert torch.allclose(logits_of_others(merged, tmp_path / "merged"), expected, atol=1e-5)
    assert torch.allclose(logits_of(ClassifyPipeline.load(tmp_path)), expected, atol=1e-5)
    assert [merged.config.id2label[i] for i in range(3)] == LABELS
    assert not (tmp_path / "adapter" / "README.md").exists()


def test_a_base_for_another_problem_becomes_a_classifier_to_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # `pipeline` sets it for good

    with quiet():
        built = AutoConfig.for_model(
            "bert", **SIZE, vocab_size=257, num_labels=1, problem_type="regression"
        )
        AutoModelForSequenceClassification.from_config(built).save_pretrained(tmp_path / "base")
        ByteTokenizer().save(tmp_path / "base")
        ours = disturbed(on_base(tmp_path / "base"))
        ours.save(tmp_path)
        merged = str(tmp_path / "merged")
        theirs = pipeline("text-classification", merged, tokenizer=merged, top_k=None)
        found = {row["label"]: row["score"] for row in theirs(["a text"])[0]}
    expected = dict(zip(LABELS, ours.predict(["a text"])[0].probabilities, strict=True))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_base_is_found_again_or_named_if_it_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base("llama", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    on_base(Path("base")).save("out")
    monkeypatch.chdir("/")
    assert len(ClassifyPipeline.load(tmp_path / "out").predict(["a"])) == 1
    moved = (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="does not exist; give its folder as base"):
        ClassifyPipeline.load(tmp_path / "out")
    ClassifyPipeline.load(tmp_path / "out", base=moved)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EvenerError, match=r"file/folder cannot be written: .*; free disk space"):
        build().save(tmp_path / "file" / "folder")


# ── adapters that were saved ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and an adapter on it."""
    base = save_base("llama", tmp_path / "base")
    disturbed(on_base(base)).save(tmp_path)
    return base, tmp_path / "adapter"


def edit(path: Path, **keys: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_an_adapter_goes_on_its_own_base_and_classes_only(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapter = saved
    on_base(save_base("llama", tmp_path / "copy"), adapter)
    other = save_base("llama", tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"trained on '.*base', whose weights differ"):
        on_base(other, adapter)
    with pytest.raises(ConfigError, match="is for the classes first, second, third, this run for"):
        on_base(base, adapter, labels=["a", "b", "c"])
    (adapter / "classify.json").write_text('{"labels": 3}')
    with pytest.raises(ConfigError, match=r"classify\.json cannot be read: ValidationError"):
        on_base(base, adapter)


def test_an_adapter_of_peft_on_a_base_that_is_not_known_to_be_its_own(
    saved: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = saved
    (adapter / "classify.json").unlink()
    on_base(base, adapter)
    assert not capsys.readouterr().err
    copy = save_base("llama", tmp_path / "copy")
    on_base(copy, adapter)
    assert "warning: the adapter in" in capsys.readouterr().err
    model = ClassifyModelConfig(path=str(copy), adapter=str(adapter))
    ClassifyPipeline.build(model, config(), quiet=True)
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not fit this base model"):
        on_base(save_base("bert", tmp_path / "bert"), adapter)
    edit(adapter / "adapter_config.json", task_type="CAUSAL_LM")
    with pytest.raises(ConfigError, match="does not fit this base model"):
        on_base(base, adapter)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, r"lora\.rank is 8, and the adapter in .* was made with 4, which it keeps"),
        ({"alpha": 1.0}, r"lora\.alpha is 1\.0, .* made with 16\.0"),
        ({"dropout": 0.5}, r"lora\.dropout is 0\.5, .* made with 0\.0"),
        ({"target_modules": ["q_proj"]}, r"lora\.target_modules is \['q_proj'\], .*'v_proj'"),
    ],
)
def test_settings_that_an_adapter_was_not_made_with_are_refused(
    saved: tuple[Path, Path], lora: dict[str, Any], words: str
) -> None:
    """They would do nothing: a run would report what it has not trained."""
    with pytest.raises(ConfigError, match=words):
        on_base(*saved, lora=lora)
    on_base(*saved, lora={"rank": 4, "target_modules": ["v_proj", "q_proj"]})


def test_an_adapter_without_the_pooler_that_its_base_lacks_is_refused(tmp_path: Path) -> None:
    """As peft saves it from a masked language model, whose pooler was random."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = save_base("bert", tmp_path / "base")
    with quiet():
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        lora = LoraConfig(task_type="SEQ_CLS", target_modules=["query"])
        get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"the base lacks 'bert\.pooler\.dense', and so does"):
        on_base(base, tmp_path / "adapter")


# ── bases ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("model", [TINY_LLAMA, TINY_BERT], ids=["llama", "bert"])
def test_only_adapter_and_head_are_trained(model: dict[str, Any]) -> None:
    pipeline = build(model)
    trained = [n for n, p in pipeline.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name or "modules_to_save" in name for name in trained)
    assert set(pipeline.model.state_dict()) == set(trained)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("bert", {"intermediate_size": 32}),
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.5, "layerdrop": 0.9}),
        ("falcon", {"hidden_dropout": 0.5, "attention_dropout": 0.5}),
    ],
)
def test_the_base_is_not_dropped_out_and_gets_its_rates_back(
    kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    pipeline = build({"type": kind, "config": size | keys})
    expected = logits_of(pipeline)
    pipeline.model.train()
    for _ in range(4):
        assert torch.allclose(logits_of(pipeline), expected, atol=1e-5)
    pipeline.save(tmp_path)
    saved = AutoConfig.from_pretrained(tmp_path / "merged").to_dict()
    assert max(v for k, v in saved.items() if "drop" in k and isinstance(v, float)) >= 0.1


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    """Otherwise transformers takes random numbers for them, which would stay frozen."""
    base = save_base("bert", tmp_path / "base")
    edit(base / "config.json", num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"no weights that fit 'bert\.encoder\.layer\.1"):
        on_base(base)
    edit(base / "config.json", vocab_size=300)
    with pytest.raises(ConfigError, match=r"fit 'bert\.embeddings\.word_embeddings\.weight'"):
        on_base(base)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        ({"type": "lama"}, {}, "'lama' has no classifier"),
        ({"type": "llama", "config": {"hiden_size": 8}}, {}, "'model.config.hiden_size'"),
        ({"path": "/nowhere"}, {}, "has no config.json"),
        ({"type": "bart", "config": {"d_model": 16}}, {}, "is a bart, an encoder-decoder"),
        ({"type": "gpt2", "config": {"n_positions": 15}}, {}, "takes at most 15 tokens"),
        (TINY_LLAMA, {"lora": {"target_modules": ["q_prj"]}}, "No modules were targeted"),
        (TINY_LLAMA, {"labels": None}, r"ClassifyConfig\.labels is missing"),
    ],
)
def test_bases_and_settings_that_do_not_fit(
    model: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(model, **changes)


def test_roberta_takes_texts_of_seq_len_tokens() -> None:
    """It numbers tokens from the position after that of padding."""
    roberta = {"type": "roberta", "config": dict(TINY_BERT["config"])}
    assert len(build(roberta, seq_len=16).predict(["x" * 99])) == 1


# ── batches ──────────────────────────────────────────────────────────────────────────────────────


def test_a_loss_weighs_as_much_as_its_classes() -> None:
    keys = {"labels": LABELS, "seq_len": 24, "class_weights": {"second": 3.0}}
    pipeline = ClassifyPipeline.build(TINY_LLAMA, keys)
    batch = pipeline.collate(pipeline.pairs(samples(6)))
    given, counts = pipeline.loss(batch), batch["labels"].bincount(minlength=3).tolist()
    assert given.weight == counts[0] + 3.0 * counts[1] + counts[2]
    pipeline.model.to("meta")  # as Ddp.setup moves it to a device
    assert pipeline.device.type == "meta"


def test_long_texts_are_cut_and_still_end_like_others() -> None:
    pipeline = build(seq_len=8)
    batch = pipeline.collate([("abc", 1), ("a" * 50, 0)])
    assert batch["input_ids"].tolist() == [[97, 98, 99, 256, 0, 0, 0, 0], [97] * 7 + [256]]
    assert batch["attention_mask"].sum(1).tolist() == [4, 8]
    assert batch["labels"].tolist() == [1, 0]
    ends = load_encoder(None, seq_len=8, end_tokens=3)
    assert ends(["a" * 50], truncation=True)["input_ids"] == [[97] * 5 + [256] * 3]


def test_a_tokenizer_of_ones_own_keeps_what_it_puts_around_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "plain")
    encoder = load_encoder(tmp_path / "plain", seq_len=5, end_tokens=2)
    assert encoder(["a b a b"], truncation=True)["input_ids"] == [[1, 3, 4, 2, 2]]
    assert encoder([" " * 9999 + "a b a b"], truncation=True)["input_ids"] == [[1, 3, 4, 2, 2]]
    encoder.save_pretrained(tmp_path / "saved")
    again = load_encoder(tmp_path / "saved", seq_len=5, end_tokens=2)
    texts = {"text": ["a b a b", "b"], "truncation": True, "padding": True}
    assert again(**texts)["input_ids"] == encoder(**texts)["input_ids"]
    with pytest.raises(ConfigError, match="adds 3 tokens to every text"):
        load_encoder(tmp_path / "plain", seq_len=3, end_tokens=2)


# ── the head ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_head_is_fitted_to_as_many_samples_as_memory_is_given_for(world_size: int) -> None:
    # Texts of a class are equal, so that any 40 samples with all classes tell as much as all 60.
    # The last third holds a class of its own: a head that is fitted to the first 40 never sees it.
    texts = ["alpha beta", "gamma", "kappa sigma kappa"]
    pairs = [(texts[label], label) for label in [0] * 20 + [1] * 20 + [2] * 20]

    def body(comm: Communicator) -> list[float]:
        pipeline = build()
        head = find_head(pipeline.model)
        assert head is not None
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        said: list[str] = []
        with setup(comm, pipeline.model, optimizer) as ddp:
            found = []
            for most in ({}, {"most_bytes": 4 * 16 * 40}):
                assert fit_head(ddp, pipeline, pairs, said.append, **most)
                found.append(pipeline.compare(pairs, pipeline.judge(pairs)).accuracy)
        assert "on 40 samples" in said[1]
        return found

    assert run_team(world_size, body) == [[1.0, 1.0]] * world_size
