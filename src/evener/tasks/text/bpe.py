"""A tokenizer trained on the corpus: byte-level BPE, as GPT-2's, kept in the cache."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from evener.errors import ConfigError, DataError
from evener.files import new_folder
from evener.tasks.text.corpus_cache import digest, is_cached, mark_used, remove_unused
from evener.tasks.text.documents import DocumentSource, Note, OnError, Progress, Rejects, ignore
from evener.tasks.text.tokenizer import CONFIG, CONFIG_FILE, END, TOKENIZER_FILE

EOS_ID: Final = 0
"""Id of ``<|endoftext|>`` in every tokenizer made here."""

SAMPLE_BYTES: Final = 256 * 1024 * 1024
"""Of a larger corpus, documents of about this size are taken, chosen by the hash of their label."""

_FORMAT: Final = 1
"""Raised when the same text would give another tokenizer."""


def trained_tokenizer(
    source: DocumentSource,
    vocab_size: int,
    cache_dir: Path,
    *,
    on_error: OnError,
    progress: Progress = ignore,
    on_note: Note = ignore,
) -> Path:
    """Train a tokenizer on a source once, or find that it has been done.

    Held-out documents take part: which documents these are may change without another tokenizer.

    Args:
        source: Gives the documents.
        vocab_size: Most ids, at least 257 (bytes and end-of-text); short text gives fewer.
        cache_dir: Folder for the result; made if missing.
        on_error: What a record without a text is; see ``prepare_corpus``.
        progress: Told of the reading; the merges are found after it.
        on_note: Told, in a sentence, what was skipped.

    Returns:
        A folder that ``transformers.AutoTokenizer`` loads.

    Raises:
        DataError: The source cannot be read, or the cache cannot be written.
        ConfigError: tokenizers is not installed.
    """
    folder = cache_dir / f"tokenizer-{digest([_FORMAT, vocab_size, source.identity])}"
    if _is_complete(folder):
        mark_used(folder)
        return folder
    documents = source.documents(Rejects(on_error), note=ignore, progress=progress)
    backend = _train(_sample(documents, source.num_bytes), vocab_size)
    on_note(f"trained a tokenizer of {backend.get_vocab_size()} ids on {source.name}")
    try:
        remove_unused(cache_dir, ("tokenizer-*",), on_note)
        with new_folder(folder) as fresh:
            (fresh / TOKENIZER_FILE).write_text(backend.to_str(pretty=True), encoding="utf-8")
            (fresh / CONFIG_FILE).write_text(json.dumps(CONFIG, indent=1) + "\n")
    except OSError as error:
        if _is_complete(folder):
            return folder  # by another process, meanwhile
        raise DataError(
            f"the tokenizer cannot be written to {cache_dir}: {error.strerror}. Name another cache "
            "folder, or make room there"
        ) from error
    return folder


def _sample(documents: Iterator[Any], num_bytes: int) -> Iterator[str]:
    threshold = 2**64 if num_bytes <= SAMPLE_BYTES else 2**64 * SAMPLE_BYTES // num_bytes
    for document in documents:
        label = document.label.encode("utf-8", "surrogateescape")
        hashed = hashlib.blake2b(label, digest_size=8, person=b"bpe").digest()
        if int.from_bytes(hashed, "little") < threshold:
            yield document.text


def _train(texts: Iterator[str], vocab_size: int) -> Any:
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data.tokenizer: bpe needs {error.name}: pip install 'evener[hf]', or leave the key "
            "out for the byte-level tokenizer"
        ) from None
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend


def _is_complete(folder: Path) -> bool:
    return is_cached(folder) and all((folder / f).is_file() for f in (CONFIG_FILE, TOKENIZER_FILE))
