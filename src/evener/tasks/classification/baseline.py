"""A bag-of-words linear classifier: what a model without any knowledge of order reaches."""

from collections.abc import Sequence

from evener.tasks.classification.samples import Pair

_TOKEN = r"[^\W\d_]+|\d+|[^\w\s]|_"
"""Words, numbers and signs: every text that is not blank has one."""

_MAX_WORDS = 20_000
_DECAY = 1e-4
_MAX_ITERATIONS = 1000


def linear_accuracy(train: Sequence[Pair], heldout: Sequence[Pair]) -> float:
    """Return the accuracy of multinomial logistic regression on tf-idf of words, numbers and signs.

    It sees whole texts, however short those are cut for the model. Counts are damped by 1 + log,
    rows have length 1.

    Args:
        train: What it is trained on; two or more classes.
        heldout: What it is measured on.
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
