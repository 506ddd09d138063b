"""What evener notes of a saved adapter beyond what peft writes, and whether it fits a base."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener.files import read_json
from evener.parsing import Fields
from evener.tasks.classification.base_model import Base, folder_fingerprint
from evener.tasks.classification.samples import LabelSet

#: The file beside an adapter.
DOCUMENT = "classify.json"


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


def check_adapter(adapter: Path, base: Base, labels: LabelSet) -> str | None:
    """Refuse an adapter of another base or for other classes, as far as it says what it is of.

    Args:
        adapter: Its folder.
        base: What it is to be put on.
        labels: The classes of this run.

    Returns:
        A warning, where it cannot be told whether the base is the right one.

    Raises:
        ConfigError: Names both bases, or both sets of classes; or says why it is no adapter that
            can be gone on with.
    """
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
            f"the adapter in {adapter} was trained on {named!r}, which is no folder here: whether "
            f"{base.path!r} holds the same weights cannot be told, and on others it is of no use. "
            "Make sure that it does"
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
