"""Groups of chunks of the delta rule: documents advance together, a group at a time that fits a core's cache.

Shapes: M = B·T tokens, h key heads; n documents, c chunks of L tokens, b = n·h.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tost_lm.mixers.delta.settings import (
    CHUNK_TOKENS,
    DEVICE_GROUP_ELEMENTS,
    GROUP_CHUNKS,
    GROUP_ELEMENTS,
    pieces_of_maps,
)
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.precision import statistics_dtype


@dataclass(frozen=True)
class Group:
    """The same chunks of some documents; b = n·h pairs of a document and a key head."""

    rows: tuple[slice, ...]
    """The tokens of each document in the flat sequence, longest documents first, [n]."""
    chunks: int
    chunk_tokens: int

    def split(self, x_Mh: Tensor, out: Tensor | None = None) -> Tensor:
        """[c, b, L, …] in the statistics dtype, contiguous; zeros behind the last token of a document."""
        documents = [x_Mh[row] for row in self.rows]
        x_nmh = documents[0][None] if len(documents) == 1 else pad_sequence(documents, batch_first=True)
        missing = self.chunks * self.chunk_tokens - x_nmh.shape[1]
        x_nmh = pad(x_nmh, (0, 0) * (x_nmh.dim() - 2) + (0, missing)) if missing else x_nmh
        x_cnhL = x_nmh.unflatten(1, (self.chunks, -1)).transpose(0, 1).transpose(2, 3)
        if out is None:
            out = torch.empty(x_cnhL.flatten(1, 2).shape, dtype=statistics_dtype(x_Mh), device=x_Mh.device)
        out.unflatten(1, x_cnhL.shape[1:3]).copy_(x_cnhL)
        return out

    def join(self, x_Mh: Tensor, x_cbL: Tensor) -> None:
        """Write them back into x."""
        x_cnhL = x_cbL.unflatten(1, (len(self.rows), -1))
        for row, x_cLh in zip(self.rows, x_cnhL.transpose(2, 3).unbind(1), strict=True):
            tokens = x_Mh[row]
            if len(tokens) == self.chunks * self.chunk_tokens:
                tokens.unflatten(0, (self.chunks, -1)).copy_(x_cLh)
            else:
                tokens.copy_(x_cLh.flatten(0, 1)[: len(tokens)])


def pieces_of(lengths: Sequence[int], heads: int, device: torch.device) -> int:
    """Pieces of each document, of equal lengths, whose maps are computed at once."""
    return 1 if device.type == "cpu" else pieces_of_maps(lengths[0], len(lengths), heads)


def groups_of_chunks(lengths: Sequence[int], heads: int, device: torch.device) -> list[tuple[Tensor, list[Group]]]:
    """Documents that are computed together, longest first, [n], and the groups of their chunks.

    A group has the first of the documents: those with tokens left.
    """
    elements = GROUP_ELEMENTS if device.type == "cpu" else DEVICE_GROUP_ELEMENTS
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    starts, found = [0, *accumulate(lengths)], []
    while order:
        L = min(CHUNK_TOKENS, 1 << (lengths[order[0]] - 1).bit_length())
        at_once = max(GROUP_CHUNKS, elements // (heads * L * L))
        some = at_once // GROUP_CHUNKS
        documents, order, groups, chunk = order[:some], order[some:], [], 0
        counts = [-(-lengths[n] // L) for n in documents]
        while left := sum(count > chunk for count in counts):
            last = min(counts[left - 1], chunk + at_once // left)
            rows = (slice(starts[n] + chunk * L, min(starts[n] + last * L, starts[n + 1])) for n in documents[:left])
            groups.append(Group(tuple(rows), last - chunk, L))
            chunk = last
        found.append((int64_tensor(tuple(documents), device), groups))
    return found
