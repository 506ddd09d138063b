"""Documents on their way into a corpus: where they come from, and records that hold none."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from evener.errors import ConfigError, DataError
from evener.files import blake2b

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""

Note = Callable[[str], None]
"""Told a sentence for a person."""

OnError = Literal["stop", "skip"]
"""What a record without a text is: an error, or left out."""


def ignore(*_: object) -> None:
    """A ``Progress`` or ``Note`` that nobody reads."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a source.

    Attributes:
        label: Unique in the source, the same on every machine; decides whether it is held out.
        text: Its text.
        position: How much of its file, or of its data set, has been read with it, in bytes.
    """

    label: str
    text: str
    position: int

    def hash_label(self, purpose: bytes = b"") -> int:
        """Return a hash of the label, below 2**64; another one for each ``purpose``."""
        label = self.label.encode("utf-8", "surrogateescape")
        hasher = hashlib.blake2b(label, digest_size=8, person=purpose)
        return int.from_bytes(hasher.digest(), "little")


@dataclass(slots=True)
class Rejects:
    """Records that hold no document, such as broken lines.

    Attributes:
        on_error: ``"stop"`` raises at the first one, ``"skip"`` continues.
        count: How many there were.
        first: Place and reason of the first one; empty while there is none.
    """

    on_error: OnError
    count: int = 0
    first: str = ""

    def add(self, place: str, why: str) -> None:
        """Take note of a record.

        Args:
            place: Such as ``web.jsonl:17``.
            why: What is wrong with it.

        Raises:
            DataError: Unless they are to be skipped.
        """
        if self.on_error == "stop":
            raise DataError(
                f"{place}: {why}. Mend it, or leave such records out with data.on_error: skip"
            )
        self.count += 1
        self.first = self.first or f"{place}: {why}"


class DocumentSource(ABC):
    """What a corpus is made of. Its documents are the same in every pass.

    Args:
        on_error: What a record without a text is.

    Attributes:
        name: What messages call it.
        num_bytes: How much is read in one pass.
        identity: JSON that differs wherever documents differ.
    """

    name: str
    num_bytes: int = 0
    identity: list[Any]

    def __init__(self, on_error: OnError) -> None:
        self._on_error: OnError = on_error

    def documents(self, *, note: Note = ignore, progress: Progress = ignore) -> Iterator[Document]:
        """Yield all documents that hold more than white space.

        Args:
            note: Told what was left out.
            progress: Told how much of ``num_bytes`` has been read.

        Raises:
            DataError: The source cannot be read, changes meanwhile, or holds no text.
        """
        rejects, is_empty = Rejects(self._on_error), True
        for document, done in self._read(rejects, note):
            progress(done, self.num_bytes)
            if document.text and not document.text.isspace():
                is_empty = False
                yield document
        progress(self.num_bytes, self.num_bytes)
        left_out = f"{rejects.count} records without a text, the first: {rejects.first}"
        if is_empty:
            why = f" (left out: {left_out})" if rejects.count else ""
            raise DataError(f"{self.name}: there is no text in it{why}. Give some text")
        if rejects.count:
            note(f"left out {left_out}")

    @abstractmethod
    def _read(self, rejects: Rejects, note: Note) -> Iterator[tuple[Document, int]]:
        """Yield documents in their order, and how much of ``num_bytes`` has been read with each."""


def text_of(record: object, text_key: str) -> str:
    """Return the text of a record.

    Args:
        record: A text, or a mapping that holds one.
        text_key: Where in a mapping it is.

    Raises:
        ValueError: Says what is wrong.
    """
    if isinstance(record, Mapping):
        if text_key not in record:
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            raise ValueError(f"no key {text_key!r} (data.text_key); it has {keys}")
        record = record[text_key]
    elif not isinstance(record, str):
        raise ValueError(f"{_kind(record)} and no object with a key {text_key!r}")
    if not isinstance(record, str):
        raise ValueError(f"{text_key!r} is {_kind(record)} and no text")
    try:
        record.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start}") from None
    return record


def _kind(value: object) -> str:
    names = {type(None): "null", list: "a list", dict: "an object", bool: "true or false"}
    return names.get(type(value), f"of type {type(value).__name__}")


@final
class IterableSource(DocumentSource):
    """Documents from anything that can be iterated over again and again.

    Such as a list of texts, or a Hugging Face ``datasets.Dataset``. A first pass, here, hashes
    them: that is how a corpus which has been tokenised before is recognised.

    Args:
        records: Texts, or mappings that hold one.
        text_key: Where in a mapping the text is.
        on_error: What a record without a text is.
        progress: Told of the first pass; the total is not known in it.

    Raises:
        ConfigError: It can be iterated over only once, or not at all.
        DataError: It holds no text, or a record without one.
    """

    def __init__(
        self,
        records: Iterable[object],
        text_key: str,
        *,
        on_error: OnError = "stop",
        progress: Progress = ignore,
    ) -> None:
        super().__init__(on_error)
        given: object = records  # whatever its annotation says
        if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
            raise ConfigError(
                f"the data set is of type {type(records).__name__}; give a list of texts, or an "
                f"iterable of mappings with the text under {text_key!r}, such as a datasets.Dataset"
            )
        if isinstance(records, Iterator):
            raise ConfigError(
                f"the data set is of type {type(records).__name__}, which can be iterated over "
                "only once; give a list, or an object whose __iter__ starts anew"
            )
        self.name = f"the data set ({type(records).__name__})"
        self._records = records
        self._text_key = text_key
        hasher, num_bytes = blake2b(), 0
        for document in self.documents(progress=progress):
            num_bytes = document.position
            hasher.update(f"{document.label} {num_bytes} {document.text}".encode())
        self.num_bytes = num_bytes
        self.identity = ["data set", hasher.hexdigest()]

    def _read(self, rejects: Rejects, note: Note) -> Iterator[tuple[Document, int]]:
        done = 0
        for number, record in enumerate(self._records):
            try:
                text = text_of(record, self._text_key)
            except ValueError as error:
                rejects.add(f"record {number} of {self.name}", str(error))
            else:
                done += len(text.encode())
                yield Document(f"#{number}", text, done), done
