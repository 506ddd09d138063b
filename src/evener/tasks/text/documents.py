"""Documents on their way into a corpus: where they come from, and records that hold none."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from evener.errors import ConfigError, DataError
from evener.files import blake2b

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all)."""

Note = Callable[[str], None]
"""Told a sentence for a person."""

OnError = Literal["stop", "skip"]

_REMEDY: Final = "Mend it, or leave such records out with data.on_error: skip"


def ignore(*_: object) -> None:
    """A ``Progress`` or ``Note`` that nobody reads."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a source.

    Attributes:
        label: Unique in the source, the same on every machine; decides whether it is held out.
        text: Its text.
        text_bytes: Size of the text in UTF-8.
        read_bytes: What was read of the source for it, in bytes.
    """

    label: str
    text: str
    text_bytes: int
    read_bytes: int


@final
class Rejects:
    """Records that hold no document, such as broken lines: an error, or counted.

    Args:
        on_error: ``"stop"`` raises at the first one, ``"skip"`` continues.

    Attributes:
        count: How many there were.
        first: Place and reason of the first one; empty while there is none.
    """

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self.count = 0
        self.first = ""

    def add(self, place: str, why: str) -> None:
        """Take note of a record.

        Args:
            place: Such as ``web.jsonl:17``.
            why: What is wrong with it.

        Raises:
            DataError: Unless they are to be skipped.
        """
        if self._on_error == "stop":
            raise rejected(f"{place}: {why}")
        self.count += 1
        self.first = self.first or f"{place}: {why}"


def rejected(what: str) -> DataError:
    """Return the error about a record that holds no document."""
    return DataError(f"{what}. {_REMEDY}")


class DocumentSource(ABC):
    """What a corpus is made of. Its documents are the same in every pass.

    Attributes:
        name: What messages call it.
        num_bytes: How much is read in one pass.
        identity: JSON that differs wherever documents differ.
    """

    name: str
    num_bytes: int
    identity: list[Any]

    @abstractmethod
    def documents(self, rejects: Rejects, *, note: Note, progress: Progress) -> Iterator[Document]:
        """Yield all documents that hold more than white space.

        Args:
            rejects: Told of records that hold no document.
            note: Told what was left out for another reason.
            progress: Told how much of ``num_bytes`` has been read.

        Raises:
            DataError: The source cannot be read, or has changed since it was opened.
        """


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
        progress: Told of the first pass; the total is not known in it.

    Raises:
        ConfigError: It can be iterated over only once, or not at all.
        DataError: It is empty.
    """

    def __init__(
        self, records: Iterable[object], text_key: str, *, progress: Progress = ignore
    ) -> None:
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
        hasher, num_records, self.num_bytes = blake2b(), 0, 0
        for _, num_bytes, _ in self._read(hasher, None):
            num_records += 1
            self.num_bytes += num_bytes
            progress(self.num_bytes, 0)
        if not num_records:
            raise DataError("the data set is empty: give at least two documents")
        self._hash = hasher.hexdigest()
        # Where the records came from does not matter.
        self.identity = [["records", num_records, self._hash]]

    def documents(self, rejects: Rejects, *, note: Note, progress: Progress) -> Iterator[Document]:
        """Yield the texts in their order; labels are their numbers."""
        hasher, done = blake2b(), 0
        for number, num_bytes, text in self._read(hasher, rejects):
            done += num_bytes
            if text and not text.isspace():
                yield Document(f"#{number}", text, num_bytes, num_bytes)
            progress(done, self.num_bytes)
        if hasher.hexdigest() != self._hash:
            raise DataError(
                f"{self.name} gave other texts when it was iterated over again: give one whose "
                "order and contents stay the same (shuffling is done here, by the seed)"
            )

    def _read(
        self, hasher: "hashlib.blake2b", rejects: Rejects | None
    ) -> Iterator[tuple[int, int, str | None]]:
        """Yield (number, bytes of text, text), without text for a record that has none."""
        for number, record in enumerate(self._records):
            try:
                text: str | None = text_of(record, self._text_key)
            except ValueError as error:
                text = None
                if rejects is not None:
                    rejects.add(f"record {number} of {self.name}", str(error))
            encoded = b"" if text is None else text.encode()
            hasher.update(b"-" if text is None else b"%d " % len(encoded))
            hasher.update(encoded)
            yield number, len(encoded), text
