"""How much of their own document labels see: as counted in the batches that training reads."""

from bisect import bisect_right
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np
import pytest
from hand_made import IGNORED, LENGTHS, batches_of, hand_made

from tost_lm.data.loader import Corpora, context_shares, context_sizes
from tost_lm.data.samples import PackedSamples
from tost_lm.data.stages import Packing


def seen_by_labels(corpora: Corpora, seq_len: int, packing: Packing) -> np.ndarray:
    """Tokens of its own document before each label of an epoch in its sample. Every token of the corpus is another."""
    samples = -(-sum(LENGTHS) // seq_len)
    batches = batches_of(corpora, packing, global_batch_size=samples, micro_batch_size=1, seq_len=seq_len)
    starts = [*accumulate(LENGTHS, initial=1)]
    seen = []
    rows = (x.reshape(-1, seq_len) for x in batches[0][:2])
    for tokens, labels in zip(*rows, strict=True):
        for place, label in enumerate(labels.tolist()):
            if label == IGNORED:
                continue
            own = range(label - 1, starts[bisect_right(starts, label) - 1] - 1, -1)
            inputs = tokens[place::-1].tolist()
            seen.append(sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, inputs, strict=False))))
    return np.array(seen)


def labels_cut_again(seq_len: int) -> int:
    """Labels of the documents that best-fit packing cut because they fit in no gap."""
    samples = PackedSamples([np.array(LENGTHS)], seq_len, 0, 1)
    segments = samples.segments(np.arange(len(samples)))
    ends = np.cumsum(LENGTHS)
    pieces = np.bincount(np.searchsorted(ends, segments.start[segments.start >= 0], "right"))
    return int(np.array(LENGTHS)[pieces > -(-np.array(LENGTHS) // seq_len)].sum())


@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
@pytest.mark.parametrize("seq_len", [2, 7, 20, 64, 333])
def test_shares_are_those_of_the_batches(tmp_path: Path, packing: Packing, seq_len: int):
    corpora = Corpora([hand_made(tmp_path, LENGTHS, shard_tokens=300)], [1.0])
    seen = seen_by_labels(corpora, seq_len, packing)
    assert len(seen) == sum(LENGTHS)
    sizes = sorted({1, seq_len // 4 or 1, seq_len // 2, seq_len})
    slack = labels_cut_again(seq_len) / len(seen) if packing == "best-fit" else 0
    assert slack == 0 or seq_len in (7, 20)
    assert slack < 0.01
    for size, share in zip(sizes, corpora.context_shares(seq_len, packing, sizes), strict=True):
        assert 0 <= share - (seen >= size).mean() + 1e-12 <= slack + 2e-12


def test_a_mixture_has_the_shares_of_its_corpora_by_weight(tmp_path: Path):
    short, long = hand_made(tmp_path / "short", [10] * 40), hand_made(tmp_path / "long", [100] * 8)
    shares = [context_shares(one.lengths("train"), 50, "best-fit", [5, 25]) for one in (short, long)]
    assert shares == [[0.5, 0.0], [0.91, 0.51]]
    mixed = Corpora([short, long], [3, 1]).context_shares(50, "best-fit", [5, 25])
    assert mixed == pytest.approx([0.75 * 0.5 + 0.25 * 0.91, 0.25 * 0.51])


def test_a_split_without_documents_has_no_labels():
    assert context_shares([], 50, "concatenated", [5, 25]) == [0.0, 0.0]


def test_sizes_are_powers_up_to_half_of_a_sample():
    assert [context_sizes(seq_len) for seq_len in (256, 2048, 32_768, 100_000)] == [
        [128], [1024], [1024, 4096, 16_384], [1024, 4096, 16_384, 50_000],
    ]  # fmt: skip
