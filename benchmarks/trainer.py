"""What Hugging Face's Trainer costs over evener's own loop, on any number of ranks.

    python benchmarks/trainer.py
    evener launch --nproc 2 benchmarks/trainer.py

Both train copies of one GPT-2 on the same texts, with the same optimizer. They take turns, each
first in every other one. ``ratio`` is the Trainer's seconds a step over those of the loop beside
it, both from the end of the first step of a turn to the end of its last.
"""

import argparse
import statistics
import tempfile
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from evener import Ddp, DdpConfig
from evener.hf import Trainer

SAMPLES, TOKENS, MICRO_BATCH = 4096, 64, 4


class Clock(TrainerCallback):
    """Notes when steps end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        """Note the time."""
        self.ends_s.append(time.perf_counter())

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return (self.ends_s[-1] - self.ends_s[0]) / (len(self.ends_s) - 1)


def make_model(width: int) -> GPT2LMHeadModel:
    """Return the model."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=TOKENS, n_embd=width, n_layer=4, n_head=4, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def by_trainer(arguments: argparse.Namespace, data: list[dict[str, torch.Tensor]]) -> float:
    """Train with the Trainer; return the seconds of a step."""
    clock = Clock()
    options = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=arguments.steps,
        per_device_train_batch_size=MICRO_BATCH,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(make_model(arguments.width), options, train_dataset=data, callbacks=[clock])
    trainer.ddp_config = DdpConfig(quiet=True)
    trainer.train()
    assert trainer.ddp is not None
    trainer.ddp.close()
    return clock.step_s


def by_loop(arguments: argparse.Namespace, data: list[dict[str, torch.Tensor]]) -> float:
    """Train in a loop; return the seconds of a step."""
    clock, model = Clock(), make_model(arguments.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    config = DdpConfig(max_grad_norm=1.0, quiet=True)
    with Ddp.setup(model, optimizer, precision="fp32", config=config) as ddp:
        size, count = MICRO_BATCH * ddp.world_size, MICRO_BATCH * (TOKENS - 1)
        loader = ddp.loader(
            data, batch_size=size, micro_batch_size=MICRO_BATCH, max_steps=arguments.steps
        )
        ddp.on_commit(clock.on_step_end)
        for batch in loader.epoch(0):
            batch = {name: tensor.to(ddp.device) for name, tensor in batch.items()}
            ddp.backward(model(**batch).loss, weight=count)
            ddp.step()
    return clock.step_s


def main() -> None:
    """Take turns, and print the ratio of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    texts = torch.randint(256, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    ratios = []
    for turn in range(arguments.turns):
        ways = [by_trainer, by_loop]
        step_s = {way: way(arguments, data) for way in (ways if turn % 2 else reversed(ways))}
        ratios.append(step_s[by_trainer] / step_s[by_loop])
        print(
            f"Trainer {step_s[by_trainer] * 1e3:.1f} ms, loop {step_s[by_loop] * 1e3:.1f} ms: "
            f"ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
