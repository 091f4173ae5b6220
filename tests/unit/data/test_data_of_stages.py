"""The data of a run of stages: a source goes on where it was, or starts with what was not yet read."""

from pathlib import Path

import numpy as np
import pytest
from hand_made import IGNORED, batches_of, hand_made

from tost_lm.data.loader import Corpora
from tost_lm.data.samples import TokenRanges
from tost_lm.data.stages import Packing, StageRecord, passes, phases, tokens_of
from tost_lm.errors import ConfigError


def stage(
    corpora: Corpora, first_step: int, seq_len: int, batch: int, packing: Packing = "concatenated"
) -> StageRecord:
    return StageRecord(f"from-{first_step}", first_step, corpora.sources, seq_len, packing, batch)


def labels(corpora: Corpora, stages: list[StageRecord], step: int) -> np.ndarray:
    """The labels of a step of the last stage, in the order of the samples."""
    size, last = stages[-1].global_batch_size, stages[-1]
    micro = size if last.packing == "best-fit" else 1
    batches = batches_of(
        corpora, last.packing, global_batch_size=size, micro_batch_size=micro, seq_len=last.seq_len, stages=stages
    )
    found = batches[step].labels.ravel()
    return found[found != IGNORED]


def read(corpora: list[Corpora], stages: list[StageRecord], steps: int) -> list[np.ndarray]:
    """The labels of every step of a run."""
    found = []
    for step in range(steps):
        so_far = [one for one in stages if one.first_step <= step]
        found.append(labels(corpora[len(so_far) - 1], so_far, step))
    return found


def test_ranges_count_the_tokens_within():
    generator = np.random.default_rng(0)
    for _ in range(20):
        start = generator.integers(0, 50, 8)
        end = start + generator.integers(1, 9, 8)
        inside = np.zeros(80, bool)
        for first, last in zip(start, end, strict=True):
            inside[first:last] = True
        a, b = np.sort(generator.integers(0, 80, (2, 30)), axis=0)
        expected = [inside[x:y].sum() for x, y in zip(a, b, strict=True)]
        assert TokenRanges(start, end).within(a, b).tolist() == expected
    none = np.empty(0, np.int64)
    assert TokenRanges(none, none).within(np.arange(3), np.arange(3, 6)).tolist() == [0] * 3


@pytest.mark.quick
def test_stages_with_the_same_samples_read_on(tmp_path: Path):
    """Another batch or rate loses and repeats nothing: the tokens are those of one stage, in the same order."""
    corpora = Corpora([hand_made(tmp_path, [30, 50, 20])], [1.0])
    one = read([corpora], [stage(corpora, 0, 4, 2)], 12)
    several = [stage(corpora, 0, 4, 2), stage(corpora, 3, 4, 4), stage(corpora, 6, 4, 2)]
    assert np.concatenate(read([corpora] * 3, several, 9)).tolist() == np.concatenate(one).tolist()
    assert phases(several, 9) == [(several[0], 24)]
    assert tokens_of(several, 9) == 3 * 8 + 3 * 16 + 3 * 8
    assert passes(several, 9) == {str(tmp_path): pytest.approx(96 / 100)}


@pytest.mark.parametrize("packing", ["concatenated", "best-fit"])
def test_another_length_starts_with_what_was_not_read(tmp_path: Path, packing: Packing):
    corpora = Corpora([hand_made(tmp_path, [16] * 8)], [1.0])
    stages = [stage(corpora, 0, 16, 1, packing), stage(corpora, 3, 32, 1, packing)]
    steps = read([corpora] * 2, stages, 3 + 4)
    before, after = np.concatenate(steps[:3]), steps[3:]
    unread = [len(set(labels.tolist()) - set(before.tolist())) for labels in after]
    assert unread == sorted(unread, reverse=True)
    assert sorted(np.concatenate(after).tolist()) == [*range(1, 129)]  # each token once in a pass
    assert unread[0] == 32


def test_sources_go_on_in_other_mixtures(tmp_path: Path):
    """A source that leaves and comes back, in another order of fingerprints, reads each token once in a pass."""
    a, b, c = (hand_made(tmp_path / name, [40], first=1 + 100 * n) for n, name in enumerate("abc"))
    mixtures = [
        Corpora([a], [1.0]),
        Corpora([a, b], [1.0, 1.0]),
        Corpora([b, c], [2.0, 1.0]),
        Corpora([c, a], [1.0, 1.0]),
    ]
    stages = [stage(corpora, 3 * n, 4, 1) for n, corpora in enumerate(mixtures)]
    tokens = np.concatenate(read(mixtures, stages, 12))
    assert len(set(tokens.tolist())) == len(tokens)
    assert tokens_of(stages, 12) == len(tokens)


def test_the_same_documents_twice_are_refused(tmp_path: Path):
    twice = [hand_made(tmp_path / name, [40]) for name in "ab"]
    with pytest.raises(ConfigError, match="have the same documents; remove one, and give the other the weight of both"):
        Corpora(twice, [1.0, 1.0])
