"""Trains a small GPT-2 from scratch on texts of unequal length, as run_clm does."""

import math
import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments, set_seed
from transformers import Trainer

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)


class Texts(torch.utils.data.Dataset):
    """Sequences of 2 to 24 tokens: a batch of few samples may hold few label tokens or many."""

    def __init__(self, size, seed):
        draw = random.Random(seed)
        self.texts = [
            [(start := draw.randrange(40)), *((start + k * k) % 40 for k in range(1, length))]
            for length in (draw.choice([2, 3, 5, 24]) for _ in range(size))
        ]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index]}


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        ids[row, :length] = labels[row, :length] = torch.tensor(sample["input_ids"])
        mask[row, :length] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


config = GPT2Config(
    vocab_size=40,
    n_positions=32,
    n_embd=16,
    n_layer=2,
    n_head=2,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=0,
    eos_token_id=0,
)
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=Texts(50, 1),
    eval_dataset=Texts(16, 2),
    data_collator=collate,
)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
metrics = trainer.evaluate()
metrics["perplexity"] = math.exp(metrics["eval_loss"])
trainer.log_metrics("eval", metrics)
