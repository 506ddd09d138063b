"""A bag-of-words linear classifier: the accuracy of a model that ignores the order of words."""

from collections.abc import Sequence

from evener.tasks.classification.samples import Pair

_TOKEN = r"[^\W\d_]+|\d+|[^\w\s]|_"
"""Words, numbers and signs: every non-blank text has one."""

_MAX_WORDS = 20_000
_DECAY = 1e-4
_MAX_ITERATIONS = 1000


def linear_accuracy(train: Sequence[Pair], heldout: Sequence[Pair]) -> float:
    """Return the accuracy of multinomial logistic regression on tf-idf of words, numbers and signs.

    It uses whole texts, also if they are truncated for the model. Counts are damped by 1 + log,
    rows have length 1.

    Args:
        train: Training samples of two or more classes.
        heldout: Samples on which the accuracy is measured.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer(
        lowercase=False, token_pattern=_TOKEN, max_features=_MAX_WORDS, sublinear_tf=True
    )
    classes = LogisticRegression(C=1 / (_DECAY * len(train)), max_iter=_MAX_ITERATIONS)
    model = make_pipeline(words, classes).fit(*zip(*train, strict=True))
    return float(model.score(*zip(*heldout, strict=True)))
