"""Files as the source of a corpus."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from evener.tasks.text.documents import Document, DocumentSource, Note, OnError, Rejects
from evener.tasks.text.readers import find_nul, holds_records, read_records, read_text
from evener.tasks.text.sources import find_files


@final
class FileSource(DocumentSource):
    """Text files, JSON Lines and parquet; see ``readers``.

    A file is known by its path, its size and the time at which it was modified. A binary file is
    left out if every file of a folder was asked for (suffix ``""``), and else an error.

    Args:
        paths: Files and folders; ``find_files`` says which files of a folder are taken.
        suffixes: File endings to take from folders; None is ``DEFAULT_SUFFIXES``.
        exclude: Globs of what to leave out, see ``find_files``.
        text_key: Key or column of the text in files of records.
        on_error: What a line or row without a text is.

    Raises:
        DataError: A path is missing or unreadable, or nothing matches.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        suffixes: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        text_key: str = "text",
        on_error: OnError = "stop",
    ) -> None:
        super().__init__(on_error)
        self._files = files = find_files(paths, suffixes, exclude)
        self._text_key = text_key
        self._skips_binary = suffixes is not None and "" in suffixes
        others = len(files) - 1
        more = f" and {others} other file{'s' if others > 1 else ''}" if others else ""
        self.name = f"{files[0].path}{more}"
        self.num_bytes = sum(file.size for file in files)
        self.identity = [[f.label, str(f.path.absolute()), f.size, f.mtime_ns] for f in files]
        if any(map(holds_records, files)):
            self.identity += [text_key, on_error]

    def _read(self, rejects: Rejects, note: Note) -> Iterator[tuple[Document, int]]:
        before = 0
        binary = []
        for file in self._files:
            if holds_records(file):
                documents = read_records(file, self._text_key, rejects)
            elif self._skips_binary and not file.named and find_nul(file) >= 0:
                documents = iter(())
                binary.append(file.label)
            else:
                documents = read_text(file, alone=len(self._files) == 1)
            for document in documents:
                yield document, before + document.position
            before += file.size
        if binary:
            note(f"left out because binary: {len(binary)} files, {', '.join(binary[:3])}")
