"""Documents packed into samples of equal length."""

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from evener.errors import DataError
from evener.tasks.lm_batch import IGNORED


@final
class PackedDocuments(Dataset[dict[str, torch.Tensor]]):
    """Map-style samples of next-token prediction over documents.

    The documents form one stream. Sample ``i`` reads tokens ``[i*T, i*T + T)`` of it and predicts
    the token after each. The first token of a document is never a target, since nothing before it
    predicts it; every other token is a target exactly once. So the number of targets differs
    between samples: weigh a loss by it. Attention crosses document boundaries. The last sample is
    padded with ``eos_id``, which is not a target.

    Args:
        tokens: 1-d unsigned integers, usually a ``numpy.memmap``.
        documents: int64 of shape (documents, 2), each row ``[start, stop)`` in ``tokens``, each
            document with the end-of-text token at its end, none empty.
        seq_len: Tokens per sample, T; at least 2.
        eos_id: End-of-text token.
        signature: Identifies content, tokenizer, split and ``seq_len``.
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
        self.seq_len = seq_len
        self.signature = signature
        self._eos_id = eos_id
        self._tokens = tokens
        starts, stops = documents.T
        #: Stream position at which each document begins; the last entry is the stream's length.
        self._begins = np.concatenate([[0], np.cumsum(stops - starts)])
        #: Added to a stream position in a document, it gives the place in ``tokens``.
        self._shifts = starts - self._begins[:-1]

    @property
    def num_documents(self) -> int:
        """The number of documents."""
        return len(self._shifts)

    @property
    def num_tokens(self) -> int:
        """The number of targets of an epoch: all tokens but the first of each document."""
        return int(self._begins[-1]) - self.num_documents

    def __len__(self) -> int:
        """Return the number of samples of an epoch; each has at least one target."""
        return -(-max(0, int(self._begins[-1]) - 1) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return sample ``index``.

        Returns:
            ``input_ids`` and ``labels``, both int64 of shape (T,); ``labels[t]`` is the token after
            ``input_ids[t]``, or -100.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length = self.seq_len
        first = index * length
        positions = np.arange(first, min(first + length + 1, self._begins[-1]))
        documents = self._begins.searchsorted(positions, "right") - 1
        ids = np.full(length + 1, self._eos_id)
        ids[: len(positions)] = self._tokens[positions + self._shifts[documents]]
        labels = np.full(length, IGNORED)
        is_target = documents[1:] == documents[:-1]
        labels[: len(is_target)][is_target] = ids[1 : len(positions)][is_target]
        return {"input_ids": torch.from_numpy(ids[:length]), "labels": torch.from_numpy(labels)}

    def require_windows(self, batch_size: int) -> None:
        """Check that an epoch fills at least one global batch.

        Args:
            batch_size: Samples of one optimizer step.

        Raises:
            DataError: There are fewer samples; names the counts.
        """
        if len(self) < batch_size:
            raise DataError(
                f"the training data has {len(self)} samples of {self.seq_len} tokens "
                f"({self.num_tokens} targets), fewer than batch_size={batch_size}: give more text, "
                f"or lower batch_size or seq_len"
            )
