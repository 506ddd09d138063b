"""What the workers of ``kill.py`` and ``goodput.py`` run: a small model, and a log of commits.

Each worker writes a line for each window that it sees committed into a file of its own in
``--log``: when, which samples, and a hash of the parameters.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from evener import Ddp, DdpConfig, WindowResult

FEATURES = 16


def main() -> None:
    """Trains until the epochs are over, or until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.002, metavar="SECONDS", help="per sample")
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, arguments.width), nn.ReLU(), nn.Linear(arguments.width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(arguments.samples, FEATURES)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    member = os.environ.get("EVENER_MEMBER", f"rank/{os.environ.get('RANK', '0')}")
    log = (arguments.log / f"{member.replace('/', '-')}.jsonl").open("w", buffering=1)
    log.write(json.dumps({"pid": os.getpid(), "member": member, "t": time.time()}) + "\n")
    ddp = Ddp.setup(model, optimizer, devices="cpu", config=DdpConfig(quiet=True))

    def note(result: WindowResult) -> None:
        state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        line = {
            "t": time.time(),
            "window": result.window,
            "epoch": result.epoch,
            "start": result.start,
            "size": result.size,
            "bits": hashlib.sha256(state).hexdigest()[:16],
        }
        log.write(json.dumps(line) + "\n")

    ddp.on_commit(note)
    with ddp:
        loader = ddp.loader(data, batch_size=arguments.batch_size)
        for epoch in ddp.epochs(arguments.epochs):
            for x, y in loader.epoch(epoch):
                time.sleep(arguments.sleep * len(x))  # a device that computes, at no cost here
                ddp.backward(nn.functional.mse_loss(model(x), y))
                ddp.step()


if __name__ == "__main__":
    main()
