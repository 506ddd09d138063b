"""A batch of a causal language model: tokens, and the token that follows each of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from evener.errors import DataError
from evener.parsing import short

IGNORED: Final = -100
"""Label of a position without a target; PyTorch's losses ignore it by default."""

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@final
@dataclass(frozen=True, slots=True, eq=False)
class LMBatch:
    """Tokens and their targets.

    Attributes:
        input_ids: int64 of shape ``(B, T)``; B sequences of T tokens.
        labels: int64 of shape ``(B, T)``: the token after each, or -100 without a target, as for
            padding. They are not shifted again.

    Raises:
        DataError: Shapes or dtypes do not fit.
    """

    input_ids: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        for name in ("input_ids", "labels"):
            tensor = getattr(self, name)
            is_fit = isinstance(tensor, Tensor) and tensor.dtype == torch.int64
            if not is_fit or tensor.dim() != 2 or not tensor.numel():
                raise DataError(
                    f"LMBatch.{name} is {short(tensor)}; give an int64 tensor of shape (sequences, "
                    "tokens), or use LMBatch.of_documents for lists of tokens"
                )
        if self.input_ids.shape != self.labels.shape:
            raise DataError(
                f"LMBatch.input_ids has shape {tuple(self.input_ids.shape)} and labels "
                f"{tuple(self.labels.shape)}; every token has one target, -100 for none"
            )

    @classmethod
    def of_documents(cls, documents: Sequence[Sequence[int]], *, pad_id: int = 0) -> Self:
        """Make a batch with one sequence per document; each token predicts the next one.

        Args:
            documents: Token ids of each; two or more.
            pad_id: Pads short documents on the right; it is never a target.

        Raises:
            DataError: Documents are missing, or one has fewer than two tokens, or values that are
                not whole numbers.
        """
        if not documents:
            raise DataError("LMBatch.of_documents was given no document; give at least one")
        rows = [_tokens(number, document) for number, document in enumerate(documents)]
        return cls(
            pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=pad_id),
            pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED),
        )

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences, B."""
        return int(self.input_ids.shape[0])

    @property
    def num_tokens(self) -> int:
        """Return the number of targets: the weight of the batch's mean loss."""
        return int((self.labels != IGNORED).sum().item())


def _tokens(number: int, document: object) -> Tensor:
    """Return the token ids of a document, int64 of shape ``(tokens,)``."""
    try:
        tokens = torch.as_tensor(document)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.empty(())
    is_whole = tokens.dtype in _WHOLE and tokens.dim() == 1
    if not is_whole or len(tokens) < 2:
        raise DataError(
            f"document {number} is {short(document)}; give its token ids: a list of two or more "
            "whole numbers, as each is predicted from those before it"
        )
    return tokens.to(torch.int64)
