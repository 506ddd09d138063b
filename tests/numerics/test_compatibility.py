"""What people do to models trains in a team as it does without one.

Each script runs in a plain loop on whole batches and in a team on unequal shares, in float64; the
results must agree. Parameters of the team's models live in flat buffers, those of the plain one do
not.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from helpers.models import (
    Block,
    cnn,
    image_data,
    mlp,
    next_token_loss,
    regression_data,
    seeded,
    token_data,
    transformer,
)
from helpers.scripts import Begin, assert_trains_alike, state_of

DOUBLE = torch.float64
POINTS = regression_data(46, dtype=DOUBLE)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def regress(loop: Any, model: Any, epochs: int = 2) -> Iterator[bool]:
    """Trains; yields after each micro-batch whether a step was made."""
    for x, y in loop.batches(epochs):
        loop.backward(F.mse_loss(model(x), y))
        yield loop.step()


def train(loop: Any, model: Any, epochs: int = 2) -> None:
    for _ in regress(loop, model, epochs):
        pass


# ── torch.compile ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("when", ["after", "in place"])
def test_a_compiled_model(when: str) -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        forward: Any = model
        if when == "in place":
            model.compile(backend="eager", dynamic=True)
        elif when == "before":
            forward = torch.compile(model, backend="eager", dynamic=True)
        loop = begin(forward, sgd(model))
        if when == "after":
            forward = torch.compile(model, backend="aot_eager", dynamic=True)
        train(loop, forward)
        return state_of(model)

    assert_trains_alike(script, 2, POINTS)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning")  # its own
def test_a_model_compiled_to_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    config = importlib.import_module("torch._inductor.config")

    def script(begin: Begin) -> dict[str, Tensor]:
        model = seeded(lambda: nn.Linear(8, 4), 0, DOUBLE)
        loop = begin(model, sgd(model))
        train(loop, torch.compile(model, dynamic=True), epochs=1)
        return state_of(model)

    # No pool of compiling processes, and no headers that are compiled for a single use.
    with config.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        # torch compiles a batch of one sample anew, in the thread of the rank that has it, where
        # the patch does not hold: no remainder of one.
        assert_trains_alike(script, 2, POINTS, micro_batch_size=4)


# ── recomputation, hooks ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("use_reentrant", [False])
def test_gradient_checkpointing(use_reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(8, 2), Block(8, 2)])

        def forward(self, x_BTD: Tensor) -> Tensor:
            x_BTD = x_BTD.requires_grad_()  # the reentrant way wants it
            for block in self.blocks:
                x_BTD = checkpoint(block, x_BTD, use_reentrant=use_reentrant)
            return x_BTD

    def script(begin: Begin) -> dict[str, Tensor]:
        model = seeded(Recomputed, 0, DOUBLE)
        loop = begin(model, sgd(model))
        train(loop, model)
        return state_of(model)

    generator = torch.Generator().manual_seed(1)
    data = torch.randn(2, 30, 5, 8, generator=generator, dtype=DOUBLE)
    assert_trains_alike(script, 2, (data[0], data[1]))


def test_hooks_of_modules_and_tensors() -> None:
    def count(seen: list[int], kind: int) -> None:
        seen[kind] += 1

    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        seen = [0, 0]
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model[0].register_forward_hook(lambda _, args, out: out + 0.1)
        model[2].register_full_backward_hook(lambda _, grads, __: (grads[0] * 0.5,))
        model[2].weight.register_hook(lambda grad: grad * 3)
        loop = begin(model, sgd(model))
        model[0].weight.register_hook(lambda grad: grad.neg())  # also after the set-up
        model[0].bias.register_post_accumulate_grad_hook(lambda p: count(seen, 0))
        model[2].bias.register_hook(lambda grad: count(seen, 1))
        steps = sum(regress(loop, model))
        assert steps == 6
        assert seen[0] == seen[1] >= steps
        return state_of(model)

    assert_trains_alike(script, 2, POINTS)


def test_a_gradient_penalty() -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(num_outputs=1, dtype=DOUBLE)
        loop = begin(model, sgd(model))
        for x, _ in loop.batches():
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loop.backward(out.mean() + ((slope.norm(dim=1) - 1) ** 2).mean())
            loop.step()
        return state_of(model)

    assert_trains_alike(script, 2, POINTS)


# ── which parameters train ───────────────────────────────────────────────────────────────────────


def test_tied_parameters() -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = transformer(vocab_size=12, seq_len=6, dim=8, num_layers=1, dtype=DOUBLE)
        loop = begin(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for tokens, labels in loop.batches():
            loop.backward(next_token_loss(model(tokens), labels))
            loop.step()
        assert model.head.weight is model.words.weight
        return state_of(model)

    data = token_data(30, seq_len=6, vocab_size=12)
    assert_trains_alike(script, 2, data, tolerance=1e-8)  # Adam divides by small roots


@pytest.mark.parametrize("order", ["thaw", "freeze, thaw"])
def test_freezing_and_thawing_while_training(order: str) -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        model[0].requires_grad_(order != "thaw")
        loop = begin(model, sgd(model))
        steps = 0
        for stepped in regress(loop, model, epochs=3):
            steps += stepped
            if steps == 3 and stepped:
                model[0].requires_grad_(order == "thaw")
            if steps == 5 and stepped and order == "freeze, thaw":
                model[0].requires_grad_(True)
        assert steps == 9
        return state_of(model)

    assert_trains_alike(script, 2, POINTS)


def test_a_thawed_parameter_with_an_optimizer_group_of_its_own() -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
        loop = begin(model, optimizer)
        train_steps = 0
        for stepped in regress(loop, model):
            train_steps += stepped
            if train_steps == 2 and stepped:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
        return state_of(model)

    assert_trains_alike(script, 2, POINTS, tolerance=1e-8)


def test_parameters_that_only_some_samples_reach() -> None:
    """The second expert sees one sample in 46: most ranks have no gradient for it."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
            self.unused = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            chosen = x[:, 0] > POINTS[0][:, 0].max() - 1e-9
            out = self.first(x)
            if bool(chosen.any()):
                out = torch.where(chosen[:, None], self.second(x), out)
            return out

    def script(begin: Begin) -> dict[str, Tensor]:
        model = seeded(Experts, 0, DOUBLE)
        assert isinstance(model, Experts)
        before = model.unused.weight.detach().clone()
        loop = begin(model, sgd(model))  # its weight decay would move what has no gradient
        train(loop, model)
        assert torch.equal(model.unused.weight, before)
        return state_of(model)

    assert_trains_alike(script, 2, POINTS)


# ── layouts and parametrisations ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("when", ["before", "after"])
def test_channels_last(when: str) -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = cnn(dtype=DOUBLE).eval()  # batch statistics see the micro-batch: leave them out
        for layer in model:
            if isinstance(layer, nn.BatchNorm2d):
                layer.track_running_stats = False
                layer.forward = lambda x: x  # type: ignore[method-assign]
        if when == "before":
            model.to(memory_format=torch.channels_last)
        loop = begin(model, sgd(model))
        if when == "after":
            model.to(memory_format=torch.channels_last)
        for images, labels in loop.batches():
            images = images.to(DOUBLE, memory_format=torch.channels_last)
            loop.backward(F.cross_entropy(model(images), labels))
            loop.step()
        assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
        return state_of(model)

    assert_trains_alike(script, 2, image_data(30))


@pytest.mark.parametrize("kind", ["weight_norm"])
def test_parametrised_weights(kind: str) -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        def make() -> nn.Module:  # an orthogonal matrix is drawn at random
            model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
            getattr(parametrizations, kind)(model[0])
            return model

        model: Any = seeded(make, 0, DOUBLE)
        loop = begin(model, sgd(model))
        train(loop, model)
        return state_of(model) | {"weight": model[0].weight.detach().clone()}

    assert_trains_alike(script, 2, POINTS, tolerance=1e-9)


# ── copies that follow the training ──────────────────────────────────────────────────────────────


def test_moving_averages_of_the_weights() -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        loop = begin(model, sgd(model))
        swa = AveragedModel(model)
        for stepped in regress(loop, model):
            if stepped:
                ema.update_parameters(model)
                swa.update_parameters(model)
        return state_of(model) | {
            f"{kind}.{name}": tensor
            for kind, average in (("ema", ema), ("swa", swa))
            for name, tensor in state_of(average.module).items()
        }

    assert_trains_alike(script, 2, POINTS)


def test_weights_swapped_for_evaluation_and_back() -> None:
    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        loop = begin(model, sgd(model))
        scores = []
        for stepped in regress(loop, model):
            if stepped:
                own = [p.data for p in model.parameters()]
                for p in model.parameters():
                    p.data = p.data.clone().mul_(0.5)
                with torch.inference_mode():
                    scores.append(model(POINTS[0]).mean().clone())
                for p, data in zip(model.parameters(), own, strict=True):
                    p.data = data
        return state_of(model) | {"scores": torch.stack(scores)}

    assert_trains_alike(script, 2, POINTS)
