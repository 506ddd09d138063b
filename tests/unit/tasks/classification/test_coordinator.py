"""Several replicas make the updates that one would make, and no sample is lost or seen twice."""

import math
from typing import Any

import pytest
import torch

from evener import BatchResult, DataParallelCoordinator, Sample
from evener.engine.loss_scale import FIRST_SCALE
from evener.errors import (
    ConfigError,
    DataError,
    NonFiniteGradientError,
    UsageError,
)
from evener.tasks.classification.pipeline import ClassifyPipeline
from helpers.classification import LABELS, TINY_LLAMA, config, samples
from helpers.clocks import RankClocks
from helpers.sinks import Kept

#: Twenty batches whose sizes divide nothing, some smaller than the team.
SIZES = (7, 11, 2, 13, 5, 1, 9, 3, 17, 4, 7, 6, 2, 11, 5, 8, 1, 13, 3, 10)


def batches() -> list[list[Sample]]:
    return [samples(size, first=100 * i) for i, size in enumerate(SIZES)]


def make(
    devices: Any = ("cpu",), model: dict[str, Any] = TINY_LLAMA, **options: Any
) -> DataParallelCoordinator:
    names = ("partition_ratios", "emulate_slow", "verify_every", "sinks")
    chosen = {k: options.pop(k) for k in names if k in options}
    return DataParallelCoordinator(model, config(**options), list(devices), **chosen)


def states(coordinator: DataParallelCoordinator) -> list[dict[str, torch.Tensor]]:
    return [
        {name: value.clone() for name, value in pipeline.model.state_dict().items()}
        for pipeline in coordinator.pipelines
    ]


def assert_identical(coordinator: DataParallelCoordinator) -> None:
    first, *others = states(coordinator)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def train(
    coordinator: DataParallelCoordinator,
) -> tuple[list[BatchResult], dict[str, torch.Tensor]]:
    results = []
    with coordinator:
        for batch in batches():
            results.append(coordinator.train_batch_parallel(batch))
            assert_identical(coordinator)
        return results, states(coordinator)[0]


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    squared = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a)
    return math.sqrt(squared / sum(float(a[k].double().square().sum()) for k in a))


@pytest.fixture(scope="module")
def alone() -> tuple[list[BatchResult], dict[str, torch.Tensor]]:
    return train(make(class_weights=[1.0, 2.0, 0.5]))


# ── the mathematics ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "team",
    [
        {"devices": ["cpu"] * 2, "partition_ratios": [3, 1]},
        {"devices": ["cpu"] * 3, "partition_ratios": [5, 2, 1], "micro_batch_size": 2},
        {"devices": ["cpu"] * 3, "emulate_slow": {1: 4.0}},
    ],
    ids=["two", "three with accumulation", "three by measured speed"],
)
def test_twenty_steps_equal_those_of_one_device(
    alone: tuple[list[BatchResult], dict[str, torch.Tensor]], team: dict[str, Any]
) -> None:
    results, state = train(make(class_weights=[1.0, 2.0, 0.5], **team))
    expected, own_state = alone
    # Sums in another order: float32 rounds at 6e-8, which twenty steps of Adam may amplify.
    for one, other in zip(expected, results, strict=True):
        assert other.avg_loss == pytest.approx(one.avg_loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert (other.correct, other.total) == (one.correct, one.total)
    assert relative_difference(own_state, state) <= 1e-5


def test_one_device_makes_the_steps_of_plain_pytorch() -> None:
    """The reference shares nothing with the coordinator but the model: loss, clipping, AdamW."""
    chosen = config(class_weights=[1.0, 2.0, 0.5])
    with DataParallelCoordinator(TINY_LLAMA, chosen, ["cpu"]) as coordinator:
        reference = coordinator.primary_pipeline.replica(torch.device("cpu"))
        reference.model.train()
        trained = [p for p in reference.model.parameters() if p.requires_grad]
        settings = chosen.optimizer
        optimizer = torch.optim.AdamW(
            trained, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
        )
        for batch in batches()[:5]:
            data = reference.collate(reference.pairs(batch))
            logits = reference.model(data["input_ids"], data["attention_mask"])
            weights = torch.tensor([1.0, 2.0, 0.5])
            loss = torch.nn.functional.cross_entropy(logits, data["labels"], weight=weights)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            result = coordinator.train_batch_parallel(batch)
            assert result.avg_loss == pytest.approx(loss.item(), rel=1e-5)
            assert result.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        own, other = coordinator.primary_pipeline.model.state_dict(), reference.model.state_dict()
        assert relative_difference(own, other) <= 1e-5


def test_an_empty_batch_makes_no_update_and_one_sample_makes_one() -> None:
    with make(["cpu"] * 3) as coordinator:
        before = states(coordinator)[0]
        result = coordinator.train_batch_parallel([])
        assert (result.total, math.isnan(result.avg_loss)) == (0, True)
        assert all(torch.equal(before[k], v) for k, v in states(coordinator)[0].items())
        assert coordinator.train_batch_parallel(samples(1)).grad_norm > 0
        assert_identical(coordinator)


def test_dropout_is_the_same_in_every_run_and_another_in_every_batch() -> None:
    def run() -> list[float]:
        with make(["cpu"] * 2, partition_ratios=[2, 1], lora={"dropout": 0.5}) as coordinator:
            return [coordinator.train_batch_parallel(samples(9)).avg_loss for _ in range(4)]

    state = torch.get_rng_state()
    first = run()
    assert run() == first
    assert torch.equal(torch.get_rng_state(), state)  # the process's generator is left alone
    assert first != [first[0]] * 4


def test_a_slow_replica_gets_less(rank_clocks: RankClocks, monkeypatch: pytest.MonkeyPatch) -> None:
    true_loss = ClassifyPipeline.loss

    def timed(self: ClassifyPipeline, batch: Any) -> Any:
        is_slow = self is coordinator.pipelines[1]
        rank_clocks.spend((0.06 if is_slow else 0.01) * len(batch["labels"]))
        return true_loss(self, batch)

    monkeypatch.setattr(ClassifyPipeline, "loss", timed)
    with make(["cpu"] * 2) as coordinator:
        for i in range(8):
            coordinator.train_batch_parallel(samples(24, first=24 * i))
        shares = coordinator.shares
    assert sum(shares) == 100
    assert shares[1] == pytest.approx(100 / 7, abs=2)


# ── use ──────────────────────────────────────────────────────────────────────────────────────────


def test_it_learns_evaluates_and_predicts_on_all_devices() -> None:
    with make(["cpu"] * 2, optimizer={"lr": 2e-2}) as coordinator:
        for i in range(40):
            coordinator.train_batch_parallel(samples(16, first=16 * i))
        held = samples(30, first=5000)
        evaluation = coordinator.evaluate(held)
        predictions = coordinator.predict([sample.text for sample in held])
    assert evaluation.total == 30
    assert evaluation.accuracy > 0.9
    found = sum(p.index == s.label for p, s in zip(predictions, held, strict=True))
    assert found == evaluation.correct
    assert all(p.label == LABELS[p.index] for p in predictions)
    assert all(sum(p.probabilities) == pytest.approx(1, abs=1e-5) for p in predictions)


def test_the_learning_rate_may_change_between_batches() -> None:
    with make(["cpu"] * 2, optimizer={"lr": 1e-2, "head_lr_ratio": 2.0}) as coordinator:
        coordinator.lr = 0.0
        before = states(coordinator)[0]
        coordinator.train_batch_parallel(samples(5))
        assert all(torch.equal(before[k], v) for k, v in states(coordinator)[0].items())
        for bad in (-1.0, math.nan, math.inf):
            with pytest.raises(ConfigError, match=r"lr is .*; give a finite number of 0 or more"):
                coordinator.lr = bad


# ── bad input ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (Sample("text", 3), "sample 1: label 3 is unknown"),
        (Sample("text", "fourth"), "label 'fourth' is unknown"),
        (Sample(" \n", 0), "sample 1 has .* as its text"),
        (Sample("half \ud83d", 0), r"sample 1 is not UTF-8: it holds '\\ud83d'"),
        (("text", 0), r"sample 1 is a tuple; give a Sample\(text, label\)"),
    ],
)
def test_a_bad_sample_is_named_and_nothing_is_computed(sample: Any, words: str) -> None:
    with make(["cpu"] * 2) as coordinator:
        before = states(coordinator)[0]
        with pytest.raises(DataError, match=words):
            coordinator.train_batch_parallel([Sample("text", 0), sample])
        assert coordinator.num_batches == 0
        assert all(torch.equal(before[k], v) for k, v in states(coordinator)[0].items())
        with pytest.raises(DataError, match="text 2 has ' ' as its text"):
            coordinator.predict(["a", "b", " "])
        assert coordinator.train_batch_parallel([Sample("text", 0)]).total == 1


def _poison(coordinator: DataParallelCoordinator, rank: int) -> None:
    model = coordinator.pipelines[rank].model
    head = next(p for n, p in model.named_parameters() if "score" in n and p.requires_grad)
    with torch.no_grad():
        head[0, 0] = math.inf


def test_a_non_finite_loss_stops_every_replica() -> None:
    with make(["cpu"] * 2, partition_ratios=[1, 1]) as coordinator:
        _poison(coordinator, 1)
        before = states(coordinator)
        with pytest.raises(NonFiniteGradientError, match="rank 1"):
            coordinator.train_batch_parallel(samples(6))
        assert all(torch.equal(before[0][k], v) for k, v in states(coordinator)[0].items())
        assert coordinator.num_batches == 0
        with torch.no_grad():
            coordinator.pipelines[1].model.load_state_dict(before[0], strict=False)
        assert coordinator.train_batch_parallel(samples(6)).grad_norm > 0
        assert_identical(coordinator)


def test_fp16_makes_the_steps_of_fp32_at_a_loss_scale_that_fits() -> None:
    """The first scale overflows with these weights: such a batch is computed again."""
    ways: dict[str, list[BatchResult]] = {}
    for precision in ("fp32", "fp16"):
        with make(["cpu"] * 2, partition_ratios=[2, 1], precision=precision) as coordinator:
            ways[precision] = [coordinator.train_batch_parallel(b) for b in batches()[:6]]
            assert coordinator.num_batches == 6
            assert_identical(coordinator)
            scale = coordinator._loss_scale.value
    assert 1 <= scale < FIRST_SCALE
    for exact, half in zip(ways["fp32"], ways["fp16"], strict=True):
        # fp16 has 11 bits; a few steps of Adam make more of what they round.
        assert half.avg_loss == pytest.approx(exact.avg_loss, rel=0.02)
        assert half.grad_norm == pytest.approx(exact.grad_norm, rel=0.02)


def test_a_replica_that_fails_in_an_update_does_not_keep_the_others_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("no room for moments")

    with make(["cpu"] * 3, partition_ratios=[1, 1, 1]) as coordinator:
        monkeypatch.setattr(coordinator._replicas[1].optimizer, "step", fail)
        with pytest.raises(MemoryError, match="no room for moments"):
            coordinator.train_batch_parallel(samples(6))
        with pytest.raises(UsageError, match="failed half-way"):
            coordinator.evaluate(samples(6))


def test_a_replica_that_fails_while_computing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for activations")

    with make(["cpu"] * 2, partition_ratios=[1, 1]) as coordinator:
        with monkeypatch.context() as patch:
            patch.setattr(coordinator.pipelines[1], "loss", fail)
            with pytest.raises(MemoryError, match="no room for activations"):
                coordinator.train_batch_parallel(samples(6))
        result = coordinator.train_batch_parallel(samples(6))
    with make(["cpu"] * 2, partition_ratios=[1, 1]) as coordinator:
        assert coordinator.train_batch_parallel(samples(6)) == result


def test_after_close_it_refuses_and_the_classifier_lives_on() -> None:
    coordinator = make(["cpu"] * 2)
    coordinator.close()
    coordinator.close()
    with pytest.raises(UsageError, match="closed"):
        coordinator.train_batch_parallel(samples(2))
    assert len(coordinator.primary_pipeline.predict(["a text"])) == 1


def test_batches_can_be_watched() -> None:
    notes = Kept()
    with make(["cpu"] * 2, partition_ratios=[2, 1], sinks=[notes]) as coordinator:
        result = coordinator.train_batch_parallel(samples(6))
    kinds = [event["type"] for event in notes.events]
    assert (kinds[0], kinds[-1]) == ("run_started", "run_finished")
    (window,) = (event for event in notes.events if event["type"] == "window")
    assert [row["samples"] for row in window["ranks"]] == [4, 2]
    assert window["loss"] == pytest.approx(result.avg_loss, rel=1e-5)  # six digits


# ── CUDA ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
def test_cuda_and_cpu_in_one_team(
    alone: tuple[list[BatchResult], dict[str, torch.Tensor]],
) -> None:
    coordinator = make(["cuda:0", "cpu"], class_weights=[1.0, 2.0, 0.5], partition_ratios=[3, 1])
    with coordinator:
        results = [coordinator.train_batch_parallel(batch) for batch in batches()]
        first, second = ({k: v.cpu() for k, v in s.items()} for s in states(coordinator))
        assert all(torch.equal(first[name], second[name]) for name in first)
    for one, other in zip(alone[0], results, strict=True):
        assert other.avg_loss == pytest.approx(one.avg_loss, rel=1e-3)
