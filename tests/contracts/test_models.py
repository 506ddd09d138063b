"""The models that tests train on are what they claim to be."""

import pytest
import torch

from helpers import models

MAKERS = [models.mlp, models.transformer, models.cnn]


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_decides_the_weights_and_draws_nothing_else(make):
    before = torch.get_rng_state()
    one = make(seed=3)
    torch.rand(7)
    again, other = make(seed=3), make(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not all(
        torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)
    )
    torch.set_rng_state(before)
    make(seed=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_do_not_depend_on_who_else_seeds_the_generator():
    def make(disturb):
        first = torch.nn.Embedding(3, 8)
        disturb()  # as another thread may at any moment
        second = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(8, 2))
        return torch.nn.Sequential(first, second, torch.nn.Conv1d(1, 2, 3))

    calm = models.seeded(lambda: make(lambda: None), 3, torch.float32)
    disturbed = models.seeded(lambda: make(lambda: torch.manual_seed(9)), 3, torch.float32)
    for a, b in zip(calm.parameters(), disturbed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS)
def test_every_dtype_starts_from_the_same_numbers(make, dtype):
    for exact, converted in zip(make().parameters(), make(dtype=dtype).parameters(), strict=True):
        assert converted.dtype is dtype
        assert torch.equal(exact.to(dtype), converted)


def test_the_transformer_does_not_look_ahead():
    model = models.transformer()
    tokens, _ = models.token_data(2)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 32
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10], after[:, 10])


def test_tied_weights_are_one_parameter():
    tied, loose = models.transformer(), models.transformer(tied=False)
    assert tied.head.weight is tied.words.weight
    assert loose.head.weight is not loose.words.weight


@pytest.mark.parametrize(
    ("model", "data", "loss_function"),
    [
        (models.mlp(), models.regression_data(32), torch.nn.functional.mse_loss),
        (models.transformer(), models.token_data(32), models.next_token_loss),
        (models.cnn(), models.image_data(32), torch.nn.functional.cross_entropy),
    ],
    ids=["mlp", "transformer", "cnn"],
)
def test_each_learns(model, data, loss_function):
    x, y = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
