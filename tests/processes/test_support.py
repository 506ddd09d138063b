"""docs/support.md says what works with what; here it is tried."""

import pytest
import torch

from evener import ApplyPolicy, ConfigError, Ddp
from helpers import support
from helpers.models import mlp


def test_what_works_is_what_the_page_says():
    page = support.page()
    for policy in ApplyPolicy:
        for backend, leaf in (
            ("auto", "shared"),
            ("gloo", "gloo"),
            ("cpu", "shared"),
            ("nccl", ""),
        ):
            others = f"yes ({leaf}) | yes (threads)" if leaf else "no [1] | no [2]"
            assert f"| `{policy}` | `{backend}` | yes (none) | {others} |" in page
    assert support.PATH.read_text() == page, (
        "run PYTHONPATH=src:tests python -m helpers.support, and look at what has changed"
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"policy": "fast"}, "policy is 'fast'; choose one of sync, cadence, async"),
        ({"backend": "mpi"}, "backend is 'mpi'; choose one of auto, nccl, gloo, cpu"),
    ],
)
def test_unknown_names_are_refused(names, words):
    model = mlp()
    with pytest.raises(ConfigError, match=words):
        Ddp.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), quiet=True, **names)
