"""Collation: from the NumPy arrays of the loader to the micro-batches of a rank."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tost_lm.data.loader import Batch


class MicroBatch(NamedTuple):
    """The inputs of one model call, on the training device; `cu_seqlens` is on the host."""

    tokens: Tensor
    """int64 [B, T], or the sequence shard of this rank."""
    labels: Tensor
    """int64, as tokens."""
    cu_seqlens: Tensor | None = None
    """Offsets of the documents packed into one full row, int32 [documents + 1]; None: each row is a document."""


def micro_batches(batch: Batch, device: torch.device) -> list[MicroBatch]:
    """The micro-batches of a rank's `batch` (NumPy arrays, or tensors from a DataLoader), on `device`."""
    tokens, labels = (torch.as_tensor(x).to(device, non_blocking=True).long() for x in (batch.tokens, batch.labels))
    cuts = _cu_seqlens(torch.as_tensor(batch.document_ends), len(tokens))
    return [MicroBatch(*fields) for fields in zip(tokens, labels, cuts, strict=True)]


def _cu_seqlens(document_ends: Tensor, rows: int) -> list[Tensor] | list[None]:
    if not len(document_ends):
        return [None] * rows
    row_tokens = int(document_ends[-1]) // rows
    offsets = torch.cat([document_ends.new_zeros(1), document_ends])
    edges = torch.searchsorted(offsets, torch.arange(rows + 1) * row_tokens).tolist()
    return [(offsets[start : end + 1] - offsets[start]).int() for start, end in pairwise(edges)]
