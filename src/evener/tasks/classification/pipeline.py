"""``ClassifyPipeline``: a text classifier on one device, with its tokenizer and its classes."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.config.classify import ClassifyConfig, ClassifyModelConfig
from evener.devices import copied, move
from evener.errors import ConfigError, DataError
from evener.tasks.classification.adapter import (
    AdapterModel,
    add_adapter,
    load_adapter,
    replacing,
    save_adapter,
    save_base,
    save_merged,
    write_json,
)
from evener.tasks.classification.base_model import base_folder, build_base, folder_fingerprint
from evener.tasks.classification.dropout import Draws, own_dropout
from evener.tasks.classification.encoding import Batch, Encoded, TextEncoder
from evener.tasks.classification.given import (
    GivenModel,
    classify_config_of,
    labels_of,
    model_config_of,
)
from evener.tasks.classification.metrics import Evaluation, count_confusion
from evener.tasks.classification.samples import LabelSet, Sample, bad_character
from evener.tasks.classification.saved import DOCUMENT, BaseNote, check_adapter, read_document
from evener.team.terminal import warn

_EVAL_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The class of a text.

    Attributes:
        label: Its name.
        index: Its index.
        probabilities: By class.
    """

    label: str
    index: int
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """The loss of a batch.

    Attributes:
        loss: Scalar; the mean over ``weight``.
        weight: Σ of the class weights of its samples; their number without class weights.
        correct: Scalar, int64: samples whose class was found.
    """

    loss: Tensor
    weight: float
    correct: Tensor


@final
class ClassifyPipeline:
    """A frozen base with adapter and head, the tokenizer before them and the classes behind.

    Give ``model`` to ``Ddp.setup`` to train it with a process per device, as ``evener classify``
    does; ``DataParallelCoordinator`` trains several in the threads of one process.

    Attributes:
        model: Takes token ids and gives logits; only adapter and head are trainable.
        encoder: The tokenizer.
        labels: The classes.
        config: What it was made with.
        draws: Source of its dropout.
    """

    def __init__(
        self,
        model: AdapterModel,
        encoder: TextEncoder,
        labels: LabelSet,
        config: ClassifyConfig,
        *,
        base: BaseNote,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.labels = labels
        self.config = config
        self.draws = Draws()
        self._base = base
        self._class_weights = None if class_weights is None else tuple(class_weights)
        self._weight_tensor: Tensor | None = None
        own_dropout(model, self.draws)

    @classmethod
    def build(
        cls,
        model_config: GivenModel,
        config: ClassifyConfig | Mapping[str, Any],
        labels: LabelSet | None = None,
        *,
        tokenizer: Path | None = None,
        class_weights: Sequence[float] | None = None,
        quiet: bool = False,
    ) -> Self:
        """Makes a classifier on the CPU, in ``eval()``.

        Args:
            model_config: The base, and perhaps an adapter to go on with: a local folder, keys such
                as ``{"type": "bert", "config": {...}}``, or a ``ModelConfig``.
            config: What is trained, and how; or its keys.
            labels: The classes; those of ``config`` by default.
            tokenizer: Folder of the tokenizer; that of the base by default, bytes where the base
                starts from scratch.
            class_weights: A weight for each class; those of ``config`` by default.
            quiet: Does not say where it cannot be told whether an adapter is one of this base.

        Raises:
            ConfigError: Base, adapter and tokenizer do not fit one another.
        """
        model_config, config = model_config_of(model_config), classify_config_of(config)
        labels = labels or labels_of(config)
        if class_weights is None:
            class_weights = labels.weights(config.class_weights, ())
        folder = base_folder(model_config.path) if model_config.path else None
        encoder = TextEncoder.load(tokenizer or folder, config.seq_len, config.end_tokens)
        adapter = getattr(model_config, "adapter", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            base = build_base(model_config, labels.names, encoder)
            note = BaseNote(
                path=str(folder.absolute()) if folder else "",
                fingerprint=base.fingerprint,
                dropout=base.dropout,
                new_head=base.new_head and adapter is None,
            )
            if adapter is None:
                network = add_adapter(base.model, config.lora, base.new_modules)
            else:
                given = Path(adapter).expanduser()
                doubt = check_adapter(given, note, labels, folder_fingerprint)
                if doubt and not quiet:
                    warn(doubt)
                network = load_adapter(base.model, given, config.lora, base.new_modules)
        made = AdapterModel(network).eval()
        return cls(made, encoder, labels, config, base=note, class_weights=class_weights)

    @classmethod
    def load(cls, folder: str | Path, base: str | Path | None = None) -> Self:
        """Loads what ``save`` has written.

        Args:
            folder: The one that was saved to.
            base: Folder of the base, where it has moved.

        Raises:
            ConfigError: There is none, or the base is another one.
        """
        folder = Path(folder)
        adapter = folder / "adapter"
        document = read_document(adapter)
        own_base = folder / "base"
        path = str(base or (own_base if own_base.is_dir() else document["base"]["path"]))
        if base is None and not Path(path).is_dir():
            raise ConfigError(
                f"the base of the classifier in {folder} is {path!r}, which is not there any more; "
                "put it back, give ClassifyPipeline.load its folder as base, or load "
                f"{folder / 'merged'} with transformers: that needs no base"
            )
        return cls.build(
            ClassifyModelConfig(path=path, adapter=str(adapter)),
            ClassifyConfig(
                seq_len=int(document["seq_len"]), end_tokens=int(document["end_tokens"])
            ),
            LabelSet(document["labels"]),
            tokenizer=adapter,
        )

    def replica(self, device: torch.device) -> Self:
        """A classifier of its own on ``device``, with the same values.

        What is frozen is shared with this one where both live on the same device.
        """
        shared = self.device == device
        memo: dict[int, Any] = {id(self.draws): Draws()}
        if shared:
            memo |= {id(p): p for p in self.model.parameters() if not p.requires_grad}
        other = type(self)(
            copied(self.model, device, memo),
            self.encoder,
            self.labels,
            self.config,
            base=self._base,
            class_weights=self._class_weights,
        )
        other.to(device)
        return other

    def to(self, device: torch.device) -> None:
        """Moves the model; ``Ddp.setup`` does so, too."""
        move(self.model, device)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @property
    def base_fingerprint(self) -> str:
        """Tells the frozen base from others."""
        return self._base.fingerprint

    @property
    def has_new_head(self) -> bool:
        """Whether the head started from random weights: neither base nor adapter had one."""
        return self._base.new_head

    # ── training ─────────────────────────────────────────────────────────────────────────────

    def encode(self, samples: Sequence[Sample], where: str = "sample") -> list[Encoded]:
        """Token ids and class index of each sample.

        Raises:
            DataError: An empty text, or a label that is unknown or out of range; names the sample.
        """
        encoded = []
        for number, sample in enumerate(samples):
            place = f"{where} {number}"
            if not isinstance(sample, Sample):
                raise DataError(f"{place} is a {type(sample).__name__}; give a Sample(text, label)")
            if not isinstance(sample.text, str):
                raise DataError(f"{place} has {sample.text!r} as its text; give it a text")
            if not sample.text.strip():
                raise DataError(f"{place} has an empty text; give it a text, or leave it out")
            if bad := bad_character(sample.text):
                raise DataError(
                    f"{place} holds {bad}, which is no character; decode its text with the right "
                    "encoding, or with errors='replace'"
                )
            index = self.labels.index(sample.label, place)
            encoded.append((self.encoder.encode(sample.text), index))
        return encoded

    def weight_of(self, labels: Sequence[int]) -> float:
        """What samples of these classes weigh together."""
        if self._class_weights is None:
            return float(len(labels))
        total = 0.0
        for label in labels:
            total += self._class_weights[label]
        return total

    def loss(self, batch: Batch) -> BatchLoss:
        """The loss of a batch, ready for ``ddp.backward(loss.loss, loss.weight)``."""
        logits = self.logits(batch)
        labels = batch.labels.to(self.device)
        losses = F.cross_entropy(logits, labels, reduction="none")
        weight = self.weight_of(batch.labels.tolist())
        if self._class_weights is None:
            loss = losses.mean()
        else:
            if self._weight_tensor is None or self._weight_tensor.device != labels.device:
                self._weight_tensor = torch.tensor(self._class_weights, device=labels.device)
            loss = (losses * self._weight_tensor[labels]).sum() / weight
        return BatchLoss(loss, weight, (logits.argmax(-1) == labels).sum())

    # ── use ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def evaluate_encoded(self, encoded: Sequence[Encoded]) -> tuple[float, float, Any]:
        """Σ weight · loss, Σ weight and the confusion of encoded samples, in ``eval()``."""
        loss_sum, weight_sum = 0.0, 0.0
        true: list[int] = []
        found: list[int] = []
        with self.evaluating():
            for start in range(0, len(encoded), _EVAL_BATCH):
                batch = self.encoder.collate(encoded[start : start + _EVAL_BATCH])
                logits = self.logits(batch)
                labels = batch.labels.tolist()
                losses = F.cross_entropy(logits.cpu(), batch.labels, reduction="none")
                for label, loss in zip(labels, losses.tolist(), strict=True):
                    weight = self.weight_of([label])
                    loss_sum += weight * loss
                    weight_sum += weight
                true += labels
                found += logits.argmax(-1).tolist()
        return loss_sum, weight_sum, count_confusion(true, found, len(self.labels))

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Classifies labelled texts and compares; the loss of none is ``nan``.

        Raises:
            DataError: One is bad.
        """
        loss_sum, weight, confusion = self.evaluate_encoded(self.encode(samples))
        return Evaluation(loss=loss_sum / weight if weight else float("nan"), confusion=confusion)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """The classes of texts, in their order.

        Raises:
            DataError: A text is empty.
        """
        return self.predict_encoded(self.encode_texts(texts))

    def encode_texts(self, texts: Sequence[str]) -> list[Encoded]:
        """Token ids of texts without labels.

        Raises:
            DataError: A text is empty; names it by its place.
        """
        if isinstance(texts, str):
            raise DataError(f"texts is the text {texts[:40]!r} itself; give a list of texts")
        return self.encode([Sample(text, 0) for text in texts], "text")

    @torch.no_grad()
    def predict_encoded(self, encoded: Sequence[Encoded]) -> list[Prediction]:
        """The classes of encoded texts, in their order."""
        predictions = []
        with self.evaluating():
            for start in range(0, len(encoded), _EVAL_BATCH):
                batch = self.encoder.collate(encoded[start : start + _EVAL_BATCH])
                for row in torch.softmax(self.logits(batch), -1).tolist():
                    index = max(range(len(row)), key=row.__getitem__)
                    predictions.append(
                        Prediction(
                            label=self.labels.names[index], index=index, probabilities=tuple(row)
                        )
                    )
        return predictions

    def save(self, folder: str | Path) -> None:
        """Writes ``adapter/`` and ``merged/`` into a folder, and ``base/`` if it is nowhere else.

        ``PeftModel.from_pretrained`` loads the adapter onto the base,
        ``AutoModelForSequenceClassification.from_pretrained`` the merged weights. Both folders hold
        the configuration of the whole, and a tokenizer that ends, cuts and pads texts as here.

        Raises:
            EvenerError: They cannot be written.
        """
        folder = Path(folder).absolute()
        note = self._base
        if not note.path:
            with replacing(folder / "base") as fresh:
                save_base(self.model.network, fresh, note.dropout)
                _write_files(fresh, self.encoder.files)
            note = replace(note, path=str(folder / "base"))
        with replacing(folder / "adapter") as fresh:
            save_adapter(self.model.network, fresh, note.path, note.dropout)
            write_json(fresh / DOCUMENT, self._document(note))
            _write_files(fresh, self.encoder.finished_files())
        with replacing(folder / "merged") as fresh:
            save_merged(self.model.network, fresh, note.dropout)
            _write_files(fresh, self.encoder.finished_files())

    def _document(self, note: BaseNote) -> dict[str, Any]:
        return {
            "labels": list(self.labels.names),
            "seq_len": self.encoder.seq_len,
            "end_tokens": self.config.end_tokens,
            "base": {"path": note.path, "fingerprint": note.fingerprint},
        }

    def logits(self, batch: Batch) -> Tensor:
        """Float32 logits ``(B, num_classes)`` on the device."""
        found: Tensor = self.model(
            batch.input_ids.to(self.device), batch.attention_mask.to(self.device)
        )
        return found.float()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the model into ``eval()`` for the length of the block."""
        was_training = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was_training)


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
