from pathlib import Path
from typing import Any

import pytest

from evener.config.options import PretrainOptions
from evener.config.presets import DEMO, resolve_config
from evener.config.runs import EvalConfig, RunConfig
from evener.errors import ConfigError, DataError
from helpers.configurations import load_run_config

OPTIMIZER_KEYS = "lr, betas, eps, weight_decay, warmup, min_lr_ratio"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str, *overrides: str) -> RunConfig:
    path = Path("run.yaml")
    path.write_text(text)
    return load_run_config(path, overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text, *overrides)
    return str(caught.value)


# ── what is right ────────────────────────────────────────────────────────────────────────────────


def test_every_section_is_read() -> None:
    config = read(
        "data: {path: [a, b], seq_len: 8, suffixes: [.txt]}\n"
        "model: {type: gpt2, config: {n_embd: 8}}\n"
        "optimizer: {lr: 1e-2, betas: [0.8, 0.9]}\n"
        "max_grad_norm: null\n"
        "eval: {every: 0}\n"
        "checkpoint: {keep_last: 1}\n"
        "sample: {num_tokens: 0}\n"
        "batch_size: 3\n"
        "micro_batch_size: 2\n"
    )
    assert config.data.paths == ["a", "b"]
    assert (config.data.seq_len, config.data.suffixes) == (8, [".txt"])
    assert (config.model.type, config.model.config) == ("gpt2", {"n_embd": 8})
    assert (config.optimizer.lr, config.optimizer.betas) == (0.01, (0.8, 0.9))
    assert config.max_grad_norm is None
    assert (config.eval.every, config.checkpoint.keep_last) == (0, 1)
    # A third of the cost of a trained sample each: 505 / 3 is 5 % of 3,200 + 505 / 3.
    default = EvalConfig()
    assert default.num_samples(100_000, 32) == 505
    assert default.num_samples(300, 32) == 300
    assert default.num_samples(100_000, 1) == 64
    assert EvalConfig(time_fraction=0.5).num_samples(100_000, 32) == 9600
    for everything in (EvalConfig(every=0), EvalConfig(time_fraction=1)):
        assert everything.num_samples(100_000, 32) == 100_000
    assert (config.batch_size, config.micro_batch_size, config.sample.num_tokens) == (3, 2, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("3e-4", 3e-4), ("3E-4", 3e-4), ("3.e-4", 3e-4), (".3e-3", 3e-4), ("1e+1", 10.0), ("2", 2.0)],
)
def test_numbers_may_have_an_exponent(text: str, value: float) -> None:
    assert read(f"optimizer: {{lr: {text}}}").optimizer.lr == value
    assert load_run_config(None, [f"optimizer.lr={text}"]).optimizer.lr == value
    assert load_run_config(None, [f"optimizer={{lr: {text}}}"]).optimizer.lr == value


def test_one_path_or_many() -> None:
    assert read("data: {path: a}").data.paths == ["a"]
    assert read("data: {path: null}").data.paths == []


# ── --set ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed=3", {"seed": 3}),
        (" seed =3", {"seed": 3}),
        ("optimizer.lr=3e-4", {"optimizer": {"lr": 3e-4}}),
        ("data.path=[a, b]", {"data": {"path": ["a", "b"]}}),
        ("data.path=a=b.txt", {"data": {"path": "a=b.txt"}}),
        ("data.path=null", {"data": {"path": None}}),
        ("sample.prompt='a: b'", {"sample": {"prompt": "a: b"}}),
        ("model.config.hidden_size=8", {"model": {"config": {"hidden_size": 8}}}),
        ("model={type: gpt2, config: {n_embd: 8}}", {"model": {"type": "gpt2"}}),
        ("tensorboard=true", {"tensorboard": True}),
    ],
)
def test_set_takes_any_key_and_yaml_values(override: str, expected: dict[str, Any]) -> None:
    config = load_run_config(None, [override]).model_dump()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert value.items() <= config[key].items()
        else:
            assert config[key] == value


def test_set_goes_before_the_file_and_the_last_one_wins() -> None:
    config = read("seed: 1\noptimizer: {lr: 1, eps: 1e-4}", "seed=2", "optimizer.lr=2", "seed=3")
    assert (config.seed, config.optimizer.lr, config.optimizer.eps) == (3, 2.0, 1e-4)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed", ["'seed' is not key=value", "optimizer.lr=3e-4"]),
        ("optimizer.=3", ["'optimizer.=3' is not key=value"]),
        ("seed=[", ["'seed=['", "broken YAML"]),
        ("seed=", ["seed: seed is None", "whole number"]),
        ("optimizer.lr=-1", ["optimizer.lr: optimizer.lr is -1", "greater than 0"]),
        ("optimizer={lr: -1}", ["optimizer: optimizer.lr is -1", "greater than 0"]),
        ("optimizer.lrr=1", ["optimizer.lrr: optimizer.lrr is 1", OPTIMIZER_KEYS]),
        ("batch_size.x=1", ["'batch_size.x=1'", "'batch_size' is 4"]),
    ],
)
def test_a_bad_set_is_told_from_what_is_in_the_file(override: str, words: list[str]) -> None:
    message = refusal("batch_size: 4", override)
    assert message.startswith("--set ")
    for word in words:
        assert word in message


# ── what is wrong in the file ────────────────────────────────────────────────────────────────────

#: What the message names of it, one line for each kind of value.
WRONG = {
    "batch_size: 0": "batch_size is 0",
    "batch_size: '8'": "batch_size is '8'",
    "batch_size:": "batch_size is None",
    "batch_size: yes": "batch_size is True",
    "optimizer: {lr: fast}": "optimizer.lr is 'fast'",
    "optimizer: {lr: .inf}": "optimizer.lr is inf",
    "optimizer: {betas: [0.9]}": "optimizer.betas.1 is [0.9]",
    "data: {path: [a, 3]}": "data.path is ['a', 3]",
    "data: {heldout_fraction: 1}": "data.heldout_fraction is 1",
    "data: {suffixes: .txt}": "data.suffixes is '.txt'",
    "name: 3": "name is 3",
    "precision: fp8": "precision is 'fp8'",
    "speed_hint: {1: yes}": "speed_hint is {1: True}",
    "policy: x": "policy is 'x'",
    "sinks: [nowhere]": "sinks.0 is 'nowhere'",
    "model: null": "model is None",
    "model: {path: a, config: {x: 1}}": "model.path and model.config",
    "batchsize: 3": "batchsize is 3: unknown key; allowed are ",
    "optimizer: {zzz: 3}": OPTIMIZER_KEYS,
    "epochs: 0\nseed: -1": "epochs is 0",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_key_or_value_is_named(text: str) -> None:
    message = refusal(text)
    assert message.startswith("run.yaml: ")
    assert WRONG[text] in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: 4\noptimizer: {lr: 1\nseed: 1\n", "run.yaml:3:5: broken YAML: "),
        ("a: *x", "run.yaml:1:4: broken YAML: found undefined alias 'x'"),
        ("a: \x01", "run.yaml: broken YAML: "),
        ("a: 2001-99-99", "run.yaml: broken YAML: "),
        ("[a]: 1", "run.yaml:1:1: broken YAML: found unhashable key"),
        (
            "seed: 1\noptimizer: {lr: 1, lr: 2}",
            "run.yaml:2:20: broken YAML: key 'lr' is given twice",
        ),
        ("- a", "run.yaml holds a list; give keys and values"),
        ("text", "run.yaml holds a str; give keys and values"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_with_the_place(text: str, words: str) -> None:
    assert words in refusal(text)


def test_a_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"^absent\.yaml cannot be read: .*No such file"):
        load_run_config(Path("absent.yaml"))
    Path("folder").mkdir()
    with pytest.raises(ConfigError, match=r"^folder cannot be read: .*directory"):
        load_run_config(Path("folder"))
    Path("latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(ConfigError, match=r"^latin\.yaml cannot be read: 'utf-8' codec"):
        load_run_config(Path("latin.yaml"))


# ── from the command line to a configuration ─────────────────────────────────────────────────────


def test_the_name_is_that_of_option_key_or_file_in_this_order() -> None:
    Path("some-run.yaml").write_text("seed: 1")
    Path("named.yaml").write_text("name: mine")
    assert resolve_config(PretrainOptions()).name == "pretrain"
    assert resolve_config(PretrainOptions(config=Path("some-run.yaml"))).name == "some-run"
    assert resolve_config(PretrainOptions(config=Path("named.yaml"))).name == "mine"
    assert resolve_config(PretrainOptions(config=Path("named.yaml"), name="x")).name == "x"


@pytest.mark.parametrize("name", ["", "a/b", "/a", "..", ".", ".hidden", "a\0b"])
def test_a_name_is_a_plain_folder_name(name: str) -> None:
    with pytest.raises(ConfigError, match="give a plain folder name"):
        resolve_config(PretrainOptions(name=name))


def test_the_demo_is_a_valid_configuration_that_can_be_changed() -> None:
    config = resolve_config(PretrainOptions(demo=True, overrides=("max_steps=2",)))
    assert (config.name, config.max_steps) == ("demo", 2)
    assert config.batch_size == DEMO["batch_size"]
    with pytest.raises(ConfigError, match=r"--demo .*got run\.yaml.*leave one of them out"):
        resolve_config(PretrainOptions(demo=True, config=Path("run.yaml")))


@pytest.mark.parametrize("key", ["data.path", "data.tokenizer", "model.path"])
def test_what_the_configuration_points_to_must_exist(key: str) -> None:
    with pytest.raises(DataError, match=f"{key} is 'absent', which does not exist"):
        resolve_config(PretrainOptions(overrides=(f"{key}=absent",)))
    Path("absent").mkdir()
    resolve_config(PretrainOptions(overrides=(f"{key}=absent",)))


def test_packages_must_be_installed_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PretrainOptions(overrides=("tensorboard=true",))
    resolve_config(options)
    missing = {"tensorboard"}
    monkeypatch.setattr("evener.config.presets.find_spec", lambda name: name not in missing or None)
    with pytest.raises(ConfigError, match=r"pip install 'evener\[tensorboard\]'"):
        resolve_config(options)
    missing.add("transformers")
    with pytest.raises(ConfigError, match=r"transformers is needed .* 'evener\[hf\]'"):
        resolve_config(options)
