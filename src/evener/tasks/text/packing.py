"""Documents packed into samples of equal length, without a wasted token."""

from itertools import pairwise
from typing import Any, Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from evener.errors import ConfigError, DataError
from evener.tasks.lm_batch import IGNORED

_FEW_RUNS: Final = 8
"""Up to so many slices are faster than one gather."""


@final
class PackedDocuments(Dataset[dict[str, torch.Tensor]]):
    """Map-style samples of next-token prediction over documents.

    The documents form one stream. Sample ``i`` reads tokens ``[i*T, i*T + T)`` of it and predicts
    the token after each. What begins a document is never a target, for nothing before it foretells
    it; every other token is a target exactly once. So counted targets vary from sample to sample:
    weigh a loss by them. Attention is not cut at document boundaries. The last sample is filled up
    with ``eos_id``; filler is no target.

    Pickles without its tokens when they are memory-mapped: a worker process maps the file again.

    Args:
        tokens: 1-d unsigned integers, usually a ``numpy.memmap``.
        documents: int64 of shape (documents, 2), each row ``[start, stop)`` in ``tokens``, each
            document with the end-of-text token that closes it, none empty.
        seq_len: Tokens per sample, T.
        eos_id: End-of-text token.
        signature: Identifies content, tokenizer, split and ``seq_len``.

    Raises:
        ConfigError: ``seq_len`` is less than 2.
        DataError: A document is empty or lies outside ``tokens``.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        documents: NDArray[np.int64],
        seq_len: int,
        *,
        eos_id: int,
        signature: str,
    ) -> None:
        if seq_len < 2:
            raise ConfigError(f"seq_len={seq_len}: must be 2 or more, to predict a token from one")
        starts, stops = documents.astype(np.int64).reshape(-1, 2).T
        if documents.size and (starts.min() < 0 or stops.max() > len(tokens)):
            raise DataError(
                f"a document ends at token {stops.max()} of {len(tokens)}: documents and tokens do "
                f"not belong together; prepare the corpus again"
            )
        lengths = stops - starts
        if (lengths < 1).any():
            raise DataError(f"document {int(lengths.argmin())} is empty: leave it out")
        self.seq_len = seq_len
        self.eos_id = eos_id
        self._source = tokens
        self._tokens = np.asarray(tokens)  # a plain view: slicing a memmap costs microseconds
        # Stream position at which each document begins; the last entry is the stream's length.
        self._begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        self._num_positions = int(self._begins[-1])
        self._num_samples = -(-max(0, self._num_positions - 1) // seq_len)
        # Documents that are neighbours in the file as well are one run: one slice reads them.
        # A run's shift, added to a stream position, gives the place in the file.
        shifts = starts - self._begins[:-1]
        is_new = np.ones(len(shifts), np.bool_)
        is_new[1:] = shifts[1:] != shifts[:-1]
        self._run_begins = self._begins[:-1][is_new]
        self._run_shifts = shifts[is_new]
        self.signature = signature

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return len(self._begins) - 1

    @property
    def num_tokens(self) -> int:
        """Counted targets of one epoch: all tokens but the first of each document."""
        return self._num_positions - self.num_documents

    def __len__(self) -> int:
        """Return the number of samples of an epoch; each has at least one target."""
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index``.

        Returns:
            ``input_ids`` and ``labels``, both int64 of shape (T,); ``labels[t]`` is the token after
            ``input_ids[t]``, or -100.
        """
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        length = self.seq_len
        first = index * length
        stop = min(first + length + 1, self._num_positions)
        ids = np.empty(length + 1, np.int64)
        self._read(first, stop, ids)
        labels = ids[1:].copy()
        begin, end = self._begins.searchsorted((first + 1, stop)).tolist()
        if begin < end:
            labels[self._begins[begin:end] - (first + 1)] = IGNORED
        if stop - first <= length:
            ids[stop - first :] = self.eos_id
            labels[stop - first - 1 :] = IGNORED
        return {"input_ids": torch.from_numpy(ids[:length]), "labels": torch.from_numpy(labels)}

    def _read(self, first: int, stop: int, into: NDArray[np.int64]) -> None:
        """Copy the stream's positions ``[first, stop)``."""
        begin, end = self._run_begins.searchsorted((first, stop - 1), "right").tolist()
        shifts = self._run_shifts[begin - 1 : end]
        edges = [first, *self._run_begins[begin:end].tolist(), stop]
        if len(shifts) <= _FEW_RUNS:
            for start, end, shift in zip(edges[:-1], edges[1:], shifts.tolist(), strict=True):
                into[start - first : end - first] = self._tokens[start + shift : end + shift]
        else:
            places = np.arange(first, stop)
            places += shifts.repeat([end - start for start, end in pairwise(edges)])
            into[: stop - first] = self._tokens[places]

    def require_windows(self, batch_size: int) -> None:
        """Check that an epoch fills at least one global batch.

        Args:
            batch_size: Samples of one optimizer step.

        Raises:
            DataError: There are fewer samples; names the counts.
        """
        if len(self) < batch_size:
            raise DataError(
                f"the training data makes {len(self)} samples of {self.seq_len} tokens "
                f"({self.num_tokens} targets), fewer than batch_size={batch_size}: give more text, "
                f"or lower batch_size or seq_len"
            )

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key != "_tokens"}
        if isinstance(self._source, np.memmap):
            source = self._source
            place = (source.filename, source.dtype.str, source.offset, source.shape)
            state["_source"] = place
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        source = state["_source"]
        if isinstance(source, tuple):
            name, dtype, offset, shape = source
            source = np.memmap(name, dtype, "r", offset, shape)
        self.__dict__.update(state, _source=source, _tokens=np.asarray(source))
