"""What predictions are worth, and the model to compare with."""

import pytest
import sklearn  # noqa: F401  # sets environment variables for good, so before any test

from evener.tasks.classification.baseline import linear_accuracy
from evener.tasks.classification.metrics import Evaluation, EvaluationHistory

EVALUATION = Evaluation(loss=0.5, confusion=((3, 1, 0), (2, 2, 0), (0, 0, 2)))


def test_accuracy_and_f1_by_hand() -> None:
    assert EVALUATION.accuracy == 7 / 10
    assert EVALUATION.majority_accuracy == 4 / 10
    # precision 3/5 and recall 3/4; 2/3 and 2/4; 1 and 1
    assert EVALUATION.f1 == pytest.approx((2 / 3, 4 / 7, 1.0))
    assert EVALUATION.macro_f1 == pytest.approx((2 / 3 + 4 / 7 + 1) / 3)
    never_hit = Evaluation(loss=1.0, confusion=((2, 0), (3, 0)))
    assert never_hit.f1 == pytest.approx((4 / 7, 0.0))


def test_the_history_knows_the_best_and_how_long_ago_that_was() -> None:
    history = EvaluationHistory()

    def add(window: int, loss: float) -> bool:
        return history.add(window, Evaluation(loss=loss, confusion=((1, 0), (0, 1))), "loss")

    assert [add(1, 0.9), add(2, 1.0), add(3, 0.8), add(4, 0.85)] == [True, False, True, False]
    assert (history.best_window, history.last_window, history.since_best) == (3, 4, 1)
    assert EvaluationHistory.model_validate(history.model_dump()) == history


def test_words_tell_the_classes_apart_and_noise_does_not() -> None:
    pairs = [(f"{'red' if i % 2 else 'blue'} thing number {i % 7}", i % 2) for i in range(60)]
    assert linear_accuracy(pairs[:40], pairs[40:]) == 1.0
    same = [("the same text", int(i >= 20)) for i in range(30)]
    assert linear_accuracy(same, same[:10] + same[20:]) == 0.5
