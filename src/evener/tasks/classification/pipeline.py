"""``ClassifyPipeline``: a text classifier on one device, with its tokenizer and its classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from evener.config.loading import load_config
from evener.config.runs import ClassifyConfig, ClassifyModelConfig
from evener.devices import copied, move
from evener.errors import ConfigError, DataError, EvenerError
from evener.files import new_folder
from evener.loop.arguments import in_evaluation
from evener.tasks.classification.adapter import (
    DOCUMENT,
    AdapterModel,
    AdapterNote,
    add_adapter,
    load_adapter,
    save_adapter,
    save_whole,
)
from evener.tasks.classification.base_model import Base, GivenModel, build_base, model_config_of
from evener.tasks.classification.dropout import own_dropout
from evener.tasks.classification.encoding import load_encoder
from evener.tasks.classification.metrics import Evaluation, count_confusion
from evener.tasks.classification.samples import LabelSet, Pair, Sample, checked_text
from evener.tasks.language_model import model_folder
from evener.team.terminal import warn

Batch = Mapping[str, Tensor]
"""``input_ids`` and ``attention_mask``, ``(B, T)``, and ``labels``, ``(B,)``; int64."""

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
        correct: Scalar, int64: correctly classified samples.
    """

    loss: Tensor
    weight: float
    correct: Tensor


@final
class ClassifyPipeline:
    """A frozen base with adapter and head, its tokenizer and the names of the classes.

    Give ``model`` to ``Ddp.setup`` to train it with a process per device, as ``evener classify``
    does; ``DataParallelCoordinator`` trains several in the threads of one process.

    Attributes:
        model: Maps token ids to logits; only adapter and head are trainable.
        encoder: The tokenizer of transformers; it truncates, ends and pads texts.
        labels: The classes.
        config: Its configuration.
    """

    def __init__(
        self,
        model: AdapterModel,
        encoder: Any,
        config: ClassifyConfig,
        base: Base,
    ) -> None:
        assert config.labels is not None, "build has checked it"
        self.model = model
        self.encoder = encoder
        self.labels = labels = LabelSet(config.labels)
        self.config = config
        self._base = base
        self._class_weights = torch.tensor(labels.weights(config.class_weights, ()))
        self._dropouts = own_dropout(model)

    @classmethod
    def build(
        cls,
        model_config: GivenModel,
        config: ClassifyConfig | Mapping[str, Any],
        *,
        tokenizer: Path | None = None,
        quiet: bool = False,
    ) -> Self:
        """Make a classifier on the CPU, in ``eval()``.

        Args:
            model_config: The base, and perhaps an adapter to continue: a local folder, keys such
                as ``{"type": "bert", "config": {...}}``, or a ``ModelConfig``.
            config: What is trained, and how; or its keys. ``labels`` must be given.
            tokenizer: Folder of the tokenizer; that of the base by default, bytes if the base
                starts from scratch.
            quiet: Do not warn if it cannot be verified that an adapter belongs to this base.

        Raises:
            ConfigError: Base, adapter and tokenizer do not fit one another.
        """
        model_config = model_config_of(model_config)
        if not isinstance(config, ClassifyConfig):
            config = load_config(ClassifyConfig, config)
        labels = config.labels
        if labels is None:
            raise ConfigError("ClassifyConfig.labels is missing; name the classes in order")
        if tokenizer is None and model_config.path:
            tokenizer = model_folder(model_config.path)
        encoder = load_encoder(tokenizer, config.seq_len, config.end_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model, base = build_base(model_config, labels, encoder)
            if adapter := getattr(model_config, "adapter", None):
                given = Path(adapter).expanduser()
                network, doubt = load_adapter(model, given, config.lora, base, labels)
                if doubt and not quiet:
                    warn(doubt)
                base = replace(base, new_head=False)
            else:
                network = add_adapter(model, config.lora, base.new_modules)
        made = AdapterModel(network).eval()
        return cls(made, encoder, config, base)

    @classmethod
    def load(cls, folder: str | Path, base: str | Path | None = None) -> Self:
        """Load what ``save`` has written.

        Args:
            folder: The folder that was given to ``save``.
            base: Folder of the base, if it has moved.

        Raises:
            ConfigError: The folder has no classifier, or the base is another one.
        """
        folder = Path(folder)
        adapter = folder / "adapter"
        note = AdapterNote.read(adapter)
        own_base = folder / "base"
        found = base or (own_base if own_base.is_dir() else note.base_path)
        if not Path(found).exists():
            raise ConfigError(
                f"the base {found} of the classifier in {folder} does not exist; give its folder "
                f"as base, or load {folder / 'merged'} with transformers, which needs no base"
            )
        return cls.build(
            ClassifyModelConfig(path=str(found), adapter=str(adapter)),
            ClassifyConfig(labels=note.labels, seq_len=note.seq_len),
            tokenizer=adapter,
        )

    def replica(self, device: torch.device) -> Self:
        """Return a copy of the classifier on ``device``.

        Frozen parameters are shared if both are on the same device.
        """
        frozen = (p for p in self.model.parameters() if not p.requires_grad)
        shared = {id(p): p for p in frozen if self.device == device}
        return type(self)(copied(self.model, device, shared), self.encoder, self.config, self._base)

    def to(self, device: torch.device) -> None:
        """Move the model; ``Ddp.setup`` does so, too."""
        move(self.model, device)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def base_fingerprint(self) -> str:
        """Identifies the frozen base."""
        return self._base.fingerprint

    @property
    def has_new_head(self) -> bool:
        """Whether the head started from random weights: neither base nor adapter had one."""
        return self._base.new_head

    # ── training ─────────────────────────────────────────────────────────────────────────────

    def pairs(self, samples: Sequence[Sample], where: str = "sample") -> list[Pair]:
        """Return text and class index of each sample.

        Raises:
            DataError: An empty text, or a label that is unknown or out of range; names the sample.
        """
        pairs = []
        for number, sample in enumerate(samples):
            place = f"{where} {number}"
            if not isinstance(sample, Sample):
                raise DataError(f"{place} is a {type(sample).__name__}; give a Sample(text, label)")
            text = checked_text(sample.text, place)
            pairs.append((text, self.labels.index(sample.label, place)))
        return pairs

    def collate(self, pairs: Sequence[Pair]) -> Batch:
        """Return a batch of token ids, as wide as its longest text."""
        texts = [text for text, _ in pairs]
        # Always with the same options: others would change the tokenizer, which threads share.
        made = self.encoder(texts, truncation=True, padding=True, return_tensors="pt")
        labels = torch.tensor([label for _, label in pairs])
        return {**{key: made[key] for key in ("input_ids", "attention_mask")}, "labels": labels}

    def weight_of(self, labels: Sequence[int]) -> float:
        """Return the summed weight of samples of these classes."""
        return float(self._class_weights[list(labels)].double().sum())

    def seed_dropout(self, seed: int) -> None:
        """Draw dropout from a separate generator, which starts at ``seed``.

        Before the first call it is torch's default one, for a single classifier in its process.
        """
        if self._dropouts:
            generator = torch.Generator(self.device).manual_seed(seed)
            for layer in self._dropouts:
                layer.draw_from(generator)

    def loss(self, batch: Batch) -> BatchLoss:
        """Return the loss of a batch, ready for ``ddp.backward(loss.loss, loss.weight)``."""
        logits, labels = self.logits(batch), batch["labels"].to(self.device)
        loss = F.cross_entropy(logits, labels, weight=self._class_weights.to(self.device))
        weight = self.weight_of(batch["labels"].tolist())
        return BatchLoss(loss, weight, (logits.argmax(-1) == labels).sum())

    # ── use ──────────────────────────────────────────────────────────────────────────────────

    def evaluate(self, samples: Sequence[Sample]) -> Evaluation:
        """Classify labelled texts and compare; the loss of none is ``nan``.

        Raises:
            DataError: A sample is invalid.
        """
        pairs = self.pairs(samples)
        return self.compare(pairs, self.judge(pairs))

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """Return the classes of texts, in their order.

        Raises:
            DataError: A text is empty.
        """
        return self.name(self.judge(self.pairs_of(texts)))

    def pairs_of(self, texts: Sequence[str]) -> list[Pair]:
        """Return texts without labels as pairs.

        Raises:
            DataError: A text is empty; names its place.
        """
        if isinstance(texts, str):
            raise DataError(f"texts is the text {texts[:40]!r} itself; give a list of texts")
        return self.pairs([Sample(text, 0) for text in texts], "text")

    def judge(self, pairs: Sequence[Pair]) -> Tensor:
        """Return float32 logits ``(N, num_classes)`` of texts in ``eval()``, on the CPU."""
        found = [torch.zeros(0, len(self.labels))]
        with in_evaluation(self.model):
            for start in range(0, len(pairs), _EVAL_BATCH):
                batch = self.collate(pairs[start : start + _EVAL_BATCH])
                found.append(self.logits(batch).cpu())
        return torch.cat(found)

    def compare(self, pairs: Sequence[Pair], logits: Tensor) -> Evaluation:
        """Return the metrics of samples by their logits of ``judge``."""
        true = torch.tensor([label for _, label in pairs], dtype=torch.long)
        losses = F.cross_entropy(logits, true, self._class_weights, reduction="none").double()
        weights = self._class_weights.double()[true]
        found = logits.argmax(-1)
        return Evaluation(
            loss=float(losses.sum() / weights.sum()),  # 0 / 0 is nan
            confusion=count_confusion(true.tolist(), found.tolist(), len(self.labels)),
        )

    def name(self, logits: Tensor) -> list[Prediction]:
        """Return the classes of logits of ``judge``."""
        rows = torch.softmax(logits, -1).tolist()
        return [
            Prediction(label=self.labels.names[index], index=index, probabilities=tuple(row))
            for index, row in zip(logits.argmax(-1).tolist(), rows, strict=True)
        ]

    def save(self, folder: str | Path) -> None:
        """Write ``adapter/`` and ``merged/`` into a folder, and ``base/`` if it is nowhere else.

        ``PeftModel.from_pretrained`` loads the adapter onto the base,
        ``AutoModelForSequenceClassification.from_pretrained`` the merged weights. Both folders hold
        the configuration of the whole, and a tokenizer that ends, cuts and pads texts as here.

        Raises:
            EvenerError: They cannot be written.
        """
        folder, base = Path(folder).absolute(), self._base
        network = self.model.network
        try:
            if not base.path:
                with new_folder(folder / "base") as fresh:
                    save_whole(network, fresh, base, merged=False)
                    self.encoder.save_pretrained(fresh)
                base = replace(base, path=str(folder / "base"))
            note = AdapterNote(
                labels=list(self.labels.names),
                seq_len=self.encoder.model_max_length,
                base_path=base.path,
                base_fingerprint=base.fingerprint,
            )
            with new_folder(folder / "adapter") as fresh:
                save_adapter(network, fresh, base)
                (fresh / DOCUMENT).write_text(note.model_dump_json(indent=2) + "\n")
                self.encoder.save_pretrained(fresh)
            with new_folder(folder / "merged") as fresh:
                save_whole(network, fresh, base, merged=True)
                self.encoder.save_pretrained(fresh)
        except OSError as error:
            raise EvenerError(
                f"{folder} cannot be written: {error}; free disk space there or choose another "
                "folder"
            ) from error

    def logits(self, batch: Batch) -> Tensor:
        """Return float32 logits ``(B, num_classes)`` on the device."""
        found: Tensor = self.model(
            batch["input_ids"].to(self.device), batch["attention_mask"].to(self.device)
        )
        return found.float()
