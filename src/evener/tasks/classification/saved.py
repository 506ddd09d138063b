"""What evener notes of a saved adapter beyond what peft writes, and whether it fits a base."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener.tasks.classification.samples import LabelSet

#: The file beside an adapter.
DOCUMENT = "classify.json"


@dataclass(frozen=True, slots=True)
class BaseNote:
    """Where a base is, what tells it from others, and the dropout that it was made with."""

    path: str
    fingerprint: str
    dropout: dict[str, float]


def read_document(adapter: Path) -> dict[str, Any]:
    """What was noted of an adapter: ``labels``, ``seq_len``, ``end_tokens`` and ``base``.

    Raises:
        ConfigError: It is missing, unreadable, or lacks a key.
    """
    path = adapter / DOCUMENT
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{adapter} has no {DOCUMENT}; give a folder that a ClassifyPipeline was saved to, or "
            "a run folder of evener classify"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    whole = document if isinstance(document, dict) else {}
    for key, is_right in _KEYS.items():
        if not is_right(whole.get(key)):
            raise ConfigError(
                f"{path} has {whole.get(key)!r} as its {key!r}, which ClassifyPipeline.save does "
                "not write; save the classifier again, or take an unchanged copy"
            )
    return whole


def check_adapter(adapter: Path, base: BaseNote, labels: LabelSet) -> None:
    """Refuses an adapter of another base or for other classes, as far as it says what it is of.

    Raises:
        ConfigError: Names both bases, or both sets of classes.
    """
    if not (adapter / DOCUMENT).is_file():
        return
    document = read_document(adapter)
    theirs = document["base"]
    if theirs["fingerprint"] != base.fingerprint:
        raise ConfigError(
            f"the adapter in {adapter} was trained on another base model than {base.path!r}: on "
            f"{theirs['path']!r}, whose weights differ. Give that base, or train an adapter on "
            "this one"
        )
    if tuple(document["labels"]) != labels.names:
        raise ConfigError(
            f"the adapter in {adapter} tells {', '.join(document['labels'])} apart, this run "
            f"{', '.join(labels.names)}; give the same labels in the same order"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
