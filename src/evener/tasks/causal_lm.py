"""Pretraining as a task of the driver: what is a causal language model's own."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from evener.checkpoint import Checkpoint
from evener.config.options import PretrainOptions
from evener.config.pretrain import RunConfig
from evener.errors import CheckpointError, DataError, EvenerError
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
from evener.tasks.resuming import RUN
from evener.tasks.run_changes import (
    CONFIG,
    check_changes,
    describe_run,
    differences_of_model,
    read_run,
)
from evener.tasks.text_data import Text, choose_vocabulary, prepare_text
from evener.tasks.tokenizer import check_vocabulary, load_tokenizer


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
    _text: Text

    def __init__(
        self, config: RunConfig, options: PretrainOptions, records: Iterable[Any] | None
    ) -> None:
        torch.manual_seed(config.seed)
        vocabulary = choose_vocabulary(config.data)
        self.model = build_model(
            config.model,
            vocab_size=vocabulary.size,
            seq_len=config.data.seq_len,
            eos_id=vocabulary.eos_id,
        )
        check_vocabulary(vocabulary.size, vocabulary_size(self.model))
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.schedule = self._rates = WarmupCosine(config.optimizer, "weight")
        self.gradient_buckets = gradient_buckets(self.model)
        self._config = config
        self._allow = options.allow
        self._records = records
        self._tokenizer = vocabulary.tokenizer
        self._device = torch.device("cpu")
        self._description: dict[str, Any] = {}

    def open_data(self, job: Job) -> tuple[Dataset[Any], Dataset[Any]]:
        """Tokenise the text, and the tokenizer's own training data if it is to be trained."""
        self._text = prepare_text(job, self._config, self._tokenizer, self._records)
        self._device = job.ddp.device
        self.skipped_records = self._text.num_rejected
        self.first_skipped_record = self._text.first_rejected
        splits = self._text.splits
        self._description = describe_run(
            job.team, self._config, splits, self._text.tokenizer, precision=job.ddp.precision
        )
        most = min(len(splits.heldout), self._config.eval.max_sequences or len(splits.heldout))
        return splits.train, Subset(splits.heldout, range(most))

    def collate(self, samples: list[Any]) -> LMBatch:
        """Stack samples to a batch."""
        ids, labels = ([sample[key] for sample in samples] for key in ("input_ids", "labels"))
        return LMBatch(torch.stack(ids), torch.stack(labels))

    def loss(self, batch: LMBatch) -> tuple[Tensor, float]:
        """Return the mean cross-entropy per counted token, in nats, and how many count."""
        return mean_loss(self.model, batch, self._device), batch.num_tokens

    def measure(self, samples: list[Any]) -> Sequence[float]:
        """Return the cross-entropy of samples and their counted tokens."""
        batch = self.collate(samples)
        return summed_loss(self.model, batch, self._device), batch.num_tokens

    def set_length(self, epochs: float) -> None:
        """Give the learning rate its end: an epoch's tokens, in proportion."""
        began = self._description["beginning"]["weight"]
        self._rates.set_total(began + self._text.splits.train.num_tokens * epochs)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def documents(self) -> dict[str, Any]:
        """Return what the run is made of."""
        return {RUN: self._description}

    def assets(self) -> Mapping[str, bytes]:
        """Return what makes a checkpoint load with transformers."""
        return {CONFIG: config_json(self.model), **self._text.tokenizer.files()}

    def recognise(self, checkpoint: Checkpoint) -> bool:
        """Look for damage in the run's description, the tokenizer and the configuration."""
        read_run(checkpoint)
        if self._tokenizer is None:
            try:
                load_tokenizer(checkpoint.path)
            except DataError as error:
                raise CheckpointError(str(error)) from error
        return not differences_of_model(checkpoint, config_json(self.model))

    def resume(self, job: Job, checkpoint: Checkpoint) -> None:
        """Load a checkpoint of this model, perhaps to continue with other data."""
        ddp, saved, now = job.ddp, read_run(checkpoint), self._description
        changes = check_changes(
            checkpoint, saved, now, model_config=config_json(self.model), allow=self._allow
        )
        if changes:
            job.say(f"changed since {checkpoint.path.name}: {'; '.join(changes)}")
        ddp.load(checkpoint.path, allow=self._allow)
        apply_settings(self.optimizer, self._config.optimizer)
        self.new_data = saved["data"] != now["data"]
        if self.new_data:
            job.loader.cursor.restart()
            job.say("going on with other data, from its first epoch on")
            engine = ddp.assembly.engine
            began: dict[str, Any] = {"window": engine.turns, "weight": ddp.progress.weight}
        else:
            began = saved.get("beginning", now["beginning"])
        self._description = {**now, "beginning": began}
        self.first_window = began["window"]

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def write_results(self, job: Job, figures: Mapping[str, Any], *, stopped: bool) -> None:
        """Let the model write a text, and show it."""
        sample, path = self._config.sample, job.folder / "sample.txt"
        if sample.num_tokens == 0 or stopped:
            return
        tokenizer = self._text.tokenizer
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
