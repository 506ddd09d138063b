"""The model of the benchmarks of elastic teams: small, and the same in each library."""

from torch import nn

FEATURES = 16


def make_small_model(width: int) -> nn.Module:
    """Return a perceptron with two hidden layers of this width."""
    return nn.Sequential(
        *(nn.Linear(FEATURES, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)),
    )
