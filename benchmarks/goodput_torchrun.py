"""The script that torchrun runs in ``goodput.py``: torch's DDP with checkpoints, the same work.

Each process appends a line to a file of its own in ``--folder`` when it starts; rank 0 also one for
each step, and one with the seconds that a checkpoint took.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import FEATURES, make_small_model
from torch import nn


def main() -> None:
    """Train until it is ended, from the last checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sleep", type=float, default=0.002, metavar="SECONDS", help="per sample")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--checkpoint-every", type=float, default=2.0, metavar="SECONDS")
    arguments = parser.parse_args()
    log = (arguments.folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
    log.write(json.dumps({"pid": os.getpid(), "t": time.time()}) + "\n")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = make_small_model(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(arguments.samples, FEATURES)
    step, checkpoint = 0, arguments.folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    team = nn.parallel.DistributedDataParallel(model)
    share = arguments.batch_size // world_size
    saved_s = time.monotonic()
    while True:
        start = (step * arguments.batch_size + rank * share) % (arguments.samples - share)
        x = inputs[start : start + share]
        time.sleep(arguments.sleep * len(x))
        optimizer.zero_grad()
        nn.functional.mse_loss(team(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            log.write(json.dumps({"t": time.time(), "step": step}) + "\n")
            if time.monotonic() - saved_s >= arguments.checkpoint_every:
                saved_s = time.monotonic()
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
                log.write(json.dumps({"checkpoint_s": time.monotonic() - saved_s}) + "\n")


if __name__ == "__main__":
    main()
