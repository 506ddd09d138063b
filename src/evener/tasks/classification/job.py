"""``evener classify``: one rank's part of a run, from data to the report."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from evener.checkpoint import Checkpoint
from evener.config.classify import ClassifyRunConfig
from evener.config.folders import agree_on_folder, release_folder
from evener.config.options import ClassifyOptions
from evener.ddp import Ddp
from evener.engine.results import WindowResult
from evener.errors import CheckpointError, EvenerError
from evener.loop.checkpointing import Checkpointer
from evener.loop.reporting import find_sinks
from evener.loop.state import check_state
from evener.parsing import Fields
from evener.tasks.classification.adapter import adapter_settings
from evener.tasks.classification.baseline import linear_accuracy
from evener.tasks.classification.encoding import Batch, EncodedSamples
from evener.tasks.classification.head import fit_head
from evener.tasks.classification.metrics import Evaluation
from evener.tasks.classification.pipeline import ClassifyPipeline
from evener.tasks.classification.progress import EvaluationHistory
from evener.tasks.classification.report import write_report
from evener.tasks.classification.run_data import LabelledData
from evener.tasks.classification.team_evaluation import evaluate_team
from evener.tasks.optimization import SampleSchedule, apply_settings
from evener.tasks.recording.closing import show, summarise
from evener.tasks.recording.recorder import RunRecorder
from evener.tasks.resuming import RUN, choose_checkpoint, is_finished
from evener.team.terminal import say

HISTORY = "evaluations.json"
"""Document of a checkpoint: the evaluations until then."""

BEST_STEM = "best"
BEST = f"{BEST_STEM}.safetensors"
"""Asset of a checkpoint: the best adapter and head until then."""

RESULTS = ("adapter", "merged", "report.html")
"""What a finished run leaves beside its checkpoints."""


#: Longest wait for rank 0 while it compares and saves, in seconds.
SUMMING_UP_S = 6 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResult:
    """What ``classify`` has come to; the same on every rank.

    Attributes:
        run_folder: Events, summary, report, checkpoints.
        checkpoint: The last one; ``resume=True`` goes on from it.
        adapter: The best adapter and its head; ``ClassifyPipeline.load(run_folder)`` and peft load
            it. ``None`` where nothing was evaluated.
        merged: Base and adapter in one; ``AutoModelForSequenceClassification.from_pretrained``
            loads it.
        labels: The classes, by index.
        accuracy: Part of the held-out samples that the best adapter gets right.
        macro_f1: Its F1, averaged over the classes.
        heldout_loss: Its mean cross-entropy per held-out sample in nats, weighted by class.
        stopped: A signal ended the run early; ``resume=True`` goes on.
    """

    run_folder: Path
    checkpoint: Path
    adapter: Path | None
    merged: Path | None
    labels: tuple[str, ...]
    accuracy: float | None
    macro_f1: float | None
    heldout_loss: float | None
    stopped: bool


class ClassificationRun:
    """One rank's part of a run, from data to the report."""

    recorder: RunRecorder
    checkpointer: Checkpointer

    def __init__(
        self,
        config: ClassifyRunConfig,
        options: ClassifyOptions,
        ddp: Ddp,
        pipeline: ClassifyPipeline,
        data: LabelledData,
        schedule: SampleSchedule,
    ) -> None:
        self.config = config
        self.options = options
        self.ddp = ddp
        self.team = ddp.assembly.team
        self.pipeline = pipeline
        self.data = data
        self.history = EvaluationHistory(config.eval)
        self.shares = [1] * ddp.world_size
        self.resumed: Checkpoint | None = None
        self.sinks = find_sinks(config.sinks)
        #: Into every checkpoint; filled as the run goes.
        self.assets: dict[str, bytes] = {}
        self.documents: dict[str, Any] = {RUN: self._describe(), HISTORY: {}}
        if options.resume:
            self.folder, self.resumed = choose_checkpoint(
                self.team,
                options.parent,
                str(config.name),
                say=self._warn,
                check=self._check,
            )
        else:
            self.folder = agree_on_folder(self.team, options.parent, str(config.name))
        try:
            encoder = pipeline.encoder
            self.train = EncodedSamples(encoder, data.train.texts, data.train.indices)
            self.heldout = EncodedSamples(encoder, data.heldout.texts, data.heldout.indices)
            self.loader = ddp.loader(
                self.train,
                batch_size=config.batch_size,
                seed=config.seed,
                collate_fn=encoder.collate,
                micro_batch_size=config.micro_batch_size,
                prefetch="thread",
                max_steps=config.max_steps,
            )
            if self.resumed is not None:
                self._restore(self.resumed)
        except BaseException:
            if ddp.is_main_process:
                release_folder(self.folder)
            raise
        self.num_windows = config.max_steps or config.epochs * len(self.loader)
        schedule.total_samples = max(1.0, self.num_windows * len(self.train) / len(self.loader))

    def go(self) -> ClassifyResult:
        """Does all that is left to do of the run; all ranks call it together."""
        if (
            self.resumed is not None
            and self._has_ended
            and is_finished(self.team, self.folder, self.ddp.window, RESULTS)
        ):
            self._say(
                f"{self.folder} has been completed ({self.ddp.window} steps): nothing to do. Raise "
                "epochs, max_steps or eval.patience to train on, or start a new run without "
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
            policy="sync",
            unit=self._unit,
            num_samples=len(self.train),
            total_windows=self.num_windows,
            resumed_from=self.resumed.path if self.resumed is not None else None,
        )
        if not self.history.begun:  # a run may have been stopped before its first window
            self._begin()
        self.ddp.on_commit(self._on_commit)

    def _begin(self) -> None:
        """Measures what is there, fits the head, and measures again."""
        if self.history.frozen is None and self.history.start is None:
            self._measure_start()
        if self.config.fit_head and self.config.model.adapter is None:
            self._say("fitting the head to the frozen base ...")
            if fit_head(self.ddp, self.pipeline, self.train):
                found = evaluate_team(self.ddp, self.pipeline, self.heldout, self.shares)
                self.history.probe = found[0] if found else None
                if found is not None:  # no adapter may be better than a harmful one
                    self._take(found[0])
        self.history.begun = not self.ddp.stopping
        if text := self._beginnings():
            self._say(f"held-out accuracy before training: {text}")

    def _measure_start(self) -> None:
        found = evaluate_team(self.ddp, self.pipeline, self.heldout, self.shares)
        if found is None:
            return
        if self.pipeline.has_new_head:
            self.history.frozen = found[0]
        else:
            self.history.start = found[0]
            self._take(found[0])  # training may do no better

    def _beginnings(self) -> str:
        parts = {
            "with a random head": self.history.frozen,
            "with the head that was there": self.history.start,
            "with a fitted one": self.history.probe,
        }
        return ", ".join(f"{e.accuracy:.1%} {how}" for how, e in parts.items() if e is not None)

    def _train(self) -> ClassifyResult:
        """Trains to the end or to a stop, saves, and says what came of it."""
        while not self._has_ended and not self.ddp.stopping:
            for batch in self.loader.epoch(self.loader.cursor.epoch):
                self._backward(batch)
                self.ddp.step()
        # A rank that was parked has missed what the others did meanwhile: rank 0 speaks for all.
        agreed = self.team.introduce({"history": self.history.state_dict(), "shares": self.shares})
        self.history.load_state_dict(agreed[0]["history"])
        self.shares = agreed[0]["shares"]
        if not self.ddp.stopping and self.history.last_window != self.ddp.window:
            self._evaluate()
        stopped = self.ddp.stopping and not self.history.is_exhausted
        self._save()
        checkpoint = self.checkpointer.finish()
        if self.ddp.is_main_process:
            self._sum_up(checkpoint, self.recorder.tally.elapsed_s, stopped=stopped)
        return self._result(checkpoint, stopped=stopped)

    def _result(self, checkpoint: Path | None, *, stopped: bool = False) -> ClassifyResult:
        """All ranks call it together; rank 0 knows the checkpoint, and has saved the adapter."""
        told = self.team.introduce({"checkpoint": str(checkpoint)}, timeout_s=SUMMING_UP_S)
        best = self.history.best
        return ClassifyResult(
            run_folder=self.folder,
            checkpoint=Path(told[0]["checkpoint"]),
            adapter=self.folder / "adapter" if best else None,
            merged=self.folder / "merged" if best else None,
            labels=tuple(self.pipeline.labels.names),
            accuracy=best.accuracy if best else None,
            macro_f1=best.macro_f1 if best else None,
            heldout_loss=best.loss if best else None,
            stopped=stopped,
        )

    def _backward(self, batch: Batch) -> None:
        result = self.pipeline.loss(batch)
        self.ddp.backward(result.loss, result.weight)

    def _on_commit(self, result: WindowResult) -> None:
        self.shares = [r.samples for r in result.ranks]
        self.recorder.window(result)
        done, every = result.progress.window, self.config.eval.every
        if every and done % every == 0 and not self.ddp.stopping:
            self._evaluate()
            if self.history.is_exhausted:
                self.ddp.stop()
        every = self.config.checkpoint.every
        if every and done % every == 0:
            self._save()
        else:
            self.checkpointer.report()

    def _evaluate(self) -> None:
        found = evaluate_team(self.ddp, self.pipeline, self.heldout, self.shares)
        if found is None:
            return
        evaluation, elapsed_s = found
        is_best = self._take(evaluation)
        weight = self.pipeline.weight_of(self.heldout.indices)
        self.recorder.evaluation(self.ddp.window, evaluation.loss, weight, elapsed_s)
        self._say(
            f"step {self.ddp.window}: held-out accuracy {evaluation.accuracy:.1%}, macro F1 "
            f"{evaluation.macro_f1:.3f}, loss {evaluation.loss:.3f}{' (best)' if is_best else ''}"
        )

    def _take(self, evaluation: Evaluation) -> bool:
        """Notes an evaluation of the present window; keeps what is the best so far."""
        is_best = self.history.add(self.ddp.window, evaluation)
        if is_best and self.ddp.is_main_process:
            state = self.pipeline.model.state_dict()
            self.assets[BEST] = save_bytes({k: v.detach().cpu() for k, v in state.items()})
        return is_best

    @property
    def _has_ended(self) -> bool:
        """Whether no window is left."""
        if self.history.is_exhausted:
            return True
        if self.config.max_steps is not None:
            return self.ddp.window >= self.config.max_steps
        return self.loader.cursor.epoch >= self.config.epochs

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _sum_up(self, checkpoint: Path | None, elapsed_s: float, *, stopped: bool) -> None:
        """On rank 0, which no other rank helps; they wait in ``_result``."""
        figures = self._figures(stopped=stopped)
        summary = summarise(
            self.ddp,
            self.recorder,
            self.folder,
            batch_size=self.config.batch_size,
            policy="sync",
            unit=self._unit,
            heldout_loss=self.history.best.loss if self.history.best else None,
            speeds=None,
            checkpoint=checkpoint,
            elapsed_s=elapsed_s,
        )
        summary = replace(summary, details=figures)
        try:
            summary.write(self.folder / "summary.json")
            if self.history.best is not None:
                self._save_best()
                write_report(
                    self.folder, _in_words(figures), self.history.best, self.pipeline.labels.names
                )
        except EvenerError as error:  # the checkpoint is safe; that is what counts
            self._warn(f"warning: {error}")
        if stopped:
            self.recorder.finish(self.ddp.window, "stopped", "go on from there with --resume")
        else:
            self.recorder.finish(self.ddp.window, "completed")
        if not self.options.quiet:
            show(summary)
            for name, value in _in_words(figures).items():
                text = f"{value:.1%}" if isinstance(value, float) else value
                say(f"{name}: {text}")

    def _figures(self, *, stopped: bool) -> dict[str, Any]:
        """What goes into ``summary.json`` beside the team's figures."""
        best, config = self.history.best, self.config
        frozen, start, probe = self.history.frozen, self.history.start, self.history.probe
        linear = None
        if config.eval.baseline and not stopped:
            self._say("training a bag-of-words model to compare with ...")
            linear = linear_accuracy(
                self.data.train.texts,
                self.data.train.indices,
                self.data.heldout.texts,
                self.data.heldout.indices,
            )
        counts = [p.numel() for p in self.pipeline.model.parameters() if p.requires_grad]
        return {
            "accuracy": best.accuracy if best else None,
            "macro_f1": best.macro_f1 if best else None,
            "majority_accuracy": best.majority_accuracy if best else None,
            "linear_accuracy": linear,
            "frozen_accuracy": frozen.accuracy if frozen else None,
            "start_accuracy": start.accuracy if start else None,
            "probe_accuracy": probe.accuracy if probe else None,
            "best_step": self.history.best_window,
            "early_stopped": self.history.is_exhausted,
            "confusion": [list(row) for row in best.confusion] if best else None,
            "labels": list(self.pipeline.labels.names),
            "num_train": len(self.train),
            "num_heldout": len(self.heldout),
            "data": self.data.description,
            "trainable_parameters": sum(counts),
            "adapter": str(self.folder / "adapter") if best else None,
            "merged": str(self.folder / "merged") if best else None,
        }

    def _save_best(self) -> None:
        if BEST in self.assets:
            state = load_bytes(self.assets[BEST])
            with torch.no_grad():
                for name, tensor in self.pipeline.model.state_dict().items():
                    tensor.copy_(state[name])
        self.pipeline.save(self.folder)

    @property
    def _unit(self) -> str:
        return "samples" if self.config.class_weights is None else "weighted samples"

    def _say(self, text: str) -> None:
        if not self.options.quiet:
            self._warn(text)

    def _warn(self, text: str) -> None:
        if self.ddp.is_main_process:
            say(text)

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def _save(self) -> None:
        self.documents[HISTORY] = self.history.state_dict()
        self.checkpointer.save(self.loader.cursor.state_dict())

    def _make_checkpointer(self) -> Checkpointer:
        return Checkpointer(
            self.ddp,
            self.folder / "checkpoints",
            keep_last=self.config.checkpoint.keep_last,
            retry_s=self.config.checkpoint.retry_s,
            assets=self.assets,
            documents=self.documents,
            events=self.recorder,
        )

    def _describe(self) -> dict[str, Any]:
        return {
            "data": self.data.signature,
            "labels": list(self.data.labels.names),
            "base": self.pipeline.base_fingerprint,
            "adapter": adapter_settings(self.pipeline.model.network),
            "encoder": self.pipeline.encoder.fingerprint,
            "config": self.config.model_dump(mode="json"),
        }

    def _check(self, checkpoint: Checkpoint) -> None:
        """Refuses a damaged checkpoint; one of another run is told from it later, by name."""
        try:
            run = Fields(checkpoint.document(RUN))
            run.texts("labels")
            run.fields("adapter")
            for key in ("base", "data", "encoder"):
                run.text(key)
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path / RUN} is damaged: {error}") from error
        if self._unlike(run.values):
            return
        check_state(self.ddp.assembly, checkpoint)
        try:
            history = EvaluationHistory(self.config.eval)
            history.load_state_dict(checkpoint.document(HISTORY))
            for known in (history.frozen, history.start, history.probe, history.best):
                if known is not None and len(known.confusion) != len(self.data.labels):
                    raise ValueError(f"it has {len(known.confusion)} classes")
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.path / HISTORY} is damaged: {error}") from error
        if BEST in checkpoint.manifest.files:
            best, own = checkpoint.tensors(BEST_STEM), self.pipeline.model.state_dict()
            if {name: _layout(t) for name, t in best.items()} != {
                name: _layout(t) for name, t in own.items()
            }:
                raise CheckpointError(f"{checkpoint.path / BEST} is not of this adapter")

    def _unlike(self, saved: Mapping[str, Any]) -> str:
        """What a run was trained with that this one is not, and what to put back."""
        for key, what, settings in (
            ("base", "another base model", "model.path or model.config"),
            ("labels", "other classes", "labels"),
            ("data", "other data, or the same split differently", "data.*, labels and seed"),
            ("adapter", "another adapter", "lora.* and model.adapter"),
            ("encoder", "another tokenizer or length", "data.tokenizer, seq_len and end_tokens"),
        ):
            if saved.get(key) != self.documents[RUN][key]:
                return f"was trained with {what}; put {settings} back"
        return ""

    def _restore(self, checkpoint: Checkpoint) -> None:
        if unlike := self._unlike(checkpoint.document(RUN)):
            raise CheckpointError(f"{checkpoint.path} {unlike}, or start without --resume")
        self.ddp.load(checkpoint.path)
        for optimizer in self.ddp.assembly.optimizers:
            apply_settings(optimizer, self.config.optimizer)
        self.history.load_state_dict(checkpoint.document(HISTORY))
        if BEST in checkpoint.manifest.files:
            self.assets[BEST] = checkpoint.asset(BEST)


def _layout(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _in_words(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures for people, in the order in which they are compared."""
    words = {
        "held-out accuracy": figures["accuracy"],
        "macro F1": None if figures["macro_f1"] is None else f"{figures['macro_f1']:.3f}",
        "always the most frequent class": figures["majority_accuracy"],
        "base with a random head, nothing trained": figures["frozen_accuracy"],
        "before training, with the head that was there": figures["start_accuracy"],
        "base with a fitted head, without adapter": figures["probe_accuracy"],
        "bag-of-words linear model": figures["linear_accuracy"],
        "best step": figures["best_step"],
        "samples": f"{figures['num_train']:,} for training, {figures['num_heldout']:,} held out",
        "data": figures["data"],
    }
    return {name: value for name, value in words.items() if value is not None}
