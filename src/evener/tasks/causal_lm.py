"""``evener pretrain``: pretrains a causal language model on the whole team."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from evener.observe.progress import ProgressSink
from evener.observe.tensorboard import TensorBoardSink
from evener.run.checkpointing import Checkpointer
from evener.run.closing import show, summarise
from evener.run.config import RunConfig
from evener.run.ddp import Ddp
from evener.run.emulate import parse_emulation
from evener.run.environment import DistributedTrainConfig
from evener.run.folders import agree_on_folder
from evener.run.loop import TeamLoader
from evener.run.options import PretrainOptions
from evener.run.presets import resolve_config, run_parent
from evener.run.recorder import RunRecorder
from evener.run.rehearsal import Rehearsal, Speeds
from evener.run.results import WindowResult
from evener.run.settings import DdpConfig
from evener.run.signals import StopSignals
from evener.run.terminal import say
from evener.tasks.heldout import heldout_loss
from evener.tasks.language_model import (
    build_model,
    config_json,
    count_tokens,
    mean_loss,
    printable,
    vocabulary_size,
    write_text,
)
from evener.tasks.optimization import TokenSchedule, apply_settings, make_optimizer
from evener.tasks.resuming import RUN, check_same_data, describe_run, is_finished, newest_checkpoint
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
        schedule = TokenSchedule(config.optimizer)
        ddp = Ddp.setup(
            model,
            make_optimizer(model, config.optimizer),
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
            _Run(config, options, ddp, model, tokenizer, schedule).go()
        return signals.exit_code


class _Run:
    """One rank's part of a run, from data to the closing table."""

    recorder: RunRecorder
    checkpointer: Checkpointer

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
        self.team = ddp.assembly.team
        self.model = model
        self.tokenizer = tokenizer
        self.folder = agree_on_folder(
            self.team, run_parent(options), str(config.name), resume=options.resume
        )
        self.data = prepare_text(
            self.team,
            config,
            tokenizer,
            cache=self.folder.parent / ".cache",
            prepares=ddp.assembly.environment.local_rank == 0,
            quiet=options.quiet,
        )
        self.description = describe_run(config, self.data, tokenizer)
        self.heldout_loss: float | None = None
        self.shares = [1] * ddp.world_size
        self.loader = self._make_loader()
        self.num_windows = config.max_steps or config.epochs * len(self.loader)
        # For the schedule: an epoch's tokens, in proportion.
        schedule.total_tokens = self.data.train.num_tokens * self.num_windows / len(self.loader)

    def go(self) -> None:
        """Does all that is left to do of the run."""
        resumed = self._resume() if self.options.resume else None
        if resumed and self._has_ended and is_finished(self.team, self.folder, self.ddp.window):
            self._say(
                f"{self.folder} has been completed ({self.ddp.window} steps): nothing to do. Raise "
                "epochs or max_steps to train on, or start a new run without --resume"
            )
            return
        with ExitStack() as stack:
            self.recorder = stack.enter_context(closing(RunRecorder(self.ddp, self.folder)))
            self.checkpointer = stack.enter_context(closing(self._make_checkpointer()))
            try:
                self._start(resumed)
                self._train()
            except Exception as error:
                self.recorder.finish(self.ddp.window, "failed", f"{type(error).__name__}: {error}")
                raise

    # ── the run ──────────────────────────────────────────────────────────────────────────────

    def _start(self, resumed: Path | None) -> None:
        if self.ddp.is_main_process and not self.options.quiet:
            self.recorder.add_sink(ProgressSink(sys.stderr))
        if self.ddp.is_main_process and self.config.tensorboard:
            self.recorder.add_sink(TensorBoardSink(self.folder / "tensorboard"))
        self.recorder.start(
            run=self.folder.name,
            policy=self.config.policy,
            unit="tokens",
            num_samples=len(self.data.train),
            total_windows=self.num_windows,
            resumed_from=resumed,
        )
        self.ddp.on_commit(self._on_commit)

    def _train(self) -> None:
        """Trains to the end or to a stop, saves, measures, and says what came of it."""
        while not self._has_ended and not self.ddp.stopping:
            for batch in self.loader.epoch(self.loader.cursor.epoch):
                self._backward(batch)
                self.ddp.step()
        # A rank that was parked has missed what the others did meanwhile: rank 0 speaks for all.
        agreed = self.team.introduce({"heldout": self.heldout_loss, "shares": self.shares})[0]
        self.heldout_loss, self.shares = agreed["heldout"], agreed["shares"]
        if not self.ddp.stopping and self.heldout_loss is None:
            self._evaluate()
        stopped = self.ddp.stopping
        self.checkpointer.save(self.loader.cursor.state_dict())
        checkpoint = self.checkpointer.finish()
        elapsed_s = self.recorder.tally.elapsed_s
        speeds = self._measure() if self.config.measure and not stopped else None
        if not self.ddp.is_main_process:
            return
        summary = summarise(
            self.ddp,
            self.recorder,
            self.folder,
            batch_size=self.config.batch_size,
            policy=self.config.policy,
            unit="tokens",
            heldout_loss=self.heldout_loss,
            speeds=speeds,
            checkpoint=checkpoint,
            elapsed_s=elapsed_s,
        )
        summary.write(self.folder / "summary.json")
        if stopped:
            self.recorder.finish(self.ddp.window, "stopped", "go on from there with --resume")
        else:
            self.recorder.finish(self.ddp.window, "completed")
            self._show_text()
        if not self.options.quiet:
            show(summary)

    @property
    def _has_ended(self) -> bool:
        """Whether no window is left."""
        if self.config.max_steps is not None:
            return self.ddp.window >= self.config.max_steps
        return self.loader.cursor.epoch >= self.config.epochs

    def _backward(self, batch: dict[str, Tensor]) -> None:
        weight = count_tokens(batch)
        self.ddp.backward(mean_loss(self.model, batch, self.ddp.device), weight)

    def _on_commit(self, result: WindowResult) -> None:
        self.heldout_loss = None
        self.shares = [r.samples for r in result.ranks]
        self.recorder.window(result)
        done, every = result.progress.window, self.config.eval.every
        if every and done % every == 0 and not self.ddp.stopping:
            self._evaluate()
        every = self.config.checkpoint.every
        if every and done % every == 0:
            self.checkpointer.save(self.loader.cursor.state_dict())
        else:
            self.checkpointer.report()

    def _evaluate(self) -> None:
        result = heldout_loss(
            self.ddp,
            self.model,
            self.data.heldout,
            shares=self.shares,
            micro_batch_size=self.loader.micro_batch_size,
            max_sequences=self.config.eval.max_sequences,
        )
        if result is not None:
            self.heldout_loss = result.loss
            self.recorder.evaluation(
                self.ddp.window, result.loss, result.num_tokens, result.elapsed_s
            )

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
        self._say(f"the model writes:\n{printable(text)}\n")

    def _say(self, text: str) -> None:
        if not self.options.quiet:
            self._warn(text)

    def _warn(self, text: str) -> None:
        if self.ddp.is_main_process:
            say(text)

    # ── parts ────────────────────────────────────────────────────────────────────────────────

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

    def _make_checkpointer(self) -> Checkpointer:
        return Checkpointer(
            self.ddp,
            self.folder / "checkpoints",
            keep_last=self.config.checkpoint.keep_last,
            assets={"config.json": config_json(self.model), **self.tokenizer.files()},
            documents={RUN: self.description},
            on_written=lambda written: self.recorder.checkpoint(written),
            on_failure=lambda failure: self._warn(f"warning: {failure}"),
        )

    def _resume(self) -> Path:
        checkpoint = newest_checkpoint(self.team, self.folder / "checkpoints", say=self._warn)
        if changed := check_same_data(checkpoint, self.description):
            self._say(f"changed since {checkpoint.path.name}: {'; '.join(changed)}")
        self.ddp.load(checkpoint.path)
        for optimizer in self.ddp.assembly.optimizers:
            apply_settings(optimizer, self.config.optimizer)
        return checkpoint.path
