"""``evener pretrain``: pretrains a causal language model on the whole team."""

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evener.cadence.apportion import apportion
from evener.checkpoint import find_newest
from evener.errors import CheckpointError
from evener.observe.events import Sink
from evener.observe.progress import ProgressSink
from evener.observe.tensorboard import TensorBoardSink
from evener.run.checkpointing import Checkpointer
from evener.run.closing import show, summarise
from evener.run.config import RunConfig
from evener.run.ddp import Ddp, DdpConfig
from evener.run.emulate import parse_emulation
from evener.run.environment import DistributedTrainConfig
from evener.run.folders import agree_on_folder
from evener.run.loop import TeamLoader
from evener.run.options import PretrainOptions
from evener.run.presets import resolve_config
from evener.run.recorder import RunRecorder
from evener.run.rehearsal import Rehearsal, Speeds
from evener.run.results import Progress, WindowResult
from evener.run.signals import StopSignals
from evener.tasks.language_model import (
    build_model,
    config_json,
    count_tokens,
    mean_loss,
    summed_loss,
    vocabulary_size,
    write_text,
)
from evener.tasks.text_data import collate, prepare_text
from evener.tasks.tokenizer import CausalTokenizer, check_vocabulary, load_tokenizer

REHEARSAL_ROUNDS = 3


def run_pretraining(options: PretrainOptions) -> int:
    """Runs this rank's part of a pretraining run.

    Args:
        options: From the command line; the rank's place comes from the environment.

    Returns:
        The exit code: 0, or 128 + the number of the signal that stopped the run.

    Raises:
        UserError: An input is wrong; the message names value, cause and remedy.
    """
    config = resolve_config(options)
    environment = DistributedTrainConfig.from_env()
    with StopSignals() as signals:
        slow = parse_emulation(options.emulate_slow, environment.world_size)
        torch.manual_seed(config.seed)
        tokenizer = load_tokenizer(config.data.tokenizer)
        model = build_model(
            config.model,
            vocab_size=tokenizer.vocab_size,
            seq_len=config.data.seq_len,
            eos_id=tokenizer.eos_id,
        )
        check_vocabulary(tokenizer, vocabulary_size(model))
        optimizer = torch.optim.AdamW(
            _parameter_groups(model, config.optimizer.weight_decay),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            fused=True,
        )
        schedule = TokenSchedule(config)
        ddp = Ddp.setup(
            model,
            optimizer,
            schedule,
            policy=config.policy,
            backend=config.backend,
            devices=config.devices,
            precision=config.precision,
            config=DdpConfig(
                max_grad_norm=config.optimizer.max_grad_norm,
                non_finite=config.non_finite,
                timeout_s=config.timeout_s,
                emulate_slow=slow,
                stop_when=lambda: signals.requested is not None,
                quiet=options.quiet,
            ),
            environment=environment,
        )
        with ddp:
            run = _Run(config, options, ddp, model, tokenizer, schedule)
            try:
                run.train()
            finally:
                run.close()
        return signals.exit_code


class TokenSchedule:
    """Linear warm-up, then cosine, by tokens that the team has committed.

    ``total_tokens`` is set once the corpus is known.
    """

    def __init__(self, config: RunConfig) -> None:
        self._warmup = config.optimizer.warmup
        self._least = config.optimizer.min_lr_ratio
        self.total_tokens = 1.0

    def __call__(self, progress: Progress) -> float:
        """The factor of the base learning rate for the next update."""
        done = min(1.0, progress.weight / self.total_tokens)
        if done < self._warmup:
            return max(done / self._warmup, 1e-3)
        part = (done - self._warmup) / max(1e-9, 1 - self._warmup)
        return self._least + (1 - self._least) * 0.5 * (1 + math.cos(math.pi * part))


class _Run:
    """One rank's part of a run, from data to the closing table."""

    def __init__(
        self,
        config: RunConfig,
        options: PretrainOptions,
        ddp: Ddp,
        model: torch.nn.Module,
        tokenizer: CausalTokenizer,
        schedule: TokenSchedule,
    ) -> None:
        self.config = config
        self.options = options
        self.ddp = ddp
        self.model = model
        self.tokenizer = tokenizer
        self.folder = agree_on_folder(
            ddp.assembly.team,
            options.out or Path("runs"),
            options.name or config.name or "pretrain",
            resume=options.resume,
        )
        self.data = prepare_text(
            ddp.assembly.team,
            config,
            tokenizer,
            cache=self.folder.parent / ".cache",
            prepares=ddp.assembly.environment.local_rank == 0,
            quiet=options.quiet,
        )
        self.heldout_loss: float | None = None
        self.loader = self._make_loader()
        self.num_windows = self._count_windows()
        schedule.total_tokens = self._total_tokens()
        resumed = self._resume() if options.resume else None
        self.recorder = RunRecorder(ddp, self.folder, self._sinks(options))
        self.recorder.start(
            run=self.folder.name,
            policy=config.policy,
            unit="tokens",
            num_samples=len(self.data.train),
            total_windows=self.num_windows,
            resumed_from=resumed,
        )
        self.checkpointer = Checkpointer(
            ddp,
            self.folder / "checkpoints",
            keep_last=config.checkpoint.keep_last,
            assets={"config.json": config_json(model), **tokenizer.files()},
            describe=self._describe,
            on_written=self.recorder.checkpoint,
            on_failure=lambda failure: self._say(f"warning: {failure}"),
        )
        ddp.on_commit(self._on_commit)

    # ── the run ──────────────────────────────────────────────────────────────────────────────

    def train(self) -> None:
        """Trains to the end or to a stop, saves, measures, and says what came of it."""
        for epoch in range(self.loader.cursor.epoch, self.num_epochs):
            for batch in self.loader.epoch(epoch):
                self._backward(batch)
                self.ddp.step()
        stopped = self.ddp.stopping
        if not stopped and self.heldout_loss is None:
            self._evaluate()
        self.checkpointer.save(self.loader.cursor.state_dict())
        checkpoint = self.checkpointer.finish()
        speeds = self._measure() if self.config.measure and not stopped else None
        if self.ddp.is_main_process:
            self._close_books(checkpoint, speeds, stopped=stopped)

    def _close_books(
        self, checkpoint: Path | None, speeds: Speeds | None, *, stopped: bool
    ) -> None:
        """Writes the summary and says what came of the run; on rank 0."""
        self.recorder.finish(self.ddp.window, "stopped" if stopped else "completed")
        summary = summarise(
            self.ddp,
            self.recorder.tally,
            self.folder,
            batch_size=self.config.batch_size,
            policy=self.config.policy,
            unit="tokens",
            heldout_loss=self.heldout_loss,
            speeds=speeds,
            checkpoint=checkpoint,
        )
        summary.write(self.folder / "summary.json")
        if not stopped:
            self._show_text()
        if not self.options.quiet:
            show(summary)

    def close(self) -> None:
        """Ends background work; a checkpoint that is being written is finished."""
        self.checkpointer.close()
        self.recorder.close()

    @property
    def num_epochs(self) -> int:
        """Epochs to go through; enough for ``max_steps`` when that is given."""
        if self.config.max_steps is None:
            return self.config.epochs
        return -(-self.config.max_steps // len(self.loader))

    def _backward(self, batch: dict[str, Tensor]) -> None:
        weight = count_tokens(batch)
        self.ddp.backward(mean_loss(self.model, batch, self.ddp.device), weight)

    def _on_commit(self, result: WindowResult) -> None:
        self.heldout_loss = None
        self.recorder.window(result)
        done, every = result.progress.window, self.config.eval.every
        if every and done % every == 0 and not self.ddp.stopping:
            self._evaluate(result)
        every = self.config.checkpoint.every
        if every and done % every == 0:
            self.checkpointer.save(self.loader.cursor.state_dict())

    def _evaluate(self, result: WindowResult | None = None) -> None:
        """Held-out loss per token, exact over ranks; the shares of the last window divide it."""
        data, ddp = self.data.heldout, self.ddp
        count = min(len(data), self.config.eval.max_sequences or len(data))
        shares = [r.samples for r in result.ranks] if result else [1] * ddp.world_size
        split = apportion(count, shares if sum(shares) else [1] * ddp.world_size)
        first = sum(split[: ddp.rank])
        indices = range(first, first + split[ddp.rank])
        loss_sum = tokens = 0.0
        began_s = time.perf_counter()
        with ddp.evaluating():
            for part in range(indices.start, indices.stop, self.loader.micro_batch_size):
                if ddp.wants_stop():
                    break
                stop = min(part + self.loader.micro_batch_size, indices.stop)
                batch = collate([data[i] for i in range(part, stop)])
                started_s = time.perf_counter()
                loss_sum += summed_loss(self.model, batch, ddp.device)
                ddp.emulate_slowness(time.perf_counter() - started_s)
                tokens += count_tokens(batch)
        loss = ddp.all_reduce(loss_sum / tokens if tokens else 0.0, tokens)
        if not ddp.stopping:
            self.heldout_loss = loss
            elapsed_s = time.perf_counter() - began_s
            self.recorder.evaluation(ddp.window, loss, data.num_tokens, elapsed_s)

    def _measure(self) -> Speeds | None:
        train = self.data.train

        def micro_batch(samples: Sequence[int]) -> None:
            self._backward(collate([train[i % len(train)] for i in samples]))

        self._say("measuring each rank alone and an equal split ...")
        return Rehearsal(
            self.ddp.assembly,
            micro_batch,
            batch_size=self.config.batch_size,
            micro_batch_size=self.loader.micro_batch_size,
        ).measure(REHEARSAL_ROUNDS)

    def _show_text(self) -> None:
        sample = self.config.sample
        if sample.num_tokens == 0:
            return
        prompt = [int(i) for i in self.tokenizer.encode(sample.prompt)] or [self.tokenizer.eos_id]
        with self.ddp.evaluating():
            ids = write_text(
                self.model,
                prompt,
                num_tokens=sample.num_tokens,
                temperature=sample.temperature,
                seq_len=self.config.data.seq_len,
                seed=self.config.seed,
                device=self.ddp.device,
            )
        text = sample.prompt + self.tokenizer.decode(ids)
        (self.folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
        self._say(f"the model writes:\n{text}\n")

    def _say(self, text: str) -> None:
        if self.ddp.is_main_process and not self.options.quiet:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _sinks(self, options: PretrainOptions) -> list[Sink]:
        sinks: list[Sink] = []
        if self.ddp.is_main_process and not options.quiet:
            sinks.append(ProgressSink(sys.stderr))
        if self.ddp.is_main_process and self.config.tensorboard:
            sinks.append(TensorBoardSink(self.folder / "tensorboard"))
        return sinks

    # ── data ─────────────────────────────────────────────────────────────────────────────────

    def _make_loader(self) -> TeamLoader:
        return self.ddp.loader(
            self.data.train,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            collate_fn=collate,
            micro_batch_size=self.config.micro_batch_size,
            prefetch="thread",
            max_steps=self.config.max_steps,
        )

    def _count_windows(self) -> int:
        return self.config.max_steps or self.config.epochs * len(self.loader)

    def _total_tokens(self) -> float:
        """Tokens of the whole run, for the schedule: an epoch's tokens, in proportion."""
        return self.data.train.num_tokens * self.num_windows / len(self.loader)

    # ── state ────────────────────────────────────────────────────────────────────────────────

    def _describe(self) -> dict[str, Any]:
        """What must be the same for a resumed run to mean the same."""
        return {
            "data": self.data.train.signature,
            "seq_len": self.config.data.seq_len,
            "tokenizer": self.tokenizer.fingerprint,
            "config": json.loads(self.config.model_dump_json()),
        }

    def _resume(self) -> Path:
        folder = self.folder / "checkpoints"
        checkpoint = find_newest(folder, _say_skipped if self.ddp.is_main_process else _say_nothing)
        newest = None if checkpoint is None else checkpoint.path.name
        names = self.ddp.assembly.team.introduce({"path": newest})
        if checkpoint is None:
            raise CheckpointError(
                f"{folder} holds no complete checkpoint to resume from; start without --resume"
            )
        for rank, other in enumerate(names):
            if other["path"] != checkpoint.path.name:
                raise CheckpointError(
                    f"rank {rank} finds {other['path']} as newest checkpoint, rank {self.ddp.rank} "
                    f"{checkpoint.path.name}; put {folder} on storage that every rank sees"
                )
        saved = checkpoint.document("run.json")
        if saved["data"] != self._describe()["data"]:
            raise CheckpointError(
                f"{checkpoint.path} was trained on other data (signature {saved['data'][:12]}, now "
                f"{self.data.train.signature[:12]}): the files, the tokenizer, data.seq_len or the "
                "held-out split changed; restore them, or start without --resume"
            )
        self.ddp.load(checkpoint.path)
        return checkpoint.path


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on vectors (norms, biases), as is usual for transformers."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def _say_skipped(path: Path, reason: str) -> None:
    sys.stderr.write(f"skipped checkpoint {path}: {reason}\n")


def _say_nothing(path: Path, reason: str) -> None:
    pass
