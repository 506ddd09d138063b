"""What the workers of elastic benchmarks run: a small model, and a log of what they do.

Each worker writes lines of JSON into a file of its own in ``--log``: one when it starts, one when
it is ready to join, one for each micro-batch that it is handed, with the ids of its samples, and
one for each window that it sees committed, with a hash of the parameters after it. With each
micro-batch that begins a window also goes a hash of the parameters with which this worker computes
it; in ASYNC only with its first one: averages come later while a window is under way.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from models import make_small_model
from torch import Tensor, nn
from torch.utils.data import Dataset

from evener import Ddp, DdpConfig, WindowResult

FEATURES = 16


class Samples(Dataset[tuple[Tensor, Tensor, int]]):
    """Sums of random numbers; each sample knows its id."""

    def __init__(self, count: int) -> None:
        self._inputs = torch.randn(count, FEATURES)
        self._sums = self._inputs.sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, int]:
        return self._inputs[number], self._sums[number], number


def hash_of(model: nn.Module) -> str:
    """Return a hash of the parameters' bits."""
    state = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    """Train until the epochs are over, or until it is ended."""
    arguments = parse_arguments()
    torch.manual_seed(0)
    model = make_small_model(FEATURES, arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Samples(arguments.samples)
    member = os.environ["EVENER_MEMBER"]
    file = (arguments.log / f"{member.replace('/', '-')}.jsonl").open("w", buffering=1)

    def write(**line: Any) -> None:
        file.write(json.dumps({"t": time.time(), **line}) + "\n")

    write(pid=os.getpid(), member=member)
    config = DdpConfig(quiet=True)
    ddp = Ddp.setup(model, optimizer, devices="cpu", policy=arguments.policy, config=config)

    @ddp.on_commit
    def note(result: WindowResult) -> None:
        write(
            window=result.window,
            epoch=result.epoch,
            start=result.start,
            size=result.size,
            ranges=result.ranges or [result.committed],
            shares=[record.samples for record in result.ranks],
            applied_t=result.applied_t,
            bits=hash_of(model),
        )

    begins_alike, begun = arguments.policy != "async", -1
    with ddp:
        loader = ddp.loader(data, batch_size=arguments.batch_size)
        write(ready=True)
        for epoch in ddp.epochs(arguments.epochs):
            for x, y, ids in loader.epoch(epoch):
                is_alike = begun < 0 or (begins_alike and ddp.window != begun)
                bits, begun = hash_of(model) if is_alike else "", ddp.window
                write(at=begun, rank=ddp.rank, ids=ids.tolist(), bits=bits)
                # A device that computes, at no cost here.
                time.sleep(arguments.sleep * len(x))
                ddp.backward(nn.functional.mse_loss(model(x), y))
                ddp.step()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--policy", default="sync")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.0, metavar="SECONDS", help="per sample")
    parser.add_argument("--width", type=int, default=64)
    return parser.parse_args()


if __name__ == "__main__":
    main()
