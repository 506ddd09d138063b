"""One training script, run twice: by a plain PyTorch loop on the whole batch, and by a team.

A script is a function ``script(begin)``. It makes a model and an optimizer, calls
``loop = begin(model, optimizer)``, trains in ``loop``, and returns what is to be compared:

    def script(begin):
        model = mlp(dtype=torch.float64)
        loop = begin(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in loop.batches():
            loop.backward(F.mse_loss(model(x), y))
            loop.step()
        return state_of(model)

``assert_trains_alike(script, world_size, data)`` runs it both ways. In float64 the two differ by
the order of sums alone.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, default_collate

from evener.comm.base import Communicator
from evener.data.order import Permutation
from helpers.teams import run_team, setup

SEED = 3
SHARES = (3, 1)
"""Of two ranks."""


class PlainLoop:
    """The reference: whole global batches, plain ``loss.backward()`` and ``optimizer.step()``."""

    rank = 0

    def __init__(
        self, data: Dataset[Any], batch_size: int, model: nn.Module, optimizer: Any
    ) -> None:
        self._data, self._batch_size = data, batch_size
        self._optimizer = optimizer
        model.train()

    def batches(self, epochs: int = 2) -> Iterator[Any]:
        size = len(self._data)  # type: ignore[arg-type]
        for epoch in range(epochs):
            order = Permutation(size, SEED, epoch)
            for start in range(0, size, self._batch_size):
                chosen = range(start, min(start + self._batch_size, size))
                yield default_collate([self._data[order[p]] for p in chosen])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> bool:
        self._optimizer.step()
        self._optimizer.zero_grad()
        return True


class TeamLoop:
    """A rank of a team, with unequal shares and several micro-batches a window."""

    def __init__(
        self,
        communicator: Communicator,
        data: Dataset[Any],
        batch_size: int,
        model: nn.Module,
        optimizer: Any,
        *,
        micro_batch_size: int,
    ) -> None:
        shares = SHARES if communicator.world_size == 2 else None
        self.ddp = setup(communicator, model, optimizer, shares=shares)
        self.rank = self.ddp.rank
        self._loader = self.ddp.loader(
            data, batch_size=batch_size, seed=SEED, micro_batch_size=micro_batch_size
        )

    def batches(self, epochs: int = 2) -> Iterator[Any]:
        for epoch in range(epochs):
            yield from self._loader.epoch(epoch)

    def backward(self, loss: Tensor) -> None:
        self.ddp.backward(loss)

    def step(self) -> bool:
        return self.ddp.step() is not None


Begin = Callable[[nn.Module, Any], Any]
Script = Callable[[Begin], Mapping[str, Tensor]]


def assert_trains_alike(
    script: Script,
    world_size: int,
    data: tuple[Tensor, ...],
    *,
    batch_size: int = 16,
    micro_batch_size: int = 5,
    tolerance: float = 1e-10,
) -> Mapping[str, Tensor]:
    """Runs the script plainly and on a team; every rank must end where the plain loop ends.

    Args:
        script: See above.
        world_size: 1, or 2 ranks that share 3:1.
        data: Tensors with samples along their first dimension.
        batch_size: Samples of an optimizer step.
        micro_batch_size: Most samples of a rank's forward.
        tolerance: Relative to the largest number of each tensor: float64 sums in another order.

    Returns:
        What rank 0 ended with.
    """
    dataset = TensorDataset(*data)
    expected = script(lambda model, optimizer: PlainLoop(dataset, batch_size, model, optimizer))

    def member(communicator: Communicator) -> Mapping[str, Tensor]:
        teams: list[TeamLoop] = []

        def begin(model: nn.Module, optimizer: Any) -> TeamLoop:
            loop = TeamLoop(
                communicator,
                dataset,
                batch_size,
                model,
                optimizer,
                micro_batch_size=micro_batch_size,
            )
            teams.append(loop)
            return loop

        try:
            return script(begin)
        finally:
            for loop in teams:
                loop.ddp.close()

    results = run_team(world_size, member)
    for rank, result in enumerate(results):
        assert result.keys() == expected.keys()
        for name, tensor in expected.items():
            bound = tolerance * max(float(tensor.abs().max()), 1e-3)
            difference = float((result[name] - tensor).abs().max())
            assert difference <= bound, f"rank {rank}, {name}: {difference} > {bound}"
    return results[0]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's parameters and floating-point buffers."""
    return {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point()
    }
