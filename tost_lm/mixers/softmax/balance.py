"""Which heads and queries of a row each sequence rank attends with, so that all have equal work.

Ranks hold contiguous shards of a sequence, but the last token attends to all others and the first to none. So ranks
exchange tokens for heads (as in Ulysses, arXiv 2309.14509): a rank has some heads of all tokens. With more ranks than
heads to split, several ranks have the same heads and share the queries of a row, in blocks that are dealt by their
work: the tokens that a query attends to, which the documents and their earlier tokens decide.

Shapes: H heads of queries, G heads of keys and values, T tokens of a row, R ranks.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from tost_lm.mixers.softmax.settings import head_groups
from tost_lm.ops.layout import Dealt, LocalDocuments, SequenceSplit
from tost_lm.ops.positions import SequenceInfo

BLOCKS = 16
"""Blocks of queries of each rank that shares heads with others."""

Attend = Callable[[Tensor, Tensor, SequenceInfo], Tensor]
"""Of q [B, h, t, D], and keys and values of all tokens up to the last query, [B, g, S, E] side by side: y."""


def attend_balanced(
    attend: Attend, q_BHTD: Tensor, kv_BGTE: Tensor, info: SequenceInfo
) -> tuple[Tensor, Tensor, SequenceInfo]:
    """Attention of all ranks' tokens, each rank with its heads and queries.

    Args:
        attend: called for each block of queries of this rank, with `info` as if it held their tokens only.

    Returns:
        y [B, H, T, D] of this rank's tokens; the keys and values of this rank's heads, of all tokens of the rows; and
        `info` of all tokens.
    """
    assert info.shard is not None
    split, H, G = info.shard.split, q_BHTD.shape[1], kv_BGTE.shape[1]
    documents = info.local.whole_lengths if info.local.packed else (split.tokens,)
    queries, keys = _dealt(H, G, len(split.lengths), documents, info.start_positions)
    q, kv = info.shard.deal([queries, keys], q_BHTD, kv_BGTE)
    blocks = queries.tokens[split.rank]
    infos = [_info_of(info, split, len(q), block) for block in blocks]
    of_blocks = q.split([block.stop - block.start for block in blocks], 2)
    ys = [
        attend(q, kv[:, :, : block.stop], of_block) for q, block, of_block in zip(of_blocks, blocks, infos, strict=True)
    ]
    y_BHTD = info.shard.collect(queries, torch.cat(ys, 2) if len(ys) > 1 else ys[0], H)
    return y_BHTD, kv, _info_of(info, split, len(q), slice(0, split.tokens), info.output_state)


def _info_of(
    info: SequenceInfo, split: SequenceSplit, rows: int, block: slice, output_state: bool | Literal["last"] = False
) -> SequenceInfo:
    """As if a rank held the tokens of a block."""
    split = SequenceSplit((block.start, block.stop - block.start, split.tokens - block.stop), 1)
    local = LocalDocuments.of(info.cu_seqlens, rows, block.stop - block.start, split)
    return replace(info, shard=None, local=local, output_state=output_state)


@lru_cache(maxsize=32)
def _dealt(
    heads: int, kv_heads: int, ranks: int, documents: tuple[int, ...], before: tuple[int, ...]
) -> tuple[Dealt, Dealt]:
    """Queries, and keys and values, of each rank. Ranks with the same heads are neighbours."""
    groups = head_groups(heads, kv_heads, ranks)
    sharing = ranks // groups
    blocks = _blocks(sharing, documents, before)
    numbers = [divmod(rank, sharing) for rank in range(ranks)]
    width, kv_width = heads // groups, max(1, kv_heads // groups)
    of_keys = [slice(start := g * kv_heads // groups, start + kv_width) for g, _ in numbers]
    of_queries = tuple(slice(g * width, (g + 1) * width) for g, _ in numbers)
    queries = Dealt(of_queries, tuple(blocks[p] for _, p in numbers))
    return queries, Dealt(tuple(of_keys), ((slice(0, sum(documents)),),) * ranks)


def _blocks(ranks: int, documents: tuple[int, ...], before: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Blocks of a row by rank: the one with the most work goes to the rank with the least."""
    tokens = sum(documents)
    if ranks == 1:
        return [(slice(0, tokens),)]
    starts = [0, *accumulate(documents)]
    work_at_starts = [0, *accumulate(map(_pairs, before, documents))]

    def work_before(token: int) -> int:
        """Of the queries before `token`: pairs with keys."""
        n = min(bisect_right(starts, token), len(documents)) - 1
        return work_at_starts[n] + _pairs(before[n], token - starts[n])

    count = min(tokens, BLOCKS * ranks)
    edges = [tokens * i // count for i in range(count + 1)]
    work = [last - first for first, last in pairwise(map(work_before, edges))]
    loads: list[tuple[int, int, list[int]]] = [(0, rank, []) for rank in range(ranks)]
    for block in sorted(range(count), key=lambda block: -work[block]):
        load, rank, own = loads[0]
        heapq.heapreplace(loads, (load + work[block], rank, [*own, block]))
    by_rank = sorted(loads, key=lambda of_rank: of_rank[1])
    return [tuple(slice(edges[i], edges[i + 1]) for i in sorted(own)) for _, _, own in by_rank]


def _pairs(before: int, tokens: int) -> int:
    """Queries and the keys up to them, of so many tokens after others of their document."""
    return tokens * before + tokens * (tokens + 1) // 2
