"""The LoRA adapter on a frozen base: made, loaded, saved alone and merged into the base."""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from evener.config.classify import LoraConfig
from evener.devices import copied
from evener.errors import ConfigError
from evener.files import require_regular
from evener.tasks.classification.base_model import Base
from evener.tasks.language_model import in_short, quiet

_DECODER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

#: Linear layers that an adapter usually sits on, by model type. Others get all linear layers.
TARGETS: Mapping[str, list[str]] = {
    **dict.fromkeys(
        ("gemma", "gemma2", "llama", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "smollm3"),
        _DECODER,
    ),
    **{
        key: ["query", "key", "value"]
        for key in ("albert", "bert", "camembert", "electra", "roberta", "xlm-roberta")
    },
    "distilbert": ["q_lin", "k_lin", "v_lin", "out_lin"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
}

#: Beside the adapter, the configuration of its base with a head. Under the usual name
#: ``config.json``, transformers would take the folder for that of a whole model.
BASE_CONFIG = "base_config.json"


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
        """Logits ``(B, num_classes)`` of texts; both arguments are ``(B, T)``, int64."""
        logits: Tensor = self.network(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The trainable parameters by name."""
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if name in trained}


def add_adapter(base: nn.Module, config: LoraConfig, new_modules: Sequence[str] = ()) -> nn.Module:
    """Puts a new adapter on a base and freezes the rest, but for the head.

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
    base: nn.Module, folder: Path, wanted: LoraConfig, new_modules: Sequence[str] = ()
) -> nn.Module:
    """Puts a saved adapter and its head on a base, to go on training it.

    Args:
        base: A model for sequence classification.
        folder: Where the adapter is.
        wanted: What of it was given must be what it was made with.
        new_modules: What the base lacks, so that the adapter must hold it.

    Raises:
        ConfigError: It does not fit this base, lacks what the base lacks, or was made otherwise.
    """
    from peft import PeftModel

    try:
        require_regular(folder)
        with hushed():
            network: nn.Module = PeftModel.from_pretrained(
                base,
                str(folder),
                is_trainable=True,
                local_files_only=True,
            )
    except Exception as error:  # missing layers, other shapes, damaged files
        raise ConfigError(
            f"the adapter in {folder} does not fit this base model: {in_short(error)}. Give the "
            "base that it was trained on, and as many labels"
        ) from error
    saved = tuple(_config_of(network).modules_to_save or ())
    if missing := [name for name in new_modules if not name.endswith(saved)]:
        raise ConfigError(
            f"the base lacks {missing[0]!r}, and so does the adapter in {folder}: it was trained "
            "with random weights there, which are lost. Train an adapter anew, without "
            "model.adapter"
        )
    _refuse_others(network, folder, wanted)
    return network


def _refuse_others(network: nn.Module, folder: Path, wanted: LoraConfig) -> None:
    """An adapter keeps what it was made with: other settings would do nothing."""
    config = _config_of(network)
    made: dict[str, Any] = {"rank": config.r, "alpha": config.lora_alpha}
    made["dropout"] = config.lora_dropout
    sits_on = {
        name.removesuffix(".lora_A")
        for name, _ in network.named_modules()
        if name.endswith(".lora_A")
    }
    for key in sorted(wanted.model_fields_set):
        value = getattr(wanted, key)
        if key == "target_modules":
            made[key] = sorted({name.rpartition(".")[2] for name in sits_on})
            ends = tuple(f".{name}" for name in value or ())
            same = value is None or all(name.endswith(ends) for name in sits_on)
            same = same and all(any(name.endswith(e) for name in sits_on) for e in ends)
        else:
            same = value == made[key]
        if not same:
            raise ConfigError(
                f"lora.{key} is {value!r}, and the adapter in {folder} was made with "
                f"{made[key]!r}, which it keeps; leave lora.{key} out, or train a new adapter, "
                "without model.adapter"
            )


def _config_of(network: nn.Module) -> Any:
    return network.peft_config["default"]  # type: ignore[index]


def adapter_settings(network: nn.Module) -> dict[str, Any]:
    """What decides, beside its weights, what an adapter does; as plain JSON types."""
    config = _config_of(network)
    targets = config.target_modules  # a pattern, or names
    return {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "target_modules": targets if isinstance(targets, str) else sorted(targets),
    }


def save_adapter(network: nn.Module, folder: Path, base: Base) -> None:
    """Write adapter and head, and the configuration to load the base with.

    ``PeftModel.from_pretrained`` loads them onto the base.
    """
    _config_of(network).base_model_name_or_path = base.path
    with hushed():
        network.save_pretrained(folder)  # type: ignore[operator]
        # The classes, and what pads: decoders look for the last token before that.
        config = copy.deepcopy(network.get_base_model().config)  # type: ignore[operator]
        _restore_dropout(config, base)
        config.to_json_file(folder / BASE_CONFIG)
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in, for a hub


def save_whole(network: nn.Module, folder: Path, base: Base, *, merged: bool) -> None:
    """Write the base with the adapter merged into it, or as it was before the adapter.

    ``AutoModelForSequenceClassification.from_pretrained`` loads it.
    """
    with hushed(), torch.no_grad():
        own = copied(network, torch.device("cpu"))
        whole = own.merge_and_unload() if merged else own.unload()
        _restore_dropout(whole.config, base)
        whole.save_pretrained(folder)


def _restore_dropout(config: Any, base: Base) -> None:
    for key, rate in base.dropout.items():
        setattr(config, key, rate)


@contextmanager
def hushed() -> Iterator[None]:
    """Without progress bars, advice, and warnings that libraries cause in one another."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
