"""Ranks of one host divide the optimizer's state among them: its memory falls with their number."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from evener import Ddp, DdpConfig
from helpers.ranks import Rank, run_ranks

PARAMETERS = 2 * (512 * 512 + 512)
WHOLE_BYTES = 2 * 4 * PARAMETERS  # AdamW's two moments in float32
#: Flat buffers are padded, and every parameter has a step count of its own.
SPARE_BYTES = 16384


def train(rank: Rank, mode: str, make: Any) -> tuple[str, bool, int, int]:
    """Backend, whether the update is divided, bytes of all tensors, and of the state at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    optimizer = make(model.parameters(), lr=0.01)
    config = DdpConfig(quiet=True, sharded_update=mode, partition_ratios=(1,) * rank.world_size)
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=config)
    loader = ddp.loader(torch.utils.data.TensorDataset(torch.randn(64, 512)), batch_size=8)
    for (x,) in loader.epoch(0):
        ddp.backward(model(x).square().mean())
        ddp.step()
    del x
    held, is_on = tensor_bytes(), ddp.assembly.state.sharded.is_on
    backend = ddp.assembly.comm.backend
    ddp.close()
    tensors = [v for state in optimizer.state.values() for v in state.values() if v is not None]
    return backend, is_on, held, sum(tensor.nbytes for tensor in tensors)


def tensor_bytes() -> int:
    """Bytes of memory that tensors of this process lie in, each counted once."""
    gc.collect()
    sizes = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            # Some see only the front of memory that others see whole.
            start = storage.data_ptr()
            sizes[start] = max(sizes.get(start, 0), storage.nbytes())
    return sum(sizes.values())


@pytest.mark.parametrize(("world_size", "modes"), [(2, ("off", "auto")), (4, ("on",))])
def test_each_rank_holds_its_part_of_the_state(world_size: int, modes: tuple[str, ...]) -> None:
    for mode in modes:
        plain = run_ranks(train, world_size, mode, torch.optim.SGD)
        adamw = run_ranks(train, world_size, mode, torch.optim.AdamW)
        for (_, _, without, _), (backend, is_on, held, at_the_end) in zip(
            plain, adamw, strict=True
        ):
            assert is_on == (mode == "on" or (mode == "auto" and backend == "shared"))
            expected = WHOLE_BYTES / world_size if is_on else WHOLE_BYTES
            assert abs(held - without - expected) < SPARE_BYTES
            assert abs(at_the_end - WHOLE_BYTES) < SPARE_BYTES, "close gives back all of it"
