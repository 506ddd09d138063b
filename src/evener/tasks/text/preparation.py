"""The text of a language model run: tokenised once a host, the same for every rank."""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evener.checkpoint import find_newest
from evener.config.folders import CHECKPOINTS
from evener.config.pretrain import RunConfig
from evener.tasks.job import Job
from evener.tasks.text.bpe import trained_tokenizer
from evener.tasks.text.corpus import Corpus, open_corpus, prepare_corpus
from evener.tasks.text.documents import DocumentSource, IterableSource
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

    The first rank of each host tokenises, the others wait for it. A rank that joins a team later is
    alone.

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
    if tokenizer is None and team.is_joining:
        checkpoint = find_newest(job.folder / CHECKPOINTS)
    if tokenizer is None and checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint.path)
    # Beside the runs of this machine: the run's own folder is where rank 0 has put it.
    cache = job.options.out.absolute() / ".cache"
    if config.data.cache is not None:
        cache = Path(config.data.cache).expanduser()
    preparation = _Preparation(config, cache, records, job.options.quiet)
    corpus, place = None, {"signature": "", "tokenizer": ""}
    if environment.local_rank == 0 or team.is_joining:
        corpus, tokenizer, place = preparation.run(tokenizer)
    places = team.introduce(place, timeout_s=PREPARE_TIMEOUT_S)
    if corpus is None:
        # The nearest rank before this one that prepares is on this host, as ranks are numbered.
        before = [answer for answer in places[: team.rank] if answer["signature"]] or places
        corpus, tokenizer = preparation.join(tokenizer, before[-1])
    assert tokenizer is not None
    return corpus, tokenizer


@dataclass
class _Preparation:
    """Opens the source, trains a tokenizer if one is wanted, tokenises."""

    config: RunConfig
    cache: Path
    records: Iterable[object] | None
    quiet: bool

    def run(
        self, tokenizer: CausalTokenizer | None
    ) -> tuple[Corpus, CausalTokenizer, dict[str, str]]:
        """Do it all; return also what other ranks of this host need to find it."""
        data, source, trained = self.config.data, self._source(), ""
        if tokenizer is None:
            folder = trained_tokenizer(
                source,
                data.vocab_size,
                self.cache,
                on_error=data.on_error,
                progress=self._progress("training a tokenizer on"),
                on_note=self._note,
            )
            tokenizer, trained = load_tokenizer(folder), str(folder.absolute())
        corpus = prepare_corpus(
            source,
            tokenizer,
            self.cache,
            heldout_fraction=data.heldout_fraction,
            seed=self.config.seed,
            on_error=data.on_error,
            progress=self._progress("preparing"),
            on_note=self._note,
        )
        return corpus, tokenizer, {"signature": corpus.signature, "tokenizer": trained}

    def join(
        self, tokenizer: CausalTokenizer | None, place: dict[str, str]
    ) -> tuple[Corpus, CausalTokenizer]:
        """Open what another rank of this host has made, or make it where that is missing."""
        if tokenizer is None and Path(place["tokenizer"]).is_dir():
            tokenizer = load_tokenizer(place["tokenizer"])
        if tokenizer is not None:
            corpus = open_corpus(
                self.cache,
                place["signature"],
                heldout_fraction=self.config.data.heldout_fraction,
                seed=self.config.seed,
            )
            if corpus is not None:
                return corpus, tokenizer
        self.quiet = True
        return self.run(tokenizer)[:2]

    def _source(self) -> DocumentSource:
        data = self.config.data
        if self.records is not None:
            return IterableSource(self.records, data.text_key, progress=self._progress("reading"))
        exclude = list(data.exclude)
        paths = [Path(p).expanduser() for p in data.paths]
        if not paths:
            root, globs = stdlib_sources()
            paths, exclude = [root], [*exclude, *globs]
        return FileSource(
            paths,
            self.cache,
            suffixes=data.suffixes,
            exclude=exclude,
            text_key=data.text_key,
            progress=self._progress("reading"),
        )

    def _progress(self, deed: str) -> "_ProgressLine":
        return _ProgressLine(deed, quiet=self.quiet)

    def _note(self, text: str) -> None:
        if not self.quiet:
            say(f"note: {text}")


class _ProgressLine:
    """Progress on stderr: at most five times a second on a terminal, else every five seconds."""

    def __init__(self, deed: str, *, quiet: bool) -> None:
        self._deed = deed
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
        say(f"{self._deed} {text}", end="\r" if self._live and not finished else "\n")
