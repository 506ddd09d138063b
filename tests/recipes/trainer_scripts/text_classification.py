"""Fine-tunes a small BERT on sentences, as run_glue does; arguments are those of the Trainer."""

import random

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding
from transformers import HfArgumentParser, PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers import Trainer

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
set_seed(args.seed)
words = [f"w{k}" for k in range(60)]
vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
backend = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
backend.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")


def make_split(size, seed):
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(size)]
    labels = [int(sum(int(word[1:]) for word in text.split()) % 3 == 0) for text in texts]
    return Dataset.from_dict({"sentence": texts, "label": labels})


def preprocess(examples):
    return tokenizer(examples["sentence"], truncation=True, max_length=16)


train_set, eval_set = make_split(46, 1), make_split(21, 2)
train_set = train_set.map(preprocess, batched=True, load_from_cache_file=False)
eval_set = eval_set.map(preprocess, batched=True, load_from_cache_file=False)


def compute_metrics(predictions):
    guesses = np.argmax(predictions.predictions, axis=1)
    return {"accuracy": float((guesses == predictions.label_ids).mean())}


config = BertConfig(
    vocab_size=len(vocabulary),
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=args,
    train_dataset=train_set,
    eval_dataset=eval_set,
    compute_metrics=compute_metrics,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer),
)
result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
trainer.save_metrics("train", result.metrics)
trainer.save_state()
metrics = trainer.evaluate()
trainer.save_metrics("eval", metrics)
predictions = torch.tensor(trainer.predict(eval_set).predictions)
