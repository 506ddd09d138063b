"""Fine-tunes a small Llama with TRL's SFTTrainer on texts of unequal length."""

import random

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import set_seed
from trl import SFTConfig
from trl import SFTTrainer

(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
set_seed(args.seed)
words = ["<pad>", "<eos>", *(f"w{i}" for i in range(38))]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<eos>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
draw = random.Random(0)
texts = [" ".join(draw.choices(words[2:], k=draw.choice([2, 3, 5, 24]))) for _ in range(50)]
config = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
    eos_token_id=1,
    bos_token_id=1,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ),
)
trainer.train()
