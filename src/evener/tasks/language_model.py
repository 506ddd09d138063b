"""A causal language model: built or loaded, its loss per token, its held-out loss, its text."""

import contextlib
import difflib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evener.checkpoint import find_newest
from evener.config.folders import CHECKPOINTS
from evener.config.runs import ModelConfig
from evener.devices import float64_device
from evener.errors import ConfigError
from evener.files import explaining, require_regular
from evener.tasks.lm_batch import IGNORED, LMBatch

#: The model of ``type: llama`` without further keys: half a million parameters. At this width it
#: would learn nothing for hundreds of steps with the usual initial range of 0.02.
SMALL_LLAMA: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "initializer_range": 0.05,
}


def build_model(config: ModelConfig, *, vocab_size: int, seq_len: int, eos_id: int) -> nn.Module:
    """Make the model of a configuration, in float32.

    The weights of a model from scratch depend on torch's random generator; the other ranks receive
    rank 0's when the team is set up.

    Args:
        config: A local folder, or a transformers model type with configuration keys.
        vocab_size: Tokens of the tokenizer; also of a model from scratch.
        seq_len: Longest sequence that the model must accept.
        eos_id: The token that ends a document.

    Raises:
        ConfigError: An unknown type, a bad key, a folder without a model, a model too short.
    """
    with quiet():
        from transformers import AutoModelForCausalLM

        if config.path is not None:
            return _load_model(config.path, seq_len)
        _check_type(config.type)
        keys = scratch_keys(config, vocab_size=vocab_size, max_position_embeddings=seq_len)
        with building(config, "causal language model"):
            # Otherwise `check_vocabulary` would warn. As the padding token, the end-of-text token
            # would keep an embedding of zeros in many architectures, and attend to all positions
            # equally, which represents texts far worse (docs/experiments.md).
            if eos_id < keys.get("vocab_size", vocab_size):
                keys = (
                    dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), eos_id) | keys
                )
            built = configure(config, keys)
            check_length(built, seq_len, f"model of model.type {config.type!r} as configured")
            model: nn.Module = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    return model


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of rows of the model's input embedding."""
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]


def mean_loss(model: nn.Module, batch: LMBatch, device: torch.device) -> Tensor:
    """Return the mean cross-entropy per counted token, in nats; ``nan`` if none counts.

    Args:
        model: Takes ``input_ids`` and returns an object with ``logits`` of shape ``(B, T, V)``.
        batch: On any device.
        device: Where the model lives.
    """
    return F.cross_entropy(*_logits_and_labels(model, batch, device), ignore_index=IGNORED)


@torch.no_grad()
def summed_loss(model: nn.Module, batch: LMBatch, device: torch.device) -> float:
    """Return the cross-entropy summed over counted tokens, in float64."""
    logits, labels = _logits_and_labels(model, batch, device)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    wide = losses.to(float64_device(losses.device))
    return float(wide.sum(dtype=torch.float64).item())


def _logits_and_labels(
    model: nn.Module, batch: LMBatch, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return logits of shape ``(B * T, V)``, in float32 or float64, and labels ``(B * T,)``."""
    # Otherwise transformers' models would keep a cache that only generation needs.
    options = {} if getattr(model, "config", None) is None else {"use_cache": False}
    logits = model(input_ids=batch.input_ids.to(device), **options).logits.flatten(0, 1)
    wide = logits if logits.dtype is torch.float64 else logits.float()
    return wide, batch.labels.to(device).flatten()


def write_text(
    model: nn.Module,
    prompt_ids: list[int],
    *,
    num_tokens: int,
    temperature: float,
    seq_len: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Continue a prompt; an end-of-text token does not end the text.

    Args:
        model: A model of transformers, in ``eval()``.
        prompt_ids: At least one token.
        num_tokens: Tokens to write.
        temperature: 0 chooses the likeliest token.
        seq_len: Most previous tokens that the model gets.
        seed: Seed of the sampling; the global generator is not changed.
        device: Where the model lives.

    Returns:
        The tokens after the prompt.
    """
    from transformers import GenerationConfig

    ids, end = list(prompt_ids), len(prompt_ids) + num_tokens
    sampling = {"temperature": temperature, "top_k": 0} if temperature else {}
    # Other devices have one generator, which is not used after a run.
    kept = [device] if device.type in ("cuda", "xpu") else []
    with quiet(), torch.random.fork_rng(kept, device_type=device.type):
        torch.manual_seed(seed)
        while len(ids) < end:
            # Once the text is longer than seq_len, half of that is context.
            context = torch.tensor([ids[-seq_len // 2 :] if len(ids) >= seq_len else ids])
            settings = GenerationConfig(
                max_new_tokens=min(end - len(ids), seq_len - context.shape[1]),
                do_sample=temperature > 0,
                pad_token_id=0,  # not used: there is one text
                **sampling,
            )
            written = model.generate(  # type: ignore[operator]
                context.to(device),
                attention_mask=torch.ones_like(context, device=device),
                generation_config=settings,
            )
            ids += written[0, context.shape[1] :].tolist()
    return ids[len(prompt_ids) :]


def printable(text: str) -> str:
    """Return the text with control characters escaped, since a model may generate them."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def config_json(model: nn.Module) -> bytes:
    """Return the model's ``config.json``, so that a checkpoint loads with ``from_pretrained``."""
    document = model.config.to_dict()  # type: ignore[operator, union-attr]
    document["architectures"] = [type(model).__name__]
    document["dtype"] = "float32"
    return json.dumps(document, indent=2, default=str).encode()


def model_folder(path: str) -> Path:
    """Return the folder of a model: the given one, or a run's newest checkpoint in it.

    Raises:
        ConfigError: Neither has a ``config.json``.
    """
    folder = Path(path).expanduser()
    with explaining(f"model folder {folder}", "give this user access to it", ConfigError):
        newest = None if (folder / "config.json").is_file() else find_newest(folder / CHECKPOINTS)
        found = folder if newest is None else newest.path
        is_there = (found / "config.json").is_file()
    if not is_there:
        raise ConfigError(
            f"model.path is {path!r}, which has no config.json; give a folder written by "
            "save_pretrained, or a checkpoint or run folder of evener"
        )
    return found


def _load_model(path: str, seq_len: int) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with loading(path, "causal language model") as folder:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
    check_length(model.config, seq_len, f"model in {path!r}")
    return model


def check_length(built: Any, seq_len: int, which: str, key: str = "data.seq_len") -> None:
    """Refuse samples that are longer than a model's configuration allows.

    Args:
        built: The configuration.
        seq_len: Tokens of a sample.
        which: The model's name in the message.
        key: The user's key of ``seq_len``.

    Raises:
        ConfigError: Samples are longer.
    """
    longest = getattr(built, "max_position_embeddings", None)
    if longest is not None and longest < seq_len:
        raise ConfigError(
            f"{key} is {seq_len}, the {which} takes at most {longest} tokens; lower {key}"
        )


def _check_type(name: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    lacks = "is not a causal language model" if name in CONFIG_MAPPING_NAMES else "is not known"
    check_type(name, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, f"{lacks} to transformers")


def check_type(name: str, known: Mapping[str, Any], lacks: str) -> None:
    """Refuse a ``model.type`` that is not among those ``known``; ``lacks`` says what it is not.

    Raises:
        ConfigError: Names types with a similar spelling.
    """
    if name not in known:
        close = difflib.get_close_matches(name, known, cutoff=0.5)
        raise ConfigError(
            f"model.type {name!r} {lacks}; give such as "
            f"{', '.join(close or ('llama', 'gpt2', 'qwen3'))}"
        )


def in_short(error: Exception) -> str:
    """Return the message on one line, shortened: those of libraries can be long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"


def scratch_keys(config: ModelConfig, **chosen: Any) -> dict[str, Any]:
    """Return evener's choice of configuration keys, overridden by those of ``model.config``.

    Some types have other names for some keys, such as gpt2's ``n_positions``. If both names were
    passed, the last one would silently count.
    """
    from transformers import CONFIG_MAPPING

    usual = SMALL_LLAMA if config.type == "llama" and not config.config else {}
    own_names = getattr(CONFIG_MAPPING[config.type], "attribute_map", {})
    left = {
        key: value
        for key, value in {**usual, **chosen}.items()
        if own_names.get(key, key) not in config.config
    }
    return left | dict(config.config)


def configure(config: ModelConfig, keys: Mapping[str, Any]) -> Any:
    """Return the transformers configuration of ``model.type`` with ``keys``.

    Raises:
        ConfigError: Names the first key of ``model.config`` that the type does not have.
    """
    from transformers import AutoConfig

    built = AutoConfig.for_model(config.type, **keys)
    known = set(type(built)().to_dict()) | set(built.attribute_map)
    for key, value in config.config.items():
        if key not in known:
            raise ConfigError(
                f"unknown key 'model.config.{key}' (value {value!r}) for model.type "
                f"{config.type!r}; see the keys of transformers' {type(built).__name__}"
            )
    return built


@contextlib.contextmanager
def loading(path: str, what: str) -> Iterator[Path]:
    """Enter with the folder of a model; raise ``ConfigError`` if it cannot be loaded."""
    folder = model_folder(path)
    try:
        require_regular(folder)
        yield folder
    except Exception as error:  # damaged files, other kinds of models: errors have any type
        raise ConfigError(
            f"model.path {path!r} cannot be loaded as a {what}: {in_short(error)}; give a "
            "folder written by save_pretrained or a checkpoint of evener"
        ) from error


@contextlib.contextmanager
def building(config: ModelConfig, what: str) -> Iterator[None]:
    """Raise ``ConfigError`` for any error of an architecture, such as sizes that do not match."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"no {what} can be built from model.type={config.type!r} and "
            f"model.config={dict(config.config)}: {in_short(error)}"
        ) from error


@contextlib.contextmanager
def quiet() -> Any:
    """Silence transformers' progress bars and advice during the block."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
