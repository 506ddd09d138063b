"""A bag-of-words linear classifier: what a model without any knowledge of order reaches."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_MAX_WORDS = 20_000
_DECAY = 1e-4
_ITERATIONS = 100


def linear_accuracy(
    train_texts: Sequence[str],
    train_indices: Sequence[int],
    texts: Sequence[str],
    indices: Sequence[int],
    num_classes: int,
) -> float:
    """Accuracy of multinomial logistic regression on tf-idf of words, numbers and signs.

    It sees whole texts, however short those are cut for the model. Words of a single training text
    are left out. Counts are damped by 1 + log, rows have length 1.

    Args:
        train_texts: What it is trained on.
        train_indices: Their classes.
        texts: What it is measured on.
        indices: Their classes.
        num_classes: Number of classes.
    """
    bags = [Counter(_WORD.findall(text)) for text in train_texts]
    texts_with = Counter(word for bag in bags for word in bag)
    vocabulary = [word for word, n in texts_with.most_common(_MAX_WORDS) if n > 1]
    place = {word: i for i, word in enumerate(vocabulary)}
    rarity = [math.log((1 + len(bags)) / (1 + texts_with[word])) + 1 for word in vocabulary]
    rows = _rows(bags, place, rarity)
    weight = torch.zeros(len(vocabulary) + 1, num_classes, requires_grad=True)
    bias = torch.zeros(num_classes, requires_grad=True)
    labels = torch.tensor(train_indices)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_ITERATIONS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(_logits(rows, weight, bias), labels)
        loss = loss + _DECAY / 2 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        tested = _rows([Counter(_WORD.findall(text)) for text in texts], place, rarity)
        found = _logits(tested, weight, bias).argmax(1)
    return float((found == torch.tensor(indices)).float().mean())


def _rows(
    bags: Sequence[Counter[str]], place: dict[str, int], rarity: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Word numbers, their weights, and where each text begins."""
    words: list[int] = []
    weights: list[float] = []
    starts: list[int] = []
    for bag in bags:
        starts.append(len(words))
        known = [
            (place[w], (1 + math.log(n)) * rarity[place[w]]) for w, n in bag.items() if w in place
        ]
        norm = math.sqrt(sum(v * v for _, v in known)) or 1.0
        words += [i for i, _ in known]
        weights += [v / norm for _, v in known]
    return torch.tensor(words, dtype=torch.long), torch.tensor(weights), torch.tensor(starts)


def _logits(rows: tuple[Tensor, Tensor, Tensor], weight: Tensor, bias: Tensor) -> Tensor:
    words, weights, starts = rows
    return bias + F.embedding_bag(words, weight, starts, mode="sum", per_sample_weights=weights)
