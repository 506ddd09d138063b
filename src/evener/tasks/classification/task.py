"""Text classification as a task of the driver: what is a LoRA classifier's own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor

from evener.config.runs import ClassifyRunConfig
from evener.tasks.classification.adapter import adapter_settings
from evener.tasks.classification.baseline import linear_accuracy
from evener.tasks.classification.encoding import fingerprint_of_encoder
from evener.tasks.classification.head import fit_head
from evener.tasks.classification.labelled_data import load_data
from evener.tasks.classification.metrics import Evaluation, EvaluationHistory, Kind
from evener.tasks.classification.pipeline import Batch, ClassifyPipeline
from evener.tasks.classification.samples import Pair
from evener.tasks.job import Job, Task
from evener.tasks.optimization import WarmupCosine, apply_settings, make_optimizer
from evener.tasks.run_results import ClassifyResult, TaskResult

#: Figures of the best adapter.
_SCORES: Final = ("accuracy", "macro_f1", "majority_accuracy")

#: Evaluations before the adapter is trained, and the head that they are made with.
_BEFORE: Final[Mapping[Kind, str]] = {
    "frozen": "a random head",
    "start": "the head that was there",
    "probe": "a fitted one",
}


class TextClassifier(Task):
    """Trains a LoRA adapter and a head on a frozen base.

    Args:
        config: What the user asked for.
        samples: Labelled texts instead of the file of ``data.path``.
        quiet: Leave warnings about the base to another rank.

    Raises:
        ConfigError: Base, adapter and tokenizer do not fit one another.
        DataError: The data is missing, malformed, has unknown labels, or lacks a class.
    """

    prefetch = "thread"
    results = ("adapter", "merged")
    lengths = "epochs, max_steps or eval.patience"
    made_from = MappingProxyType(
        {
            "base model": ("model.path", "model.config"),
            "classes": ("labels",),
            "data": ("data", "labels", "seed"),
            "adapter": ("lora", "model.adapter"),
            "tokenizer": ("data.tokenizer", "model.path", "seq_len", "end_tokens"),
        }
    )

    def __init__(
        self, config: ClassifyRunConfig, samples: Iterable[Any] | None, *, quiet: bool
    ) -> None:
        self._config = config
        self._data = data = load_data(config, samples)
        indices = [index for _, index in data.train]
        settled = {
            "labels": list(data.labels.names),
            "class_weights": data.labels.weights(config.class_weights, indices),
        }
        self._pipeline = pipeline = ClassifyPipeline.build(
            config.model,
            config.model_copy(update=settled),
            tokenizer=Path(config.data.tokenizer).expanduser() if config.data.tokenizer else None,
            quiet=quiet,
        )
        self.model = pipeline.model
        self.optimizer = make_optimizer(pipeline.model, config.optimizer)
        self.schedule = self._rates = WarmupCosine(config.optimizer, "samples")
        if config.class_weights is not None:
            self.unit = "weighted samples"
        self._history = EvaluationHistory()
        #: The trainable parameters of the best adapter and head.
        self._best: dict[str, Tensor] = {}

    def open_data(self, job: Job) -> tuple[Any, Any]:
        """Return the labelled texts."""
        return self._data.train, self._data.heldout

    def collate(self, samples: list[Pair]) -> Batch:
        """Return a batch of token ids."""
        return self._pipeline.collate(samples)

    def loss(self, batch: Batch) -> tuple[Tensor, float]:
        """Return the mean cross-entropy by class weight, and what the samples weigh."""
        result = self._pipeline.loss(batch)
        return result.loss, result.weight

    def measure(self, samples: list[Pair]) -> Sequence[float]:
        """Return the loss, the weight, and the confusion by rows."""
        pipeline = self._pipeline
        found = pipeline.compare(samples, pipeline.judge(samples))
        weight = pipeline.weight_of([label for _, label in samples])
        return found.loss * weight, weight, *(float(n) for row in found.confusion for n in row)

    def set_length(self, epochs: float) -> None:
        """Give the learning rate its end."""
        self._rates.set_total(epochs * len(self._data.train))

    def begin(self, job: Job) -> None:
        """Measure what is there, fit the head, and measure again."""
        history, config = self._history, self._config
        if history.begun:  # else: a run may have been stopped before its first window
            return
        kind: Kind = "frozen" if self._pipeline.has_new_head else "start"
        if kind not in history.known:
            self._evaluate(job, kind)
        wants_head = config.fit_head and config.model.adapter is None
        if wants_head and fit_head(job.ddp, self._pipeline, self._data.train, job.say):
            self._evaluate(job, "probe")
        history.begun = not job.ddp.stopping
        known = [
            f"{accuracy:.1%} with {head}"
            for kind, head in _BEFORE.items()
            if (accuracy := history.accuracy(kind)) is not None
        ]
        if known:
            job.say(f"held-out accuracy before training: {', '.join(known)}")

    def judge(self, window: int, totals: Sequence[float]) -> str:
        """Keep the adapter if it is the best so far."""
        found = self._evaluation_of(totals)
        is_best = window != self._history.last_window and self._take(window, found)
        return (
            f"held-out accuracy {found.accuracy:.1%}, macro F1 {found.macro_f1:.3f}, "
            f"loss {found.loss:.3f}{' (best)' if is_best else ''}"
        )

    def conclude(self, window: int, totals: Sequence[float]) -> str:
        """Note how good the best adapter is on all held-out samples."""
        found = self._evaluation_of(totals)
        self._history.known["final"] = found
        return (
            f"the best adapter on all {found.total:,} held-out samples: accuracy "
            f"{found.accuracy:.1%}, macro F1 {found.macro_f1:.3f}, loss {found.loss:.3f}"
        )

    @contextmanager
    def showing_result(self) -> Iterator[None]:
        """Give the model the best adapter for the length of a block."""
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._show(self._best or own)
        try:
            yield
        finally:
            self._show(own)

    def _show(self, state: Mapping[str, Tensor]) -> None:
        self.model.load_state_dict(state, strict=False)  # of the base there is nothing

    @property
    def is_done(self) -> bool:
        """Whether patience has run out."""
        patience = self._config.eval.patience
        return bool(patience) and self._history.since_best >= patience

    @property
    def best_loss(self) -> float | None:
        """That of the best adapter, which is what the run leaves."""
        return self._history.result.loss if self._history.result else None

    def _evaluate(self, job: Job, kind: Kind) -> None:
        totals = job.totals()
        if totals is not None:
            found = self._evaluation_of(totals)
            self._history.known[kind] = found
            if kind != "frozen":  # training may do no better than what was there
                self._take(job.ddp.window, found)

    def _evaluation_of(self, totals: Sequence[float]) -> Evaluation:
        (loss, weight, *counts), size = totals, len(self._pipeline.labels)
        rows = (counts[start : start + size] for start in range(0, size * size, size))
        return Evaluation(
            loss=loss / weight if weight else float("nan"),
            confusion=tuple(tuple(int(count) for count in row) for row in rows),
        )

    def _take(self, window: int, evaluation: Evaluation) -> bool:
        """Note an evaluation; keep what is the best so far."""
        is_best = self._history.add(window, evaluation, self._config.eval.metric)
        if is_best:  # on every rank, as any may have to write it
            state = self.model.state_dict()
            self._best = {name: value.detach().cpu().clone() for name, value in state.items()}
        return is_best

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def made_of(self, job: Job) -> Mapping[str, Any]:
        """Return what the adapter would mean nothing without."""
        pipeline, data = self._pipeline, self._data
        return {
            "base model": pipeline.base_fingerprint,
            "classes": list(data.labels.names),
            "data": data.signature,
            "adapter": adapter_settings(pipeline.model.network),
            "tokenizer": fingerprint_of_encoder(pipeline.encoder),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the evaluations and the best adapter."""
        return {"history": self._history.model_dump(), "best": self._best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over evaluations and best adapter."""
        self._history = EvaluationHistory.model_validate(state["history"])
        self._best = dict(state["best"])

    def resumed(self) -> None:
        """Give the optimizer the present hyper-parameters."""
        apply_settings(self.optimizer, self._config.optimizer)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def figures(self, job: Job, *, stopped: bool) -> dict[str, Any]:
        """Return how good the best adapter is, and what to compare it with."""
        data, history, folder = self._data, self._history, job.folder
        best, linear = history.result, None
        if self._config.eval.baseline and not stopped:
            job.say("training a bag-of-words model to compare with ...")
            linear = linear_accuracy(data.train, data.heldout)
        return {
            **{key: getattr(best, key, None) for key in _SCORES},
            "linear_accuracy": linear,
            **{f"{kind}_accuracy": history.accuracy(kind) for kind in _BEFORE},
            "best_step": history.best_window if best else None,
            "early_stopped": self.is_done,
            "confusion": [list(row) for row in best.confusion] if best else None,
            "labels": list(data.labels.names),
            "num_train": len(self._data.train),
            "num_heldout": len(self._data.heldout),
            "num_evaluated": job.num_evaluated,
            "data": data.description,
            "trainable_parameters": sum(
                p.numel() for p in self.model.parameters() if p.requires_grad
            ),
            "adapter": str(folder / "adapter") if best else None,
            "merged": str(folder / "merged") if best else None,
        }

    def write_results(self, job: Job, figures: Mapping[str, Any], *, stopped: bool) -> None:
        """Save the best adapter, alone and merged."""
        if self._history.result is not None:
            self._show(self._best)
            self._pipeline.save(job.folder)

    def in_words(self, figures: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the figures as texts, in the order in which they are compared."""
        counts = f"{figures['num_train']:,} for training, {figures['num_heldout']:,} held out"
        if figures["num_evaluated"] < figures["num_heldout"]:
            counts += f", {figures['num_evaluated']:,} of them evaluated before the end"
        words = {
            "held-out accuracy": _percent(figures["accuracy"]),
            "macro F1": None if figures["macro_f1"] is None else f"{figures['macro_f1']:.3f}",
            "always the most frequent class": _percent(figures["majority_accuracy"]),
            "base with a random head, nothing trained": _percent(figures["frozen_accuracy"]),
            "before training, with the head that was there": _percent(figures["start_accuracy"]),
            "base with a fitted head, without adapter": _percent(figures["probe_accuracy"]),
            "bag-of-words linear model": _percent(figures["linear_accuracy"]),
            "best step": figures["best_step"],
            "samples": counts,
            "data": figures["data"],
        }
        return {name: value for name, value in words.items() if value is not None}

    def result(self, ended: TaskResult) -> ClassifyResult:
        """Return the result of a run."""
        best, folder = self._history.result, ended.run_folder
        return ClassifyResult(
            **asdict(ended),
            adapter=folder / "adapter" if best else None,
            merged=folder / "merged" if best else None,
            labels=self._data.labels.names,
            accuracy=getattr(best, "accuracy", None),
            macro_f1=getattr(best, "macro_f1", None),
        )


def _percent(part: float | None) -> str | None:
    return None if part is None else f"{part:.1%}"
