"""``diffusion_plain.py`` in a team: clamping and averaging are in a hook of the optimizer."""

import argparse
import json
from pathlib import Path

import torch
from diffusion_plain import BATCH_SIZE, EPOCHS, Points, clamp, loss_of, make, results

from evener import Ddp, DdpConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ratios", type=json.loads)
    args = parser.parse_args()

    model, optimizer, ema = make()

    @optimizer.register_step_post_hook
    def after_every_update(*_: object) -> None:
        clamp(model)
        ema.update(model)

    with Ddp.setup(
        model, optimizer, devices="cpu", config=DdpConfig(partition_ratios=args.ratios)
    ) as ddp:
        ddp.register("ema", ema)  # a parked rank receives it when it comes back
        loader = ddp.loader(Points(), batch_size=BATCH_SIZE)
        for epoch in range(EPOCHS):
            for batch in loader.epoch(epoch):
                ddp.backward(loss_of(model, batch))
                ddp.step()
    torch.save(results(model, ema) | {"updates": ema.updates}, args.out / f"rank-{ddp.rank}.pt")


if __name__ == "__main__":
    main()
