"""The text of a language model run: tokenised once per host, the same for every rank."""

from collections.abc import Iterable
from pathlib import Path

from evener.checkpoint import find_newest
from evener.config.folders import CHECKPOINTS
from evener.config.runs import RunConfig
from evener.tasks.job import Job
from evener.tasks.text.bpe import trained_tokenizer
from evener.tasks.text.corpus import CorpusSplits, prepare_corpus
from evener.tasks.text.documents import DocumentSource, FileSource, RecordSource
from evener.tasks.text.tokenizer import CausalTokenizer, load_tokenizer

#: Longest wait of the other ranks for the one that tokenises, which may take long.
PREPARE_TIMEOUT_S = 6 * 3600.0


def prepare_text(
    job: Job,
    config: RunConfig,
    tokenizer: CausalTokenizer | None,
    records: Iterable[object] | None,
) -> tuple[CorpusSplits, CausalTokenizer]:
    """Return the tokenised text and its tokenizer; all ranks call it together.

    The first rank of each host tokenises. The others wait for it, and find the result in the cache.
    A rank that joins a team later is alone.

    Args:
        job: The job.
        config: Names the text, and how it is cut.
        tokenizer: Converts text to ids; ``None`` for that of the checkpoint, or a new one.
        records: Texts, or mappings with the text under ``data.text_key``, instead of files.

    Raises:
        DataError: The text is missing or invalid.
    """
    team, environment = job.team, job.ddp.assembly.environment
    checkpoint = job.resumed
    if tokenizer is None and team.membership.is_joining:
        checkpoint = find_newest(job.folder / CHECKPOINTS)
    if tokenizer is None and checkpoint is not None:
        tokenizer = load_tokenizer(checkpoint.path)
    # Beside the runs of this machine: only rank 0's machine has the run's folder.
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
) -> tuple[CorpusSplits, CausalTokenizer]:
    """Open the source, train a tokenizer if needed, tokenise; or use the cache."""
    data = config.data
    source: DocumentSource
    if records is None:
        source = FileSource(data, quiet=quiet)
    else:
        source = RecordSource(records, data, quiet=quiet)
    if tokenizer is None:
        tokenizer = trained_tokenizer(source, data.vocab_size, cache)
    return prepare_corpus(source, tokenizer, cache, data, seed=config.seed), tokenizer
