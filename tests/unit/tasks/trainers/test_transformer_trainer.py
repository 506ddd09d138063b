"""``TransformerTrainer`` and its batches: options, what is refused, the learning rate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evener import ConfigError, DataError, LMBatch, TransformerTrainer, UsageError
from helpers.language import llama, lm_batch, relative_error, train_plainly, vector


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer": {"learning_rate": 1}}, ["learning_rate", "lr"]),
        ({"optimizer": {"lr": -1}}, ["lr is -1", "greater than 0"]),
        ({"max_steps": 0}, ["max_steps is 0", "than or equal to 1"]),
        ({"max_steps": "4"}, ["max_steps is '4'", "a whole number"]),
        ({"total_tokens": "x"}, ["total_tokens is 'x'"]),
        ({"total_tokens": 0}, ["TransformerTrainer: total_tokens is 0: ", "greater than 0"]),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, ["optimizer is SGD"]),
        ({"schedule": 0.5}, ["schedule is 0.5"]),
    ],
)
def test_a_bad_option_is_named(options: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TransformerTrainer(nn.Linear(2, 2), **options)
    for text in named:
        assert text in str(caught.value)


@pytest.mark.parametrize("model", [None, "llama", [nn.Linear(2, 2)]])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ConfigError, match="give a torch"):
        TransformerTrainer(model)


def rates(**options: Any) -> list[float]:
    trainer = TransformerTrainer(llama(1), {"lr": 1.0, "warmup": 0.0, "eps": 1.0}, **options)
    found = []
    for number in range(3):
        trainer.forward_backward_batch(lm_batch(number, 2))
        result = trainer.apply_gradients()
        assert result is not None
        found.append(result.lr)
    trainer.close()
    return found


def test_the_learning_rate_follows_tokens_or_steps_or_nothing() -> None:
    assert rates() == [1.0, 1.0, 1.0]
    by_steps = rates(max_steps=4)
    assert by_steps == pytest.approx([1.0, 0.1 + 0.9 * 0.5 * (1 + 2**-0.5), 0.55])
    tokens = [lm_batch(number, 2).num_tokens for number in range(3)]
    (first, second, third) = rates(total_tokens=2.0 * tokens[0])
    assert (first, second) == pytest.approx((1.0, 0.55))
    assert third < second


def test_a_compiled_model_trains_as_it_is() -> None:
    batches = [lm_batch(1, 2), lm_batch(2, 2)]
    true = vector(train_plainly(llama(1), batches, lr=1e-3))
    model = llama(1)
    trainer = TransformerTrainer(torch.compile(model, backend="eager"), {"lr": 1e-3})
    for batch in batches:
        trainer.forward_backward_batch(batch)
        trainer.apply_gradients()
    trainer.close()
    torch._dynamo.reset()
    assert relative_error(vector(model), true) <= 1e-6


def test_a_batch_that_fails_leaves_nothing_behind() -> None:
    model = llama(1)
    trainer = TransformerTrainer(model)
    trainer.forward_backward_batch(lm_batch(1, 2))
    handle = model.lm_head.register_forward_hook(_fail)
    with pytest.raises(ZeroDivisionError):
        trainer.forward_backward_batch(lm_batch(2, 2))
    handle.remove()
    before = vector(model)
    assert trainer.apply_gradients() is None, "what was accumulated has been dropped"
    assert torch.equal(vector(model), before)
    trainer.forward_backward_batch(lm_batch(1, 2))
    assert trainer.apply_gradients() is not None
    assert not torch.equal(vector(model), before)
    trainer.close()


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


def test_dropout_leaves_the_random_numbers_of_the_caller_alone() -> None:
    """Ranks that deal out batches by a permutation must all draw the same one in every epoch."""
    losses = []
    for seed in (1, 2):
        trainer = TransformerTrainer(llama(attention_dropout=0.5))
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        losses.append([trainer.forward_backward_batch(lm_batch(1, 2)) for _ in range(2)])
        assert torch.equal(torch.get_rng_state(), before)
        trainer.close()
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1]


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    trainer = TransformerTrainer(llama(1))
    good = lm_batch(1, 2)
    for ids, labels, said in (
        (good.input_ids + 30, good.labels, "tokens 0 to 39"),
        (good.input_ids - 40, good.labels, "holds token -"),
        (good.input_ids, good.labels + 100, "tokens 0 to 39"),
        (good.input_ids, torch.full_like(good.labels, -5), "holds token -5"),
    ):
        with pytest.raises(DataError, match=said):
            trainer.forward_backward_batch(LMBatch(ids, labels))


class OwnModel(nn.Module):
    """A model that is not of transformers: token ids in, an object with logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 4), nn.Linear(4, 40)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.embedding(input_ids)))


def test_a_model_of_ones_own_needs_only_logits() -> None:
    model, batch = OwnModel(), lm_batch(1, 2)
    trainer = TransformerTrainer(model)
    logits = model(batch.input_ids).logits.flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch.labels.flatten()).item()
    assert trainer.forward_backward_batch(batch) == pytest.approx(expected, rel=1e-6)
    assert trainer.apply_gradients() is not None
    trainer.close()


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch is a dict; give an LMBatch"):
        TransformerTrainer(llama(1)).forward_backward_batch({"input_ids": [[1]]})  # type: ignore[arg-type]


def test_a_loop_over_a_loader_uses_backward_instead() -> None:
    trainer = TransformerTrainer(llama(1))
    with trainer.ddp as ddp:
        loader = ddp.loader([lm_batch(1, 1)] * 4, batch_size=2, collate_fn=lambda batches: batches)
        for batches in loader.epoch(0):
            with pytest.raises(UsageError, match="use TransformerTrainer"):
                trainer.forward_backward_batch(batches[0])
            trainer.backward(batches[0])
            ddp.step()
    assert trainer.step == 2


def test_a_trainer_joins_one_team_only() -> None:
    trainer = TransformerTrainer(llama(1))
    with trainer.ddp, pytest.raises(UsageError, match="make a new one"):
        trainer.join_team()


# ── batches ──────────────────────────────────────────────────────────────────────────────────────


def test_documents_become_sequences_with_their_next_tokens() -> None:
    batch = LMBatch.of_documents([[5, 6, 7], [8, 9]], pad_id=1)
    assert batch.input_ids.tolist() == [[5, 6], [8, 1]]
    assert batch.labels.tolist() == [[6, 7], [9, -100]]
    assert (batch.num_sequences, batch.num_tokens) == (2, 3)
    again = LMBatch.of_documents([torch.tensor([5, 6, 7], dtype=torch.int32), (8, 9)], pad_id=1)
    assert torch.equal(again.input_ids, batch.input_ids)


@pytest.mark.parametrize(
    ("input_ids", "labels", "said"),
    [
        ([[1, 2]], torch.zeros(1, 2).long(), "input_ids is \\[\\[1, 2\\]\\]; give an int64"),
        (torch.zeros(1, 2), torch.zeros(1, 2).long(), "input_ids is tensor"),
        (torch.zeros(1, 2).long(), torch.zeros(2).long(), "labels is tensor"),
        (torch.zeros(1, 2).long(), torch.zeros(1, 3).long(), r"\(1, 2\) and labels \(1, 3\)"),
        (torch.zeros(0, 2).long(), torch.zeros(0, 2).long(), "input_ids is tensor"),
    ],
)
def test_a_batch_that_is_none_is_refused(input_ids: Any, labels: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        LMBatch(input_ids, labels)


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "no document"),
        ([[1, 2], [3]], r"document 1 is \[3\]; give its token ids: a list of two or more whole"),
        ([[1, 2], []], r"document 1 is \[\]"),
        (["two words"], "document 0 is 'two words'"),
        ([[1, 2], None], "document 1 is None"),
        ([[1.0, 2.5]], r"document 0 is \[1.0, 2.5\]"),
        ([[[1, 2], [3, 4]]], "document 0 is "),
        ([[True, False]], "document 0 is "),
    ],
)
def test_documents_without_a_target_are_refused(documents: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        LMBatch.of_documents(documents)
