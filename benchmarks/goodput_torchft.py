"""The script of one replica of torchft in ``goodput.py``: its Manager, the same work.

A replica is one process. It appends lines to a file of its own in ``--folder``: one when it is
ready, and one for each step that was committed, with the batches that all replicas have committed
so far, as torchft counts them.
"""

import argparse
import json
import logging
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import FEATURES, make_small_model
from torch import nn
from torchft import Manager, ProcessGroupGloo

#: A replica that is killed is noticed by Gloo at once; this is for what hangs.
TIMEOUT = timedelta(seconds=10)


def main() -> None:
    """Train until it is ended; a replica that comes later receives the others' state."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--share", type=int, required=True, help="samples per replica and step")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--sleep", type=float, default=0.002, metavar="SECONDS", help="per sample")
    parser.add_argument("--width", type=int, default=64)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    log = (arguments.folder / f"{os.getpid()}.jsonl").open("w", buffering=1)
    torch.manual_seed(0)
    model = make_small_model(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(arguments.samples, FEATURES)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def take(received: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(received["model"])
        optimizer.load_state_dict(received["optimizer"])

    # A replica of one process has a store of its own.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=take,
        state_dict=state,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT * 3,
        init_sync=False,  # all replicas begin with the same weights
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"replica{arguments.replica}",
        hostname="127.0.0.1",
    )
    log.write(json.dumps({"pid": os.getpid(), "ready": time.time()}) + "\n")
    parameters, share = [*model.parameters()], arguments.share
    while True:
        manager.start_quorum()  # in the background, while this replica computes
        start = (manager.batches_committed() + arguments.replica) * share
        x = inputs[torch.arange(start, start + share) % arguments.samples]
        time.sleep(arguments.sleep * share)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        manager.allreduce(flat).wait()
        for parameter, part in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        if manager.should_commit():
            optimizer.step()
            done = {"t": time.time(), "batches": manager.batches_committed()}
            log.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
