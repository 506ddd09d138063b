"""The LoRA adapter on a frozen base: made, loaded if it fits, saved alone and merged."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from evener.config.runs import LoraConfig
from evener.devices import copied
from evener.errors import ConfigError
from evener.files import read_json, require_regular
from evener.parsing import Fields
from evener.tasks.classification.base_model import Base, folder_fingerprint
from evener.tasks.classification.samples import LabelSet
from evener.tasks.language_model import in_short, quiet

#: Linear layers that an adapter usually sits on, by model type; in others it sits on all of them.
TARGETS: Mapping[str, list[str]] = {
    kind: ["query", "key", "value"]
    for kind in ("albert", "bert", "camembert", "electra", "roberta", "xlm-roberta")
} | {"distilbert": ["q_lin", "k_lin", "v_lin", "out_lin"]}

#: Beside the adapter, the configuration of its base with a head. Under the usual name
#: ``config.json``, transformers would take the folder for that of a whole model.
BASE_CONFIG = "base_config.json"

#: What evener notes of an adapter beyond what peft writes.
DOCUMENT = "classify.json"


@final
class AdapterModel(nn.Module):
    """A classifier whose state is what is trained: adapter and head.

    The frozen base is the same before and after; checkpoints need not hold it.

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
    """Put a new adapter on a base and freeze the rest, but for the head.

    Args:
        base: A model for sequence classification.
        config: The adapter.
        new_modules: What else starts from random weights: it is trained and saved as the head is.

    Raises:
        ConfigError: ``lora.target_modules`` names layers that the base does not have.
    """
    from peft import LoraConfig as PeftLora
    from peft import TaskType, get_peft_model
    from transformers.pytorch_utils import Conv1D

    kind = base.config.model_type  # type: ignore[union-attr]
    targets: Any = config.target_modules or TARGETS.get(str(kind), "all-linear")
    try:
        with hushed():
            network: nn.Module = get_peft_model(
                base,
                PeftLora(
                    task_type=TaskType.SEQ_CLS,
                    r=config.rank,
                    lora_alpha=config.alpha,
                    lora_dropout=config.dropout,
                    target_modules=targets,
                    modules_to_save=list(new_modules) or None,
                ),
            )
    except ValueError as error:
        backbone: nn.Module = base.base_model  # type: ignore[assignment]
        linear = {
            name.rpartition(".")[2]
            for name, module in backbone.named_modules()
            if isinstance(module, nn.Linear | Conv1D)  # GPT-2 has the latter only
        }
        raise ConfigError(
            f"no adapter can be put on a {kind} with lora.target_modules={targets}: "
            f"{in_short(error)}. Its linear layers are {', '.join(sorted(linear))}"
        ) from error
    return network


def load_adapter(
    model: nn.Module, folder: Path, wanted: LoraConfig, base: Base, labels: LabelSet
) -> tuple[nn.Module, str | None]:
    """Put a saved adapter and its head on a base, to continue its training.

    Args:
        model: A base for sequence classification.
        folder: Where the adapter is.
        wanted: What of it was given must be what it was made with.
        base: What is known of the base; what it lacks, the adapter must hold.
        labels: The classes of this run.

    Returns:
        The base with the adapter, and a warning where it cannot be told whether it is the right
        base.

    Raises:
        ConfigError: It is of another base or for other classes, as far as it says so; it does not
            fit the base, lacks what the base lacks, or was made otherwise.
    """
    from peft import PeftModel

    doubt = _check(folder, base, labels)
    try:
        require_regular(folder)
        with hushed():
            network: nn.Module = PeftModel.from_pretrained(
                model, str(folder), is_trainable=True, local_files_only=True
            )
    except Exception as error:  # missing layers, other shapes, damaged files
        raise ConfigError(
            f"the adapter in {folder} does not fit this base model: {in_short(error)}. Give the "
            "base that it was trained on, and as many labels"
        ) from error
    saved = tuple(_config_of(network).modules_to_save or ())
    if missing := [name for name in base.new_modules if not name.endswith(saved)]:
        raise ConfigError(
            f"the base lacks {missing[0]!r}, and so does the adapter in {folder}: it was trained "
            "with random weights there, which are lost. Train an adapter anew, without "
            "model.adapter"
        )
    _refuse_others(network, folder, wanted)
    return network, doubt


def _refuse_others(network: nn.Module, folder: Path, wanted: LoraConfig) -> None:
    """An adapter keeps what it was made with: other settings would do nothing."""
    made = {**adapter_settings(network), "dropout": _config_of(network).lora_dropout}
    layers = _adapted(network)
    given = wanted.model_dump(include=wanted.model_fields_set, exclude_none=True)
    for key, value in sorted(given.items()):
        same = value == made[key]
        if key == "target_modules":
            fitting = [{end for end in value if name.endswith(f".{end}")} for name in layers]
            same = all(fitting) and set().union(*fitting) == set(value)
        if not same:
            raise ConfigError(
                f"lora.{key} is {value!r}, and the adapter in {folder} was made with "
                f"{made[key]!r}, which it keeps; leave lora.{key} out, or train a new adapter, "
                "without model.adapter"
            )


def read_document(adapter: Path) -> dict[str, Any]:
    """Return what was noted of an adapter: ``labels``, ``seq_len``, ``end_tokens`` and ``base``.

    Raises:
        ConfigError: It is missing, unreadable, or lacks a key.
    """
    path = adapter / DOCUMENT
    absent = (
        f"{adapter} has no {DOCUMENT}; give a folder that a ClassifyPipeline was saved to, "
        "or a run folder of evener classify"
    )
    with _reading(path, absent):
        document = Fields(read_json(path))
        document.texts("labels")
        document.whole("seq_len")
        document.whole("end_tokens")
        base = document.fields("base")
        base.text("path")
        base.text("fingerprint")
    return document.values


def _check(adapter: Path, base: Base, labels: LabelSet) -> str | None:
    """Refuse an adapter of another base or for other classes; return a warning in doubt."""
    if not (adapter / DOCUMENT).is_file():
        return _check_foreign(adapter, base)
    document = read_document(adapter)
    theirs = document["base"]
    if theirs["fingerprint"] != base.fingerprint:
        raise _other_base(adapter, base, f"{theirs['path']!r}, whose weights differ")
    if tuple(document["labels"]) != labels.names:
        raise ConfigError(
            f"the adapter in {adapter} tells {', '.join(document['labels'])} apart, this run "
            f"{', '.join(labels.names)}; give the same labels in the same order"
        )
    return None


def _check_foreign(adapter: Path, base: Base) -> str | None:
    """Judge an adapter that peft has saved without evener, by what peft notes of its base."""
    path = adapter / "adapter_config.json"
    absent = (
        f"{adapter} holds no adapter ({path.name}); give a folder that save or "
        "peft's save_pretrained has written"
    )
    with _reading(path, absent):
        noted = Fields(read_json(path)).values
    kind, task, named = (
        noted.get(key) for key in ("peft_type", "task_type", "base_model_name_or_path")
    )
    if kind != "LORA" or task != "SEQ_CLS":
        raise ConfigError(
            f"the adapter in {adapter} is of kind {kind} for {task}; give a LORA adapter for "
            "SEQ_CLS (a classifier), or leave model.adapter out to train a new one"
        )
    folder = Path(named).expanduser() if isinstance(named, str) and named else None
    if folder is not None and folder.is_dir():
        try:
            is_same = folder_fingerprint(str(folder)) == base.fingerprint
        except ConfigError as error:
            raise _other_base(adapter, base, f"{named!r}, which does not load ({error})") from error
        if not is_same:
            raise _other_base(adapter, base, f"{named!r}, whose weights differ")
    elif not base.path:
        raise _other_base(adapter, base, repr(named))
    elif folder is None or folder.name != Path(base.path).name:
        return (
            f"the adapter in {adapter} was trained on {named!r}, which is not a folder here: "
            f"whether {base.path!r} holds the same weights cannot be told, and on others it is of "
            "no use. Make sure that it does"
        )
    return None


def _other_base(adapter: Path, base: Base, theirs: str) -> ConfigError:
    ours = repr(base.path) if base.path else "this one, which starts from random weights"
    return ConfigError(
        f"the adapter in {adapter} was trained on another base model than {ours}: on {theirs}. "
        "Give that base, or train an adapter on this one"
    )


@contextmanager
def _reading(path: Path, absent: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(absent) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; save the adapter again, or take an unchanged copy"
        ) from None


def _config_of(network: nn.Module) -> Any:
    return network.peft_config["default"]  # type: ignore[index]


def _adapted(network: nn.Module) -> list[str]:
    """Return the names of the layers that the adapter sits on."""
    mark = ".lora_A"
    return [n.removesuffix(mark) for n, _ in network.named_modules() if n.endswith(mark)]


def adapter_settings(network: nn.Module) -> dict[str, Any]:
    """Return what decides, beside its weights, what an adapter does; as plain JSON types."""
    config = _config_of(network)
    targets = sorted({name.rpartition(".")[2] for name in _adapted(network)})
    return {"rank": config.r, "alpha": config.lora_alpha, "target_modules": targets}


def save_adapter(network: nn.Module, folder: Path, base: Base) -> None:
    """Write adapter and head, and the configuration to load the base with.

    ``PeftModel.from_pretrained`` loads them onto the base.
    """
    _config_of(network).base_model_name_or_path = base.path
    with hushed():
        network.save_pretrained(folder)  # type: ignore[operator]
        # The classes, and what pads: decoders look for the last token before that.
        base.config.to_json_file(folder / BASE_CONFIG)
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, for a hub


def save_whole(network: nn.Module, folder: Path, base: Base, *, merged: bool) -> None:
    """Write the base with the adapter merged into it, or as it was before the adapter.

    ``AutoModelForSequenceClassification.from_pretrained`` loads it.
    """
    with hushed(), torch.no_grad():
        own = copied(network, torch.device("cpu"))
        whole = own.merge_and_unload() if merged else own.unload()
        whole.config = base.config
        whole.save_pretrained(folder)


@contextmanager
def hushed() -> Iterator[None]:
    """Without progress bars, advice, and warnings that libraries cause in one another."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
