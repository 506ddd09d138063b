"""A bag-of-words linear classifier: what a model without any knowledge of order reaches."""

from collections.abc import Sequence

_TOKEN = r"[^\W\d_]+|\d+|[^\w\s]|_"
"""Words, numbers and signs: every text that is not blank has one."""

_MAX_WORDS = 20_000
_DECAY = 1e-4
_MAX_ITERATIONS = 1000


def linear_accuracy(
    train_texts: Sequence[str],
    train_indices: Sequence[int],
    texts: Sequence[str],
    indices: Sequence[int],
) -> float:
    """Return the accuracy of multinomial logistic regression on tf-idf of words, numbers and signs.

    It sees whole texts, however short those are cut for the model. Counts are damped by 1 + log,
    rows have length 1.

    Args:
        train_texts: What it is trained on.
        train_indices: Their classes; two or more different ones.
        texts: What it is measured on.
        indices: Their classes.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(
        TfidfVectorizer(
            lowercase=False, token_pattern=_TOKEN, max_features=_MAX_WORDS, sublinear_tf=True
        ),
        LogisticRegression(C=1 / (_DECAY * len(train_texts)), max_iter=_MAX_ITERATIONS),
    )
    model.fit(train_texts, train_indices)
    return float(model.score(texts, indices))
