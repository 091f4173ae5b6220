"""Sequence ranks that split heads of softmax attention, or share them and split queries by their work, have equal work.

What they compute is compared with one process in test_tiled_on_ranks.py.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.softmax import layer
from tost_lm.mixers.softmax.attention import Documents
from tost_lm.mixers.softmax.cache import KeysAndValues
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.mixers.softmax.settings import SoftmaxSettings
from tost_lm.ops.layout import Dealt, SequenceSplit
from tost_lm.ops.positions import SequenceInfo

ROW, CHANNELS = 8192, 2
LOGNORMAL = np.random.default_rng(0).lognormal(6, 1.5, 100).astype(int) + 1
DOCUMENTS = {
    "one": [ROW],
    "half a row": [ROW // 2, *[ROW // 64] * 32],
    "half a row, last": [*[ROW // 64] * 32, ROW // 2],
    "lognormal": np.diff(np.minimum(np.append(0, LOGNORMAL.cumsum()), ROW)).tolist(),
}
"""Tokens of the documents of a row."""


class FakeShard:
    """A shard whose other ranks hold zeros."""

    def __init__(self, split: SequenceSplit):
        self.split = split

    def deal(self, parts: Sequence[Dealt], *xs: Tensor) -> list[Tensor]:
        rank = self.split.rank
        return [
            x.new_zeros(
                1,
                len(range(*part.heads[rank].indices(64))),
                sum(s.stop - s.start for s in part.tokens[rank]),
                x.shape[3],
            )
            for part, x in zip(parts, xs, strict=True)
        ]

    def collect(self, part: Dealt, y: Tensor, heads: int) -> Tensor:
        return y.new_zeros(1, heads, self.split.lengths[self.split.rank], y.shape[3])


@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("ranks", "limit"), [(2, 1.05), (4, 1.05), (8, 1.05), (16, 1.05), (32, 1.15), (64, 1.15)])
@torch.no_grad()
def test_every_rank_has_equal_work(monkeypatch: pytest.MonkeyPatch, ranks: int, limit: float, documents: str):
    """The products of queries with keys, as the attention kernel is called: 16 heads of queries, 4 of keys."""
    pairs = 0

    def count(q: Tensor, kv: KeysAndValues, window: int, of_documents: Documents | None = None) -> Tensor:
        nonlocal pairs
        for queries, keys in zip(*(of_documents or ((q.shape[2],), (kv[0].shape[2],))), strict=True):
            pairs += q.shape[1] * (queries * keys - queries * (queries - 1) // 2)
        return torch.zeros_like(q)

    monkeypatch.setattr(layer, "attend", count)
    shape = MixerShape(16 * CHANNELS, 16, False, 1e-5, False, ROW, SoftmaxSettings(kv_heads=4, rope_theta=0.0))
    mixer, offsets, work = (
        SoftmaxMixer(shape),
        torch.tensor([0, *np.cumsum([n for n in DOCUMENTS[documents] if n])]),
        [],
    )
    for rank in range(ranks):
        pairs, split = 0, SequenceSplit.even(ROW, ranks, rank)
        info = SequenceInfo.of(torch.zeros(1, split.lengths[rank]), None, offsets, FakeShard(split), output_state=False)  # pyright: ignore[reportArgumentType]
        mixer(torch.zeros(1, split.lengths[rank], shape.width), None, info)
        work.append(pairs)
    lengths = offsets.diff().double()
    assert sum(work) == 16 * int((lengths * (lengths + 1) / 2).sum())
    assert max(work) <= limit * sum(work) / ranks
