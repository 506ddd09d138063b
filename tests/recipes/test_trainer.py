"""Scripts with Hugging Face's Trainer, and the same with one changed import, end alike.

Every run steps on 12 samples, whatever its number of ranks. Rank 1 is three times slower than the
others, so that shares are unequal.
"""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.forking import Zygote
from helpers.ranks import Rank, run_ranks

SCRIPTS = Path(__file__).with_name("trainer_scripts")
#: What a script imports, and what it imports with evener.
IMPORTS = {
    "from transformers import Trainer\n": "from evener.hf import Trainer\n",
    "from trl import SFTTrainer\n": """
from evener.hf import TrainerMixin
from trl import SFTTrainer as Original
class SFTTrainer(TrainerMixin, Original):
    pass
""",
}
BATCH = 12
TOLERANCE = 1e-5
#: What is saved and evaluated, and when; the best model is not the last one.
WATCHED = {
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "max_grad_norm": 0.5,
}
#: Records what callbacks see; a rank without a share has no micro-batch, and no ``on_step_begin``.
RECORDER = """
from transformers import TrainerCallback
seen = []
def recording(name):
    def record(self, args, state, control, **kwargs):
        seen.append((name, state.global_step, round(state.epoch or 0, 6)))
    return record
NAMES = "train_begin epoch_begin pre_optimizer_step optimizer_step step_end log evaluate save"
events = {f"on_{name}": recording(name) for name in [*NAMES.split(), "epoch_end", "train_end"]}
trainer.add_callback(type("Recorder", (TrainerCallback,), events))
"""
#: A subclass that computes its own loss, the mean over label tokens.
OWN_LOSS = """
class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits = outputs.logits[:, :-1].transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = loss / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss
trainer = OwnLoss(
"""
KEPT: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def libraries() -> None:
    """Ranks are forked from a process that has imported what their scripts do."""
    Zygote.get().preload("transformers.trainer", "transformers.models.gpt2.modeling_gpt2")


def run_script(rank: Rank, text: str, folder: str, given: list[str]) -> dict[str, Any]:
    """Runs a script in this process, as ``python SCRIPT OPTIONS`` would."""
    os.chdir(folder)
    warnings.simplefilter("ignore")  # the libraries' own
    sys.argv = ["script.py", *given]
    if any(plain in text for plain in IMPORTS):  # as in a process that was started plainly
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    names: dict[str, Any] = {"__name__": "__main__"}
    KEPT.append(names)
    exec(compile(text, "script.py", "exec"), names)
    trainer = names["trainer"]
    found = {"seen": names.get("seen"), "metrics": names.get("metrics", {})}
    found |= {f"parameter {n}": p.detach() for n, p in trainer.model.named_parameters()}
    return found | {
        "steps": trainer.state.global_step,
        "best": trainer.state.best_metric,
        "history": trainer.state.log_history,
        "predictions": names.get("predictions"),
    }


def run(
    folder: Path,
    script: str,
    world_size: int = 1,
    *,
    accumulate: int = 1,
    plain: bool = False,
    edit: Callable[[str], str] = lambda text: text,
    **further: Any,
) -> list[dict[str, Any]]:
    """What a script came to on each rank."""
    given = {
        "output_dir": "out",
        "per_device_train_batch_size": BATCH // world_size // accumulate,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # does not magnify the rounding of gradients that are nearly zero
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    } | further
    text = (SCRIPTS / f"{script}.py").read_text()
    [original] = [line for line in IMPORTS if line in text]
    text = edit(text if plain else text.replace(original, IMPORTS[original]))
    folder.mkdir(exist_ok=True)
    options = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    slow = {"EVENER_EMULATE_SLOW": "1:3"} if world_size > 1 else {}
    return run_ranks(run_script, world_size, text, str(folder), options, env=slow)


def assert_alike(found: list[dict[str, Any]], plain: dict[str, Any], bound: float) -> None:
    """The same steps, losses, evaluations and parameters; logs are those of every rank."""
    for rank, one in enumerate(found):
        assert one["steps"] == plain["steps"]
        assert one["seen"] == plain["seen"], f"rank {rank} of {len(found)}"
        assert len(one["history"]) == len(plain["history"])
        for ours, theirs in zip(one["history"], plain["history"], strict=True):
            close(ours, theirs, bound, f"rank {rank} of {len(found)}")
        close(one["metrics"], plain["metrics"], bound, f"rank {rank} of {len(found)}")
        for name, value in plain.items():
            if name.startswith("parameter") or (name == "predictions" and value is not None):
                difference = float((one[name] - value).abs().max())
                assert difference <= bound, f"{name} of rank {rank} of {len(found)}: {difference}"


def close(ours: dict[str, Any], theirs: dict[str, Any], bound: float, where: str) -> None:
    names = {n for n in theirs if "runtime" not in n and "per_second" not in n and "time" not in n}
    for name in names - {"total_flos", "perplexity"}:
        assert ours[name] == pytest.approx(theirs[name], abs=bound, rel=bound), (where, name)


def with_recorder(text: str) -> str:
    return text.replace("result = trainer.train(", f"{RECORDER}result = trainer.train(")


def test_a_causal_language_model_on_one_to_three_ranks(tmp_path: Path) -> None:
    """With accumulation and ragged texts, callbacks, clipping, evaluation, the best checkpoint.

    The run resumes from the original's checkpoint on two ranks.
    """
    options = {"accumulate": 2, "edit": with_recorder} | WATCHED
    (plain,) = run(tmp_path / "plain", "causal_lm", plain=True, **options)
    assert {"pre_optimizer_step", "evaluate", "save"} <= {name for name, *_ in plain["seen"]}
    for world_size in (1, 2, 3):
        found = run(tmp_path / str(world_size), "causal_lm", world_size, **options)
        assert_alike(found, plain, TOLERANCE)
    start = tmp_path / "plain" / "out" / "checkpoint-2"
    resumed = run(
        tmp_path / "resumed", "causal_lm", 2, **options, resume_from_checkpoint=str(start)
    )
    for one in resumed:
        one["seen"], one["history"] = plain["seen"], plain["history"]  # they begin later
    assert_alike(resumed, plain, TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "accumulate"), [("text_classification", 1), ("lora", 2)], ids=lambda value: value
)
def test_other_scripts_on_one_to_three_ranks(script: str, accumulate: int, tmp_path: Path) -> None:
    (plain,) = run(tmp_path / "plain", script, plain=True, accumulate=accumulate)
    for world_size in (1, 2, 3):
        found = run(tmp_path / str(world_size), script, world_size, accumulate=accumulate)
        assert_alike(found, plain, TOLERANCE)


def test_trls_trainer_on_one_to_three_ranks(tmp_path: Path) -> None:
    """What it logs besides (accuracy, entropy, tokens) is of each rank's part."""
    pytest.importorskip("trl", reason="needs trl")
    options = {"accumulate": 2, "num_train_epochs": 1, "bf16": False}
    (plain,) = run(tmp_path / "plain", "sft", plain=True, **options)
    own = ("entropy", "mean_token_accuracy", "num_tokens")
    plain["history"] = [
        {name: value for name, value in log.items() if name not in own} for log in plain["history"]
    ]
    assert len(plain["history"]) > 3
    for world_size in (1, 2, 3):
        found = run(tmp_path / str(world_size), "sft", world_size, **options)
        assert_alike(found, plain, TOLERANCE)


def stop_early(text: str) -> str:
    return text.replace(
        "result = trainer.train(",
        "from transformers import EarlyStoppingCallback\n"
        "trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))\n"
        "result = trainer.train(",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("bound", "options"),
    [
        (TOLERANCE, {"gradient_checkpointing": True}),
        (TOLERANCE, {"dataloader_drop_last": True, "accumulate": 3}),
        (TOLERANCE, {"edit": lambda text: text.replace("trainer = Trainer(\n", OWN_LOSS)}),
        (TOLERANCE, {"lr_scheduler_type": "reduce_lr_on_plateau", "edit": stop_early} | WATCHED),
        (
            TOLERANCE,
            {
                **dict.fromkeys(("eval_strategy", "save_strategy", "logging_strategy"), "epoch"),
                "num_train_epochs": 1.5,
                "edit": with_recorder,
            },
        ),
        (TOLERANCE, {"train_sampling_strategy": "sequential", "weight_decay": 0.1}),
        (3e-2, {"bf16": True}),
    ],
    ids=[
        "checkpointing",
        "drop_last",
        "compute_loss",
        "early_stopping",
        "epochs",
        "sequential",
        "bf16",
    ],
)
def test_options(bound: float, options: dict[str, Any], tmp_path: Path) -> None:
    (plain,) = run(tmp_path / "plain", "causal_lm", plain=True, **options)
    assert_alike(run(tmp_path / "two", "causal_lm", 2, **options), plain, bound)


@pytest.mark.long
def test_samples_that_are_grouped_by_length_have_one_order_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """So a resume on other ranks continues where the run was."""
    options = {"train_sampling_strategy": "group_by_length", "edit": with_recorder}
    (alone,) = run(tmp_path / "one", "causal_lm", **options)
    assert_alike(run(tmp_path / "two", "causal_lm", 2, **options), alone, TOLERANCE)


@pytest.mark.long
def test_the_original_resumes_from_a_checkpoint_of_three_ranks(tmp_path: Path) -> None:
    (plain,) = run(tmp_path / "plain", "causal_lm", plain=True, **WATCHED)
    run(tmp_path / "three", "causal_lm", 3, **WATCHED)
    start = tmp_path / "three" / "out" / "checkpoint-4"
    resumed = run(
        tmp_path / "back", "causal_lm", plain=True, **WATCHED, resume_from_checkpoint=str(start)
    )
    resumed[0]["history"] = plain["history"]
    assert_alike(resumed, plain, TOLERANCE)


REFUSED: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({"fsdp": "full_shard"}, {}, "fsdp"),
    ({"auto_find_batch_size": True}, {}, "auto_find_batch_size"),
    ({"train_sampling_strategy": "batch_rebalance"}, {}, "train_sampling_strategy"),
    ({"accelerator_config": {"split_batches": True}}, {}, "split_batches"),
    ({"eval_use_gather_object": True}, {}, "eval_use_gather_object"),
    ({"optim": "lomo"}, {}, "optim is lomo"),
    ({"max_steps": 3}, {}, "train_dataset"),
    ({}, {"EVENER_ELASTIC": "1:3"}, "EVENER_ELASTIC is 1:3"),
    ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
]


def refusal(rank: Rank, cases: list[tuple[dict[str, Any], dict[str, str], str]]) -> list[str]:
    """What each of them raises."""
    from torch import nn
    from torch.utils.data import IterableDataset
    from transformers import TrainingArguments

    from evener import ConfigError
    from evener.hf import Trainer

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([])

    warnings.simplefilter("ignore")
    said = []
    for options, environ, _ in cases:
        args = TrainingArguments(use_cpu=True, report_to="none", **options)
        data = Stream() if "max_steps" in options else [{"x": 1}]
        os.environ.update(environ)
        try:
            Trainer(nn.Linear(1, 1), args, train_dataset=data)
            said.append("nothing")
        except ConfigError as error:
            said.append(str(error))
        for name in environ:
            del os.environ[name]
    return said


def test_what_cannot_hold_is_refused_with_cause_and_remedy() -> None:
    (said,) = run_ranks(refusal, 1, REFUSED)
    for (_, _, named), text in zip(REFUSED, said, strict=True):
        assert named in text
        assert ", but " in text, text
        assert "; " in text, text


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "evener.hf", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'evener\[hf\]'"):
        import evener.hf  # noqa: F401
