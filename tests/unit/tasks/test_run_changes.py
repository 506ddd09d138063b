"""What a resume of a language model run tells of changed settings."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from evener.config.runs import RunConfig
from evener.tasks.run_changes import check_changes

MODEL = b'{"hidden_size": 8}'


def tell(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    same = {"tokenizer": "t", "precisions": ["fp32"], "data": "d"}
    checkpoint: Any = SimpleNamespace(path=Path("step-1"), asset=lambda name: MODEL)
    saved, now = {**same, "config": before}, {**same, "config": after}
    return check_changes(checkpoint, saved, now, model_config=MODEL, allow=())


def test_what_earlier_versions_wrote_otherwise_has_not_changed():
    now = RunConfig(max_grad_norm=0.5, divergence_guard=False).model_dump(mode="json")
    before = now | {
        "anchor": 10,
        "overhead_target": 0.1,
        "max_anchor": 200,
        "divergence_threshold": 0.05,
        "verify_every": 0,
        "divergence_guard": "none",
    }
    del before["partition_ratios"]
    assert tell(before, now) == []
    now |= {"max_grad_norm": None, "anchor": 20}
    assert sorted(tell(before, now)) == ["anchor 10 -> 20", "max_grad_norm 0.5 -> None"]
