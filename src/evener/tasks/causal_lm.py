"""Pretraining of a causal language model, as a task of the driver."""

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from evener.config.options import PretrainOptions
from evener.config.runs import BPE, RunConfig
from evener.errors import EvenerError
from evener.tasks.blocks import gradient_buckets
from evener.tasks.job import Job, Task
from evener.tasks.language_model import (
    build_model,
    config_json,
    mean_loss,
    printable,
    summed_loss,
    vocabulary_size,
    write_text,
)
from evener.tasks.lm_batch import LMBatch
from evener.tasks.optimization import WarmupCosine, apply_settings, make_optimizer
from evener.tasks.text.bpe import EOS_ID
from evener.tasks.text.packing import PackedDocuments
from evener.tasks.text.preparation import prepare_text
from evener.tasks.text.tokenizer import CausalTokenizer, check_vocabulary, load_tokenizer

# Keys of a model's configuration that do not affect the meaning of its weights. The longest
# sequence follows data.seq_len; if it determines shapes, these differ.
_NOT_OF_THE_MODEL: Final = frozenset(
    {"_name_or_path", "dtype", "max_position_embeddings", "torch_dtype", "transformers_version"}
)


class CausalLanguageModel(Task):
    """Trains a causal language model on text.

    Args:
        config: What the user asked for.
        options: How the run was started.
        records: Documents instead of the files of ``data.path``.

    Raises:
        ConfigError: Model and tokenizer do not fit one another; see ``build_model``.
        DataError: See ``load_tokenizer``.
    """

    unit = "tokens"
    prefetch = "thread"
    _tokenizer: CausalTokenizer
    _train: PackedDocuments

    made_from = MappingProxyType(
        {
            "model": ("model", "data.tokenizer", "data.vocab_size"),
            "tokenizer": ("data",),
            "data": ("data", "seed"),
        }
    )

    def __init__(
        self, config: RunConfig, options: PretrainOptions, records: Iterable[Any] | None
    ) -> None:
        torch.manual_seed(config.seed)
        data, vocab_size, eos_id, tokenizer = config.data, config.data.vocab_size, EOS_ID, None
        if data.tokenizer != BPE:  # otherwise it is not trained yet
            tokenizer = load_tokenizer(data.tokenizer)
            vocab_size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.model = build_model(
            config.model, vocab_size=vocab_size, seq_len=data.seq_len, eos_id=eos_id
        )
        check_vocabulary(vocab_size, vocabulary_size(self.model))
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.schedule = self._rates = WarmupCosine(config.optimizer, "weight")
        self.sample_weight = data.seq_len
        self.gradient_buckets = gradient_buckets(self.model)
        self._config = config
        self._records = records
        self._given_tokenizer = tokenizer
        self._device = torch.device("cpu")

    def open_data(self, job: Job) -> tuple[Dataset[Any], Dataset[Any]]:
        """Tokenise the text, with a tokenizer that is trained on it if none was given."""
        config = self._config
        splits, tokenizer = prepare_text(job, config, self._given_tokenizer, self._records)
        self._device, self._tokenizer = job.ddp.device, tokenizer
        splits.train.require_windows(config.batch_size)
        self._train = splits.train
        most = min(len(splits.heldout), config.eval.max_sequences or len(splits.heldout))
        return splits.train, Subset(splits.heldout, range(most))

    def collate(self, samples: list[Any]) -> LMBatch:
        """Stack samples to a batch."""
        ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
        return LMBatch(torch.stack(ids), torch.stack(labels))

    def loss(self, batch: LMBatch) -> tuple[Tensor, float]:
        """Return the mean cross-entropy per counted token, in nats, and the number of these."""
        return mean_loss(self.model, batch, self._device), batch.num_tokens

    def measure(self, samples: list[Any]) -> Sequence[float]:
        """Return the cross-entropy of samples and their counted tokens."""
        batch = self.collate(samples)
        return summed_loss(self.model, batch, self._device), batch.num_tokens

    def set_length(self, epochs: float) -> None:
        """Set the length of the schedule: an epoch's tokens times ``epochs``."""
        self._rates.set_total(self.began[1] + self._train.num_tokens * epochs)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def made_of(self, job: Job) -> Mapping[str, Any]:
        """Return the configuration of the model, the tokenizer, the precision and the text."""
        train = self._train
        return {
            "model": {
                key: value
                for key, value in json.loads(config_json(self.model)).items()
                if key not in _NOT_OF_THE_MODEL
            },
            "tokenizer": self._tokenizer.fingerprint,
            "precision": self._config.precision,
            "data": f"{train.num_documents} documents of {train.num_tokens:,} tokens, signature "
            f"{train.signature}",
        }

    def assets(self) -> Mapping[str, bytes]:
        """Return the files with which transformers can load a checkpoint."""
        return {"config.json": config_json(self.model), **self._tokenizer.files()}

    def resumed(self) -> None:
        """Apply the present hyper-parameters to the optimizer."""
        apply_settings(self.optimizer, self._config.optimizer)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def write_results(self, job: Job, figures: Mapping[str, Any], *, stopped: bool) -> None:
        """Let the model generate a text, and print it."""
        sample, path = self._config.sample, job.folder / "sample.txt"
        if sample.num_tokens == 0 or stopped:
            return
        tokenizer = self._tokenizer
        prompt = [int(i) for i in tokenizer.encode(sample.prompt)] or [tokenizer.eos_id]
        with job.ddp.evaluating():
            ids = write_text(
                self.model,
                prompt,
                num_tokens=sample.num_tokens,
                temperature=sample.temperature,
                seq_len=self._config.data.seq_len,
                seed=self._config.seed,
                device=self._device,
            )
        text = sample.prompt + tokenizer.decode(ids)
        job.say(f"the model writes:\n{printable(text)}\n")
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise EvenerError(f"{path} cannot be written: {error}") from error
