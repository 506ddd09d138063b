"""What evener notes of a saved adapter beyond what peft writes, and whether it fits a base."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener.files import read_json
from evener.parsing import MOST_WHOLE, short
from evener.tasks.classification.samples import LabelSet

#: The file beside an adapter.
DOCUMENT = "classify.json"


@dataclass(frozen=True, slots=True)
class BaseNote:
    """What is known of a base.

    Attributes:
        path: Where it is; empty where it started from random weights.
        fingerprint: Tells it from others.
        dropout: The rates that it was made with, by configuration key.
        new_head: Whether the head started from random weights: neither base nor adapter had one.
    """

    path: str
    fingerprint: str
    dropout: dict[str, float]
    new_head: bool


def read_document(adapter: Path) -> dict[str, Any]:
    """What was noted of an adapter: ``labels``, ``seq_len``, ``end_tokens`` and ``base``.

    Raises:
        ConfigError: It is missing, unreadable, or lacks a key.
    """
    path = adapter / DOCUMENT
    whole = _read_object(
        path,
        absent=f"{adapter} has no {DOCUMENT}; give a folder that a ClassifyPipeline was saved to, "
        "or a run folder of evener classify",
    )
    for key, is_right in _KEYS.items():
        if not is_right(whole.get(key)):
            raise ConfigError(
                f"{path} has {short(whole.get(key))} as its {key!r}, which ClassifyPipeline.save "
                "does not write; save the classifier again, or take an unchanged copy"
            )
    return whole


def check_adapter(
    adapter: Path, base: BaseNote, labels: LabelSet, fingerprint_of: Callable[[str], str]
) -> str | None:
    """Refuses an adapter of another base or for other classes, as far as it says what it is of.

    Args:
        adapter: Its folder.
        base: What it is to be put on.
        labels: The classes of this run.
        fingerprint_of: Of the base in a folder.

    Returns:
        A warning, where it cannot be told whether the base is the right one.

    Raises:
        ConfigError: Names both bases, or both sets of classes; or says why it is no adapter that
            can be gone on with.
    """
    if not (adapter / DOCUMENT).is_file():
        return _check_foreign(adapter, base, fingerprint_of)
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


def _check_foreign(
    adapter: Path, base: BaseNote, fingerprint_of: Callable[[str], str]
) -> str | None:
    """Judges an adapter that peft has saved without evener, by what peft notes of its base."""
    noted = _peft_config(adapter)
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
            is_same = fingerprint_of(str(folder)) == base.fingerprint
        except ConfigError as error:
            raise _other_base(adapter, base, f"{named!r}, which does not load ({error})") from error
        if not is_same:
            raise _other_base(adapter, base, f"{named!r}, whose weights differ")
    elif not base.path:
        raise _other_base(adapter, base, repr(named))
    elif folder is None or folder.name != Path(base.path).name:
        return (
            f"the adapter in {adapter} was trained on {named!r}, which is no folder here: whether "
            f"{base.path!r} holds the same weights cannot be told, and on others it is of no use. "
            "Make sure that it does"
        )
    return None


def _other_base(adapter: Path, base: BaseNote, theirs: str) -> ConfigError:
    ours = repr(base.path) if base.path else "this one, which starts from random weights"
    return ConfigError(
        f"the adapter in {adapter} was trained on another base model than {ours}: on {theirs}. "
        "Give that base, or train an adapter on this one"
    )


def _peft_config(adapter: Path) -> dict[str, Any]:
    return _read_object(
        adapter / "adapter_config.json",
        absent=f"{adapter} holds no adapter (adapter_config.json); give a folder that save or "
        "peft's save_pretrained has written",
    )


def _read_object(path: Path, *, absent: str) -> dict[str, Any]:
    """A JSON object; empty where the file holds something else."""
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ConfigError(absent) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; save the adapter again") from None
    return document if isinstance(document, dict) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_WHOLE


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_base(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("path", "fingerprint")
    )


_KEYS: dict[str, Callable[[object], bool]] = {
    "labels": _are_names,
    "seq_len": _is_number,
    "end_tokens": _is_number,
    "base": _is_base,
}
