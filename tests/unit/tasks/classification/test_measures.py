"""What predictions are worth, the model to compare with, and the picture of it."""

from xml.etree import ElementTree

import pytest

from evener.tasks.classification.baseline import linear_accuracy
from evener.tasks.classification.metrics import Evaluation
from evener.tasks.classification.progress import EvaluationHistory
from evener.tasks.classification.report_files import confusion_svg, write_report

EVALUATION = Evaluation(loss=0.5, confusion=((3, 1, 0), (2, 2, 0), (0, 0, 2)))


def test_accuracy_and_f1_by_hand() -> None:
    assert EVALUATION.accuracy == 7 / 10
    assert EVALUATION.majority_accuracy == 4 / 10
    # precision 3/5 and recall 3/4; 2/3 and 2/4; 1 and 1
    assert EVALUATION.f1 == pytest.approx((2 / 3, 4 / 7, 1.0))
    assert EVALUATION.macro_f1 == pytest.approx((2 / 3 + 4 / 7 + 1) / 3)


def test_a_class_that_is_never_hit_has_f1_zero() -> None:
    assert Evaluation(loss=1.0, confusion=((2, 0), (3, 0))).f1 == pytest.approx((4 / 7, 0.0))


def test_an_evaluation_survives_json() -> None:
    assert Evaluation.from_json(EVALUATION.to_json()) == EVALUATION


def test_the_history_knows_the_best_and_how_long_ago_that_was() -> None:
    history = EvaluationHistory()

    def add(window: int, loss: float) -> bool:
        return history.add(window, Evaluation(loss=loss, confusion=((1, 0), (0, 1))), "loss")

    assert add(1, 0.9)
    assert not add(2, 1.0)
    assert add(3, 0.8)
    assert not add(4, 0.85)
    assert (history.best_window, history.last_window, history.since_best) == (3, 4, 1)
    again = EvaluationHistory.from_json(history.to_json())
    assert again == history


def test_words_tell_the_classes_apart_and_noise_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}.items():
        monkeypatch.setenv(name, value)  # scikit-learn sets them for good
    texts = [f"{'red' if i % 2 else 'blue'} thing number {i % 7}" for i in range(60)]
    labels = [i % 2 for i in range(60)]
    assert linear_accuracy(texts[:40], labels[:40], texts[40:], labels[40:]) == 1.0
    same = ["the same text"] * 30
    assert linear_accuracy(same, [0] * 20 + [1] * 10, same, [0] * 15 + [1] * 15) == 0.5
    assert linear_accuracy(["_", "__", "a"], [0, 0, 1], ["_", "b"], [0, 1]) == 0.5


def test_the_picture_shows_every_cell(tmp_path) -> None:  # type: ignore[no-untyped-def]
    labels = ["a<b", "second", "third"]
    root = ElementTree.fromstring(confusion_svg(EVALUATION, labels))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("a<b") == 2
    counts = [str(n) for row in EVALUATION.confusion for n in row]
    assert [text for text in texts if text in set(counts)] == counts
    write_report(tmp_path, {"held-out accuracy": "70.0%", "perplexity": 0.5}, EVALUATION, labels)
    page = (tmp_path / "report.html").read_text()
    assert "<td>70.0%</td>" in page
    assert "<td>0.5</td>" in page
    assert "a&lt;b" in page
    assert "<svg" in page


def test_names_that_xml_cannot_hold_are_shown_as_escapes() -> None:
    root = ElementTree.fromstring(confusion_svg(EVALUATION, ["a\x1bb", "c\x00d", "{rows}"]))
    texts = {node.text for node in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a\\x1bb", "c\\x00d", "{rows}"} <= texts
