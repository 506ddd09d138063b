"""Copying, saving and loading a model that a team trains: right, and no harm to the training.

As in ``test_compatibility.py``: each script runs plainly and in a team, and must end alike. What it
copies or saves in the middle is compared, too.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from evener import Ddp, DdpConfig, DistributedTrainConfig, UsageError
from evener.comm.base import Communicator
from helpers.models import mlp, regression_data, transformer
from helpers.scripts import Begin, assert_trains_alike, state_of
from helpers.teams import run_team, setup

DOUBLE = torch.float64
POINTS = regression_data(46, dtype=DOUBLE)


def check(act: Callable[[nn.Sequential, int], dict[str, Tensor]]) -> None:
    """Trains an epoch, does ``act(model, rank)``, trains another; what act returns is compared."""

    def script(begin: Begin) -> dict[str, Tensor]:
        model = mlp(dtype=DOUBLE)
        loop = begin(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        steps, found = 0, {}
        for x, y in loop.batches():
            loop.backward(F.mse_loss(model(x), y))
            if loop.step():
                steps += 1
                if steps == 3:
                    found = act(model, loop.rank)
        return state_of(model) | {f"found.{name}": t.clone() for name, t in found.items()}

    result = assert_trains_alike(script, 2, POINTS)
    assert any(name.startswith("found.") for name in result)
    assert not torch.equal(result["found.0.weight"], result["0.weight"]), "it trained no more"


def test_deep_copies_train_apart() -> None:
    def act(model: nn.Sequential, rank: int) -> dict[str, Tensor]:
        twin = copy.deepcopy(model)
        before = state_of(twin)
        optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
        twin(POINTS[0]).square().mean().backward()
        optimizer.step()
        assert not torch.equal(before["0.weight"], state_of(twin)["0.weight"])
        return before

    check(act)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_whole_models_and_state_dicts_saved(how: str, tmp_path: Path) -> None:
    def act(model: nn.Sequential, rank: int) -> dict[str, Tensor]:
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
            assert twin[0].weight.requires_grad
            return state_of(twin)
        file = tmp_path / f"model-{rank}.pt"
        torch.save(model.state_dict(), file)
        assert file.stat().st_size < 8000  # of 2 kB of numbers: not a whole buffer for each
        whole = io.BytesIO()
        torch.save(model, whole)
        whole.seek(0)
        twin = torch.load(whole, weights_only=False)
        state = torch.load(file, weights_only=True)
        assert all(torch.equal(state[n], t) for n, t in state_of(twin).items())
        return dict(state)

    check(act)


def test_safetensors_of_tied_weights(tmp_path: Path) -> None:
    model = transformer(vocab_size=12, seq_len=6, dim=8, num_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with setup(Communicator(), model, optimizer):
        save_model(model, str(tmp_path / "model.safetensors"))
        twin = transformer(vocab_size=12, seq_len=6, dim=8, num_layers=1, seed=9)
        load_model(twin, str(tmp_path / "model.safetensors"))
        assert torch.equal(twin.head.weight, model.head.weight)
        assert "head.weight" not in load_file(str(tmp_path / "model.safetensors")) or (
            "words.weight" not in load_file(str(tmp_path / "model.safetensors"))
        )


def test_save_pretrained(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )

    def make() -> Any:
        model = transformers.LlamaForCausalLM(config).to(DOUBLE)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return model

    def script(begin: Begin) -> dict[str, Tensor]:
        model = make()
        loop = begin(model, torch.optim.SGD(model.parameters(), lr=0.05))
        steps, found = 0, {}
        for (tokens,) in loop.batches(1):
            loop.backward(model(input_ids=tokens, labels=tokens).loss)
            if loop.step():
                steps += 1
                if steps == 1:
                    folder = tmp_path / f"{begin.__name__}-{loop.rank}"
                    model.save_pretrained(folder)
                    saved = load_file(folder / "model.safetensors")
                    found = {f"found.{name}": tensor for name, tensor in saved.items()}
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return state_of(model) | found

    # Llama computes its norms and positions in float32, whatever its weights are.
    tokens = torch.randint(16, (12, 6), generator=torch.Generator().manual_seed(1))
    assert_trains_alike(script, 2, (tokens,), batch_size=6, micro_batch_size=2, tolerance=1e-6)
    for folder in tmp_path.iterdir():  # here: loading changes torch's settings for all threads
        again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DOUBLE)
        assert again.lm_head.weight is again.model.embed_tokens.weight
        saved = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(again.lm_head.weight, saved)


# ── under autocast, which wraps the forward ──────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "compile"])
def test_models_of_bf16_teams_can_be_copied_and_compiled(how: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 8)
    with Ddp.setup(
        model,
        optimizer,
        devices="cpu",
        precision="bf16",
        communicator=Communicator(),
        environment=DistributedTrainConfig(),
        config=DdpConfig(quiet=True),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = mlp()(x).float()
        if how == "compile":
            torch._dynamo.reset()
            model.compile(backend="aot_eager")
            twin: Any = model
        else:
            twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        out = twin(x)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    torch._dynamo.reset()
    assert twin(x).dtype == torch.float32
    assert (twin is not model) or "forward" not in vars(model)


# ── what is not the team's ───────────────────────────────────────────────────────────────────────


def train(ddp: Ddp, loader: Any, model: nn.Module) -> None:
    for x, y in loader.epoch(0):
        ddp.backward(F.mse_loss(model(x), y))
        ddp.step()


def test_an_optimizer_may_not_get_parameters_that_nobody_averages() -> None:
    def member(communicator: Communicator) -> str:
        model = mlp(dtype=DOUBLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with setup(communicator, model, optimizer) as ddp:
            loader = ddp.loader(torch.utils.data.TensorDataset(*POINTS), batch_size=16)
            head = nn.Linear(4, 4).to(DOUBLE)
            optimizer.add_param_group({"params": head.parameters()})
            with pytest.raises(UsageError) as raised:
                train(ddp, loader, nn.Sequential(model, head))
            return str(raised.value)

    for message in run_team(2, member):
        assert "shape (4, 4)" in message
        assert "before Ddp.setup" in message


def test_a_registered_moving_average_goes_on_after_a_restart(tmp_path: Path) -> None:
    def half(num_epochs: range, folder: Path | None) -> Tensor:
        model = mlp(dtype=DOUBLE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
        with setup(Communicator(), model, optimizer) as ddp:
            ddp.register("ema", ema)
            loader = ddp.loader(torch.utils.data.TensorDataset(*POINTS), batch_size=16)
            if folder is not None:
                ddp.load(folder)
            for epoch in num_epochs:
                for x, y in loader.epoch(epoch):
                    ddp.backward(F.mse_loss(model(x), y))
                    if ddp.step():
                        ema.update_parameters(model)
            ddp.save(tmp_path / str(num_epochs.stop))
        return state_of(ema.module)["0.weight"]

    half(range(1), None)
    assert torch.equal(half(range(2), tmp_path / "1"), half(range(2), None))


def test_a_checkpoint_of_a_compiled_model_is_one_of_the_plain_model(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = mlp(dtype=DOUBLE)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05)
    dataset = torch.utils.data.TensorDataset(*POINTS)
    with setup(Communicator(), compiled, optimizer) as ddp:
        train(ddp, ddp.loader(dataset, batch_size=16), compiled)
        ddp.save(tmp_path / "run")
    torch._dynamo.reset()
    other = mlp(seed=9, dtype=DOUBLE)
    with setup(Communicator(), other, torch.optim.SGD(other.parameters(), lr=0.05)) as ddp:
        loader = ddp.loader(dataset, batch_size=16)
        ddp.load(tmp_path / "run")
        assert list(loader.epoch(0)) == []
    assert all(torch.equal(t, state_of(model)[name]) for name, t in state_of(other).items())
