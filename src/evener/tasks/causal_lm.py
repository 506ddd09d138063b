"""A pretraining run, from data to the closing table: what every rank does."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evener.checkpoint import Checkpoint
from evener.config.folders import agree_on_folder, folder_in_use, release_folder
from evener.config.options import PretrainOptions
from evener.config.pretrain import RunConfig
from evener.engine.loaders.planned import TeamLoader
from evener.engine.results import WindowResult
from evener.engine.training import train_epoch
from evener.errors import CheckpointError, DataError, EvenerError
from evener.loop.checkpointing import Checkpointer
from evener.loop.reporting import find_sinks
from evener.loop.state import check_state
from evener.tasks.heldout import heldout_loss
from evener.tasks.language_model import config_json, printable, write_text
from evener.tasks.optimization import TokenSchedule, apply_settings
from evener.tasks.pretraining import PretrainResult
from evener.tasks.recording.closing import show, summarise
from evener.tasks.recording.recorder import RunRecorder
from evener.tasks.recording.rehearsal import Rehearsal, Speeds
from evener.tasks.resuming import (
    CONFIG,
    RUN,
    Beginning,
    check_changes,
    choose_checkpoint,
    describe_run,
    differences_of_model,
    is_finished,
    read_run,
)
from evener.tasks.text_data import collate, prepare_text
from evener.tasks.tokenizer import CausalTokenizer, load_tokenizer
from evener.tasks.trainers.transformer import TransformerTrainer
from evener.team.terminal import say

REHEARSAL_ROUNDS = 3


class PretrainingRun:
    """One rank's part of a run, from data to the closing table."""

    recorder: RunRecorder
    checkpointer: Checkpointer

    def __init__(
        self,
        config: RunConfig,
        options: PretrainOptions,
        trainer: TransformerTrainer,
        tokenizer: CausalTokenizer | None,
        records: Iterable[Any] | None,
        schedule: TokenSchedule,
    ) -> None:
        self.config = config
        self.options = options
        self.ddp = trainer.ddp
        self.team = self.ddp.assembly.team
        self.trainer = trainer
        self.model = trainer.model
        self.heldout_loss: float | None = None
        self.shares = [1] * self.ddp.world_size
        self.tokenizer = tokenizer
        self.records = records
        self.schedule = schedule
        self.new_data = False
        self.resumed: Checkpoint | None = None
        self.sinks = find_sinks(config.sinks)

    def go(self) -> PretrainResult:
        """Does all that is left to do of the run."""
        name, parent = str(self.config.name), self.options.parent
        if self.options.resume:
            self.folder, self.resumed = choose_checkpoint(
                self.team, parent, name, say=self._warn, check=self._check
            )
        else:
            self.folder = agree_on_folder(self.team, parent, name)
        with folder_in_use(self.folder) if self.ddp.is_main_process else nullcontext():
            try:
                self._prepare()
            except BaseException:
                if self.ddp.is_main_process:
                    release_folder(self.folder)
                raise
            return self._carry_out()

    def _prepare(self) -> None:
        """Opens the data and puts a checkpoint's state where it belongs."""
        tokenizer = self.tokenizer
        if tokenizer is None and self.resumed is not None:
            tokenizer = load_tokenizer(self.resumed.path)
        self.text = prepare_text(
            self.team,
            self.config,
            tokenizer,
            records=self.records,
            # Beside the runs of this machine: the run's own folder is where rank 0 has put it.
            cache=self.options.parent.absolute() / ".cache",
            prepares=self.ddp.assembly.environment.local_rank == 0,
            quiet=self.options.quiet,
        )
        self.data = self.text.splits
        self.description = describe_run(
            self.team,
            self.config,
            self.data,
            self.text.tokenizer,
            precision=self.ddp.precision,
        )
        self.loader = self._make_loader()
        begun = self._resume(self.resumed) if self.resumed is not None else Beginning()
        self.description["beginning"] = asdict(begun)
        per_epoch = len(self.loader)
        self.num_windows = self.config.max_steps or begun.window + self.config.epochs * per_epoch
        # For the schedule: an epoch's tokens, in proportion.
        epochs = (self.num_windows - begun.window) / per_epoch
        self.schedule.total_tokens = max(1.0, begun.weight + self.data.train.num_tokens * epochs)

    def _carry_out(self) -> PretrainResult:
        if (
            self.resumed is not None
            and self._has_ended
            and is_finished(self.team, self.folder, self.ddp.window)
        ):
            self._say(
                f"{self.folder} has been completed ({self.ddp.assembly.engine.turns} steps): "
                "nothing to do. Raise epochs or max_steps to train on, or start a new run without "
                "--resume"
            )
            return self._result(self.resumed.path)
        with ExitStack() as stack:
            self.recorder = stack.enter_context(RunRecorder(self.ddp, self.folder))
            self.checkpointer = stack.enter_context(closing(self._make_checkpointer()))
            self._start()
            return self._train()

    # ── the run ──────────────────────────────────────────────────────────────────────────────

    def _start(self) -> None:
        tensorboard = self.folder / "tensorboard" if self.config.tensorboard else None
        self.recorder.show(
            terminal=not self.options.quiet, tensorboard=tensorboard, sinks=self.sinks
        )
        self.recorder.start(
            run=self.folder.name,
            policy=self.config.policy,
            unit="tokens",
            num_samples=len(self.data.train),
            total_windows=self.num_windows,
            resumed_from=self.resumed.path if self.resumed is not None else None,
            new_data=self.new_data,
            skipped_records=self.text.num_rejected,
        )
        self.ddp.on_commit(self._on_commit)

    def _train(self) -> PretrainResult:
        """Trains to the end or to a stop, saves, measures, and says what came of it."""
        while not self._has_ended and not self.ddp.stopping:
            batches = self.loader.epoch(self.loader.cursor.epoch)
            train_epoch(batches, self.trainer.backward, self.ddp.step)
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
        if self.ddp.is_main_process:
            self._sum_up(speeds, checkpoint, elapsed_s, stopped=stopped)
        return self._result(checkpoint, stopped=stopped)

    def _sum_up(
        self, speeds: Speeds | None, checkpoint: Path | None, elapsed_s: float, *, stopped: bool
    ) -> None:
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
            skipped_records=self.text.num_rejected,
            first_skipped_record=self.text.first_rejected,
        )
        try:
            summary.write(self.folder / "summary.json")
        except EvenerError as error:  # the model is safe; that is what counts
            self._warn(f"warning: {error}")
        if stopped:
            self.recorder.finish(self.ddp.window, "stopped", "go on from there with --resume")
        else:
            self.recorder.finish(self.ddp.window, "completed")
            self._show_text()
        if not self.options.quiet:
            show(summary)

    def _result(self, checkpoint: Path | None, *, stopped: bool = False) -> PretrainResult:
        """All ranks call it together; rank 0 knows the checkpoint."""
        path = self.team.introduce({"checkpoint": str(checkpoint)})[0]["checkpoint"]
        return PretrainResult(
            run_folder=self.folder,
            checkpoint=Path(path),
            heldout_loss=self.heldout_loss,
            stopped=stopped,
        )

    @property
    def _has_ended(self) -> bool:
        """Whether no window is left."""
        if self.trainer.max_steps is not None:
            return self.trainer.reached_max_steps
        return self.loader.cursor.epoch >= self.config.epochs

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
            self.trainer.backward(collate([train[i % len(train)] for i in samples]))

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
        tokenizer = self.text.tokenizer
        prompt = [int(i) for i in tokenizer.encode(sample.prompt)] or [tokenizer.eos_id]
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
        text = sample.prompt + tokenizer.decode(ids)
        try:
            (self.folder / "sample.txt").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self._warn(f"warning: {self.folder / 'sample.txt'} cannot be written: {error}")
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
            retry_s=self.config.checkpoint.retry_s,
            assets={CONFIG: config_json(self.model), **self.text.tokenizer.files()},
            documents={RUN: self.description},
            events=self.recorder,
        )

    def _check(self, checkpoint: Checkpoint) -> None:
        """Refuses a damaged checkpoint; one of another model is told from it later, by name."""
        read_run(checkpoint)
        if self.tokenizer is None:
            try:
                load_tokenizer(checkpoint.path)
            except DataError as error:
                raise CheckpointError(str(error)) from error
        if not differences_of_model(checkpoint, config_json(self.model)):
            check_state(self.ddp.assembly, checkpoint)

    def _resume(self, checkpoint: Checkpoint) -> Beginning:
        changes = check_changes(
            checkpoint,
            self.description,
            model_config=config_json(self.model),
            allow=self.options.allow,
        )
        if changes.harmless:
            self._say(f"changed since {checkpoint.path.name}: {'; '.join(changes.harmless)}")
        self.ddp.load(checkpoint.path, allow=self.options.allow)
        for optimizer in self.ddp.assembly.optimizers:
            apply_settings(optimizer, self.config.optimizer)
        if changes.beginning is not None:
            return changes.beginning
        self.new_data = True
        self.loader.cursor.restart()
        self._say("going on with other data, from its first epoch on")
        return Beginning(self.ddp.assembly.engine.turns, self.ddp.progress.weight)
