"""The LoRA adapter on a frozen base, by peft: create, load, save alone or merged."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from evener.config.runs import LoraConfig
from evener.devices import copied
from evener.errors import ConfigError
from evener.files import read_file, require_regular
from evener.tasks.classification.base_model import Base
from evener.tasks.language_model import in_short, quiet

#: The configuration of the adapter's base with a head. With the usual name ``config.json``,
#: transformers would treat the folder as that of a whole model.
BASE_CONFIG = "base_config.json"

#: Evener's note beside an adapter; see ``AdapterNote``.
DOCUMENT = "classify.json"


class AdapterNote(BaseModel):
    """The note beside an adapter, ``classify.json``.

    Attributes:
        labels: The classes, in the order of their indices.
        seq_len: Most tokens of a text.
        base_path: Folder of the base.
        base_fingerprint: ``Base.fingerprint``.
    """

    model_config = ConfigDict(frozen=True)

    labels: list[str] = Field(min_length=2)
    seq_len: int = Field(ge=2)
    base_path: str
    base_fingerprint: str

    @classmethod
    def read(cls, adapter: Path) -> "AdapterNote":
        """Return the note beside an adapter.

        Raises:
            ConfigError: It is missing or unreadable.
        """
        try:
            return cls.model_validate_json(read_file(adapter / DOCUMENT))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{adapter / DOCUMENT} cannot be read: {in_short(error)}; give a folder that a "
                "ClassifyPipeline was saved to, or a run folder of evener classify"
            ) from None


@final
class AdapterModel(nn.Module):
    """A classifier whose state consists of adapter and head only.

    The frozen base does not change, so checkpoints need not contain it.

    Args:
        network: A ``PeftModel`` for sequence classification.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return logits ``(B, num_classes)`` of texts; both arguments are ``(B, T)``, int64."""
        logits: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the trainable parameters by name."""
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name in trained}


def add_adapter(base: nn.Module, config: LoraConfig, new_modules: Sequence[str] = ()) -> nn.Module:
    """Add a new adapter to a base and freeze the rest, except for the head.

    Args:
        base: A model for sequence classification.
        config: The adapter.
        new_modules: Other modules with random weights, which are trained and saved like the head.

    Raises:
        ConfigError: ``lora.target_modules`` names layers that the base does not have.
    """
    from peft import LoraConfig as PeftLora
    from peft import TaskType, get_peft_model
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    kind = base.config.model_type  # type: ignore[union-attr]
    settings = PeftLora(
        task_type=TaskType.SEQ_CLS,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules or (None if kind in USUAL else "all-linear"),
        modules_to_save=list(new_modules) or None,
    )
    try:
        with hushed():
            network: nn.Module = get_peft_model(base, settings)
    except ValueError as error:
        raise ConfigError(
            f"no adapter can be added to a {kind} with lora.target_modules="
            f"{config.target_modules}: {in_short(error)}"
        ) from error
    return network


def load_adapter(
    model: nn.Module, folder: Path, wanted: LoraConfig, base: Base, labels: Sequence[str]
) -> tuple[nn.Module, str | None]:
    """Load a saved adapter and its head onto a base, to continue its training.

    Args:
        model: A base for sequence classification.
        folder: The adapter's folder.
        wanted: Settings of the adapter; given ones must be equal to the saved ones.
        base: The facts of the base; the adapter must hold modules that it lacks.
        labels: The classes of this run.

    Returns:
        The base with the adapter, and a warning if the right base cannot be verified.

    Raises:
        ConfigError: The adapter belongs to another base or other classes, does not fit the base,
            lacks modules that the base lacks, or has other settings.
    """
    from peft import PeftModel

    note = AdapterNote.read(folder) if (folder / DOCUMENT).exists() else None
    if note is not None and note.base_fingerprint != base.fingerprint:
        raise ConfigError(
            f"the adapter in {folder} was trained on {note.base_path!r}, whose weights differ from "
            f"those of this base model ({base.path or 'random ones'}); give that base, or train an "
            "adapter on this one"
        )
    if note is not None and note.labels != list(labels):
        raise ConfigError(
            f"the adapter in {folder} is for the classes {', '.join(note.labels)}, this run for "
            f"{', '.join(labels)}; give the same labels in the same order"
        )
    try:
        require_regular(folder)
        with hushed():
            network: Any = PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, local_files_only=True
            )
            made = network.peft_config["default"]
            if made.task_type != "SEQ_CLS":
                raise ValueError(f"it is for {made.task_type}")
            settings = {**adapter_settings(network), "dropout": made.lora_dropout}
    except Exception as error:  # missing layers, other kinds and shapes, damaged files
        raise ConfigError(
            f"the adapter in {folder} does not fit this base model: {in_short(error)}. Give a LoRA "
            "classifier, the base that it was trained on, and as many labels"
        ) from error
    saved = tuple(made.modules_to_save or ())
    if missing := [name for name in base.new_modules if not name.endswith(saved)]:
        raise ConfigError(
            f"the base lacks {missing[0]!r}, and so does the adapter in {folder}: it was trained "
            "with random weights there, which are lost. Train a new adapter, without model.adapter"
        )
    for key, value in wanted.model_dump(include=wanted.model_fields_set).items():
        has = settings[key]
        is_same = set(value) == set(has) if isinstance(value, list) else value in (has, None)
        if not is_same:
            raise ConfigError(
                f"lora.{key} is {value!r}, and the adapter in {folder} was made with {has!r}, "
                f"which it keeps; leave lora.{key} out, or train a new adapter, without "
                "model.adapter"
            )
    if note is None and Path(made.base_model_name_or_path or "").absolute() != Path(base.path):
        return network, (
            f"the adapter in {folder} was trained on {made.base_model_name_or_path!r} and works "
            f"only with those weights. Make sure that {base.path!r} holds them"
        )
    return network, None


def adapter_settings(network: Any) -> dict[str, Any]:
    """Return the settings that, besides its weights, define an adapter; in JSON types."""
    made = network.peft_config["default"]
    return {"rank": made.r, "alpha": made.lora_alpha, "target_modules": sorted(made.target_modules)}


def save_adapter(network: Any, folder: Path, base: Base) -> None:
    """Write adapter and head, and the configuration to load the base with.

    ``PeftModel.from_pretrained`` loads them onto the base.
    """
    network.peft_config["default"].base_model_name_or_path = base.path
    with hushed():
        network.save_pretrained(folder)
        # The classes, and the padding token: decoders look for the last token before it.
        base.config.to_json_file(folder / BASE_CONFIG)
    (folder / "README.md").unlink(missing_ok=True)  # a template for a model hub


def save_whole(network: nn.Module, folder: Path, base: Base, *, merged: bool) -> None:
    """Write the base with the adapter merged into it, or without the adapter.

    ``AutoModelForSequenceClassification.from_pretrained`` loads it.
    """
    with hushed(), torch.no_grad():
        own = copied(network, torch.device("cpu"))
        whole = own.merge_and_unload() if merged else own.unload()
        whole.config = base.config
        whole.save_pretrained(folder)


@contextmanager
def hushed() -> Iterator[None]:
    """Suppress progress bars, advice, and warnings that libraries cause in one another."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
