"""The text of a language model run: tokenised once a host, the same for every rank."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from evener.data.corpus import Corpus, CorpusSplits, prepare_corpus
from evener.data.sources import stdlib_sources
from evener.errors import DataError
from evener.run.config import RunConfig
from evener.run.team import Team
from evener.run.terminal import say
from evener.tasks.tokenizer import CausalTokenizer

#: Tokenising a large corpus takes long; the other ranks wait this long for the one that does it.
PREPARE_TIMEOUT_S = 6 * 3600.0


def prepare_text(
    team: Team,
    config: RunConfig,
    tokenizer: CausalTokenizer,
    *,
    cache: Path,
    prepares: bool,
    quiet: bool,
) -> CorpusSplits:
    """Opens training and held-out text; all ranks call it together.

    Args:
        team: The ranks.
        config: Says where the text is and how it is cut.
        tokenizer: Turns text into ids.
        cache: Folder of tokenised text where the configuration names none.
        prepares: Whether this rank tokenises for its host; the others wait for it.
        quiet: Show no progress.

    Raises:
        DataError: The text is missing, unfit, too short, or not the same on all ranks.
    """
    corpus = _open(config, tokenizer, cache, quiet=quiet) if prepares else None
    team.introduce({}, timeout_s=PREPARE_TIMEOUT_S)
    splits = (corpus or _open(config, tokenizer, cache, quiet=True)).split(config.data.seq_len)
    answers = team.introduce({"data": splits.train.signature})
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise DataError(
                f"rank {rank} sees other training data than rank 0 (signatures "
                f"{answer['data'][:12]} and {answers[0]['data'][:12]}); give every machine the "
                "same files and tokenizer"
            )
    splits.train.require_windows(config.batch_size)
    return splits


def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stacks samples: each entry gets a leading batch dimension."""
    return {key: torch.stack([s[key] for s in samples]) for key in samples[0]}


def _open(config: RunConfig, tokenizer: CausalTokenizer, cache: Path, *, quiet: bool) -> Corpus:
    data = config.data
    exclude = list(data.exclude)
    sources = [Path(p).expanduser() for p in data.paths]
    if not sources:
        root, globs = stdlib_sources()
        sources, exclude = [root], [*exclude, *globs]
    return prepare_corpus(
        sources,
        tokenizer,
        Path(data.cache).expanduser() if data.cache else cache,
        suffixes=data.suffixes,
        exclude=exclude,
        heldout_fraction=data.heldout_fraction,
        seed=config.seed,
        progress=None if quiet else _ProgressLine(),
        on_note=None if quiet else _note,
    )


class _ProgressLine:
    """Progress on stderr: at most five times a second on a terminal, else every five seconds."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last_s = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        finished = done_bytes >= total_bytes
        if now_s - self._last_s < (0.2 if self._live else 5.0) and not (finished and self._live):
            return
        self._last_s = now_s
        percent = 100 * done_bytes // max(1, total_bytes)
        end = "\r" if self._live and not finished else "\n"
        say(f"preparing {total_bytes / 1e6:.1f} MB of text: {percent} %", end=end)


def _note(text: str) -> None:
    say(f"note: {text}")
