"""What Hugging Face's Trainer costs over evener's own loop, on any number of ranks.

    python benchmarks/trainer.py
    evener launch --nproc 2 benchmarks/trainer.py

Both train copies of one GPT-2 on the same texts, with the same optimizer. They take turns, each
first in every other one. ``ratio`` is the Trainer's seconds a step over those of the loop beside
it, both from the end of the first step of a turn to the end of its last.
"""

import argparse
import os
import tempfile
import time

import torch
from report import load_before, make_parser, ratios, spread, text_of, write_report
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
        vocab_size=256,
        n_positions=TOKENS,
        n_embd=width,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
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
    """Take turns; print the ratio."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    arguments = parser.parse_args()
    rounds = 3 if arguments.quick else arguments.rounds
    torch.set_num_threads(1)
    before = load_before()
    texts = torch.randint(256, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    ways = [by_trainer, by_loop]
    seconds: dict[object, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            seconds[way].append(way(arguments, data))
    rows = [
        {
            "name": "trainer",
            **spread("loop_ms", [1000 * step_s for step_s in seconds[by_loop]]),
            **spread("ratio", ratios(seconds[by_trainer], seconds[by_loop])),
        }
    ]
    if os.environ.get("RANK", "0") == "0":
        print(text_of(rows))
        write_report(arguments, before, rows)


if __name__ == "__main__":
    main()
