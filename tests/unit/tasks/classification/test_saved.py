"""What a saved classifier is to transformers and peft, and adapters that others have saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evener.config.runs import ClassifyModelConfig
from evener.errors import ConfigError
from evener.tasks.classification.encoding import TextEncoder
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.classification.samples import LabelSet
from evener.tasks.language_model import quiet
from evener.tasks.text.tokenizer import ByteTokenizer
from helpers.classification import LABELS, config

TEXTS = ["a", "a longer text", "Ā <|endoftext|> 漢", "x" * 99]
SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIZE |= {"num_attention_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 32}

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


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


def build(base: Path, adapter: Path | None = None, **changes: Any) -> ClassifyPipeline:
    model = ClassifyModelConfig(path=str(base), adapter=str(adapter) if adapter else None)
    return ClassifyPipeline.build(model, config(**changes), LabelSet(LABELS))


def disturbed(pipeline: ClassifyPipeline) -> ClassifyPipeline:
    with torch.no_grad():
        for parameter in pipeline.model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return pipeline


def logits_of(pipeline: ClassifyPipeline) -> Tensor:
    batch = pipeline.encoder.collate([(pipeline.encoder.encode(text), 0) for text in TEXTS])
    with torch.no_grad():
        return pipeline.logits(batch)


def logits_of_others(model: nn.Module, folder: Path) -> Tensor:
    """As anybody computes them who has the folder and no evener."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        found: Tensor = model.eval()(batch["input_ids"], batch["attention_mask"]).logits
    return found


def on_base(base: Path, adapter: Path) -> nn.Module:
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with quiet():
        beside = AutoConfig.from_pretrained(adapter / "base_config.json")
        model = AutoModelForSequenceClassification.from_pretrained(base, config=beside)
        return PeftModel.from_pretrained(model, adapter)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_others_compute_the_same_from_a_language_model_as_base(kind: str, tmp_path: Path) -> None:
    """Its pooler is new, its padding another: the saved folders must say so."""
    from transformers import AutoModelForSequenceClassification

    base = save_base(kind, tmp_path / "base")
    pipeline = disturbed(build(base, seed=1, end_tokens=3))
    expected = logits_of(pipeline)
    pipeline.save(tmp_path)
    torch.manual_seed(7)  # whatever is not in the files becomes something else
    adapted, adapter = on_base(base, tmp_path / "adapter"), tmp_path / "adapter"
    assert torch.allclose(logits_of_others(adapted, adapter), expected, atol=1e-5)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits_of_others(merged, tmp_path / "merged"), expected, atol=1e-5)
    assert torch.allclose(logits_of(ClassifyPipeline.load(tmp_path)), expected, atol=1e-5)


def test_a_saved_tokenizer_keeps_what_it_puts_around_texts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, "<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "plain")
    encoder = TextEncoder.load(tmp_path / "plain", seq_len=5, end_tokens=2)
    assert encoder.encode("a b a b") == [1, 3, 4, 2, 2]
    with pytest.raises(ConfigError, match="puts 3 tokens around every text"):
        TextEncoder.load(tmp_path / "plain", seq_len=3, end_tokens=2)
    encoder.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    found = tokenizer(["a b a b", "b"], padding=True, truncation=True)["input_ids"]
    assert found == [[1, 3, 4, 2, 2], [1, 4, 2, 2, encoder.pad_id]]
    again = TextEncoder.load(tmp_path, seq_len=5, end_tokens=2)
    assert (again.encode("a b a b"), again.pad_id) == ([1, 3, 4, 2, 2], encoder.pad_id)


@pytest.mark.parametrize(
    ("problem", "num_outputs"), [("regression", 1), ("multi_label_classification", 3)]
)
def test_a_base_for_another_problem_becomes_a_classifier_to_transformers(
    problem: str, num_outputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # `pipeline` sets it for good

    with quiet():
        built = AutoConfig.for_model(
            "bert", **SIZE, vocab_size=257, num_labels=num_outputs, problem_type=problem
        )
        base = AutoModelForSequenceClassification.from_config(built)
        base.save_pretrained(tmp_path / "base")
        ByteTokenizer().save(tmp_path / "base")
        ours = disturbed(build(tmp_path / "base"))
        ours.save(tmp_path)
        merged = str(tmp_path / "merged")
        theirs = pipeline("text-classification", merged, tokenizer=merged, top_k=None)
        found = {row["label"]: row["score"] for row in theirs(["a text"])[0]}
    expected = dict(zip(LABELS, ours.predict(["a text"])[0].probabilities, strict=True))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_base_named_by_a_relative_path_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_base("llama", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    build(Path("base")).save("out")
    monkeypatch.chdir("/")
    noted = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert noted["base_model_name_or_path"] == str(tmp_path / "base")
    assert len(ClassifyPipeline.load(tmp_path / "out").predict(["a"])) == 1


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path: Path) -> None:
    """Otherwise transformers takes random numbers for them, which would stay frozen."""
    base = save_base("bert", tmp_path / "base")
    document = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(document | {"num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match=r"no weights that fit 'bert\.encoder\.layer\.1"):
        build(base)
    (base / "config.json").write_text(json.dumps(document | {"vocab_size": 300}))
    with pytest.raises(ConfigError, match=r"fit 'bert\.embeddings\.word_embeddings\.weight'"):
        build(base)


# ── adapters that evener has not saved ───────────────────────────────────────────────────────────


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path]:
    """A base, and an adapter on it without evener's note."""
    base = save_base("llama", tmp_path / "base")
    disturbed(build(base)).save(tmp_path)
    (tmp_path / "adapter" / "classify.json").unlink()
    return base, tmp_path / "adapter"


def note(adapter: Path, **keys: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_an_adapter_of_peft_goes_on_its_own_base_only(
    foreign: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = foreign
    build(base, adapter)
    copy = save_base("llama", tmp_path / "elsewhere")  # the same weights
    build(copy, adapter)
    other = save_base("llama", tmp_path / "other", seed=1)
    with pytest.raises(ConfigError) as caught:
        build(other, adapter)
    assert all(str(path) in str(caught.value) for path in (base, other, adapter))
    assert "Give that base" in str(caught.value)
    assert not capsys.readouterr().err


def test_a_base_that_is_not_here_is_doubted(
    foreign: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = foreign
    note(adapter, base_model_name_or_path="somebody/base")  # the same name, downloaded
    build(base, adapter)
    assert not capsys.readouterr().err
    note(adapter, base_model_name_or_path="somebody/large")
    build(base, adapter)
    said = capsys.readouterr().err
    assert "warning: the adapter in" in said
    assert "'somebody/large', which is not a folder here" in said
    model = ClassifyModelConfig(path=str(base), adapter=str(adapter))
    ClassifyPipeline.build(model, config(), LabelSet(LABELS), quiet=True)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"task_type": "CAUSAL_LM"}, "of kind LORA for CAUSAL_LM; give a LORA adapter"),
        ({"peft_type": "IA3"}, "of kind IA3 for SEQ_CLS"),
    ],
)
def test_adapters_of_another_kind_are_refused(
    foreign: tuple[Path, Path], keys: dict[str, str], words: str
) -> None:
    base, adapter = foreign
    note(adapter, **keys)
    with pytest.raises(ConfigError, match=words):
        build(base, adapter)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"rank": 8}, r"lora\.rank is 8, and the adapter in .* was made with 4, which it keeps"),
        ({"alpha": 1.0}, r"lora\.alpha is 1\.0, .* made with 16\.0"),
        ({"dropout": 0.5}, r"lora\.dropout is 0\.5, .* made with 0\.0"),
        ({"target_modules": ["q_proj"]}, r"lora\.target_modules is \['q_proj'\], .*'v_proj'"),
        ({"target_modules": ["q_proj", "score"]}, r"lora\.target_modules is "),
    ],
)
def test_settings_that_an_adapter_was_not_made_with_are_refused(
    foreign: tuple[Path, Path], lora: dict[str, Any], words: str
) -> None:
    """They would do nothing: a run would report what it has not trained."""
    with pytest.raises(ConfigError, match=words):
        build(*foreign, lora=lora)


def test_settings_that_an_adapter_was_made_with_may_be_given(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    lora = {"rank": 3, "alpha": 7, "dropout": 0.1, "target_modules": ["v_proj", "q_proj"]}
    build(base, lora=lora).save(tmp_path)
    build(base, tmp_path / "adapter", lora=lora)
    build(base, tmp_path / "adapter", lora={})


def test_a_base_that_has_gone_is_named_with_what_can_be_done(tmp_path: Path) -> None:
    base = save_base("llama", tmp_path / "base")
    build(base).save(tmp_path / "saved")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"not there any more; .* as base, or"):
        ClassifyPipeline.load(tmp_path / "saved")
    ClassifyPipeline.load(tmp_path / "saved", base=moved)


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
        build(base, tmp_path / "adapter")


def test_an_adapter_is_of_no_use_on_random_weights(foreign: tuple[Path, Path]) -> None:
    _, adapter = foreign
    note(adapter, base_model_name_or_path="somebody/base")
    keys = {**SIZE, "num_key_value_heads": 2}
    model = ClassifyModelConfig(type="llama", config=keys, adapter=str(adapter))
    with pytest.raises(ConfigError, match="than this one, which starts from random weights"):
        ClassifyPipeline.build(model, config(), LabelSet(LABELS))
