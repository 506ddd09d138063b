"""Trains adapters on a frozen GPT-2 with PEFT; only their weights are saved."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments, set_seed
from transformers import Trainer

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
config = GPT2Config(
    vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
adapters = LoraConfig(
    task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"]
)
for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
    setattr(config, name, 0.0)
model = get_peft_model(GPT2LMHeadModel(config), adapters)
draw = torch.Generator().manual_seed(1)
texts = [torch.randint(1, 40, (8,), generator=draw) for _ in range(40)]
train_set = [{"input_ids": text, "labels": text} for text in texts]
trainer = Trainer(model=model, args=args, train_dataset=train_set)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
