"""The text of a language model run: tokenised once a host, the same for every rank."""

import sys
import time
from collections.abc import Iterable
from pathlib import Path

from evener.checkpoint import find_newest
from evener.config.folders import CHECKPOINTS
from evener.config.runs import RunConfig
from evener.tasks.job import Job
from evener.tasks.text.bpe import trained_tokenizer
from evener.tasks.text.corpus import Corpus, prepare_corpus
from evener.tasks.text.documents import DocumentSource, IterableSource, ignore
from evener.tasks.text.file_source import FileSource
from evener.tasks.text.sources import stdlib_sources
from evener.tasks.text.tokenizer import CausalTokenizer, load_tokenizer
from evener.team.terminal import say

#: Tokenising a large corpus takes long; the other ranks wait this long for the one that does it.
PREPARE_TIMEOUT_S = 6 * 3600.0


def prepare_text(
    job: Job,
    config: RunConfig,
    tokenizer: CausalTokenizer | None,
    records: Iterable[object] | None,
) -> tuple[Corpus, CausalTokenizer]:
    """Return the tokenised text and what made its ids; all ranks call it together.

    The first rank of each host tokenises. The others wait for it, and find the result in the cache.
    A rank that joins a team later is alone.

    Args:
        job: What the text is for.
        config: Says where the text is and how it is cut.
        tokenizer: Turns text into ids; ``None`` takes that of the checkpoint, or trains one.
        records: Texts, or mappings with the text under ``data.text_key``, instead of files.

    Raises:
        DataError: The text is missing or unfit.
    """
    team, environment = job.team, job.ddp.assembly.environment
    checkpoint = job.resumed
    if tokenizer is None and team.membership.is_joining:
        checkpoint = find_newest(job.folder / CHECKPOINTS)
    if tokenizer is None and checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint.path)
    # Beside the runs of this machine: the run's own folder is where rank 0 has put it.
    cache = job.options.out.absolute() / ".cache"
    if config.data.cache is not None:
        cache = Path(config.data.cache).expanduser()
    is_first = environment.local_rank == 0 or team.membership.is_joining
    prepared = None
    if is_first:
        prepared = _prepare(config, cache, tokenizer, records, quiet=job.options.quiet)
    team.introduce(None, timeout_s=PREPARE_TIMEOUT_S)
    return prepared or _prepare(config, cache, tokenizer, records, quiet=True)


def _prepare(
    config: RunConfig,
    cache: Path,
    tokenizer: CausalTokenizer | None,
    records: Iterable[object] | None,
    *,
    quiet: bool,
) -> tuple[Corpus, CausalTokenizer]:
    """Open the source, train a tokenizer if one is wanted, tokenise; or find what has been done."""
    data = config.data
    note = ignore if quiet else _say_note
    source = _open_source(config, records, quiet=quiet)
    if tokenizer is None:
        progress = _ProgressLine("training a tokenizer on", quiet=quiet)
        tokenizer = trained_tokenizer(
            source, data.vocab_size, cache, progress=progress, on_note=note
        )
    corpus = prepare_corpus(
        source,
        tokenizer,
        cache,
        heldout_fraction=data.heldout_fraction,
        seed=config.seed,
        progress=_ProgressLine("preparing", quiet=quiet),
        on_note=note,
    )
    return corpus, tokenizer


def _open_source(
    config: RunConfig, records: Iterable[object] | None, *, quiet: bool
) -> DocumentSource:
    data = config.data
    if records is not None:
        progress = _ProgressLine("reading", quiet=quiet)
        return IterableSource(records, data.text_key, on_error=data.on_error, progress=progress)
    paths, exclude = [Path(path).expanduser() for path in data.paths], list(data.exclude)
    if not paths:
        root, globs = stdlib_sources()
        paths, exclude = [root], [*exclude, *globs]
    return FileSource(
        paths,
        suffixes=data.suffixes,
        exclude=exclude,
        text_key=data.text_key,
        on_error=data.on_error,
    )


def _say_note(text: str) -> None:
    say(f"note: {text}")


class _ProgressLine:
    """Progress on stderr: at most five times a second on a terminal, else every five seconds."""

    def __init__(self, activity: str, *, quiet: bool) -> None:
        self._activity = activity
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._last_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        finished = 0 < total_bytes <= done_bytes
        pause_s = 0.2 if self._live else 5.0
        if self._quiet or (now_s - self._last_s < pause_s and not (finished and self._live)):
            return
        self._last_s = now_s
        if total_bytes:
            text = f"{total_bytes / 1e6:.1f} MB of text: {100 * done_bytes // total_bytes} %"
        else:
            text = f"{done_bytes / 1e6:.1f} MB of text"
        say(f"{self._activity} {text}", end="\r" if self._live and not finished else "\n")
