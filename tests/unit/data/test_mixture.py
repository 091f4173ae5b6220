"""Mixtures: exact fractions in every cycle, separate epochs for each corpus, one tokenizer."""

from pathlib import Path

import numpy as np
import pytest
from hand_made import hand_made

from tost_lm.data.loader import CYCLE, Corpora, Mixture
from tost_lm.errors import ConfigError, DataError

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.3, 0.2], [0.7, 0.29995, 0.00005 + 1e-9], [1 / 3] * 3])
def test_every_cycle_has_the_fractions_and_each_corpus_is_numbered(weights: list[float]):
    mixture = Mixture(weights, 5)
    corpus_N, number_N = mixture.locate(np.arange(3 * CYCLE))
    for cycle in np.split(corpus_N, 3):
        assert np.abs(np.bincount(cycle, minlength=len(weights)) - CYCLE * np.array(weights)).max() < 1
    for corpus in range(len(weights)):
        assert np.array_equal(number_N[corpus_N == corpus], np.arange((corpus_N == corpus).sum()))


def test_corpora_are_shuffled():
    corpus_N, _ = Mixture([0.6, 0.4], 5).locate(np.arange(CYCLE))
    means = corpus_N.reshape(20, -1).mean(1)
    assert means.std() == pytest.approx((0.24 / (CYCLE / 20)) ** 0.5, rel=0.5)


def test_a_sample_does_not_depend_on_other_samples():
    whole = Mixture([0.6, 0.4], 5).locate(np.arange(2 * CYCLE + 100))
    mixture = Mixture([0.6, 0.4], 5)
    for chosen in (np.arange(9_990, 10_010), np.array([20_050, 3])):
        for x, found in zip(whole, mixture.locate(chosen), strict=True):
            assert np.array_equal(x[chosen], found)
    other, _ = Mixture([0.6, 0.4], 6).locate(np.arange(2 * CYCLE))
    assert not np.array_equal(other[:CYCLE], whole[0][:CYCLE])
    assert not np.array_equal(other[:CYCLE], other[CYCLE:])


def test_the_order_is_pinned():
    # Later versions must resume runs of earlier ones, so these numbers must not change.
    corpus_N, number_N = Mixture([0.5, 0.3, 0.2], 1234).locate(np.arange(10_005, 10_015))
    assert corpus_N.tolist() == [1, 0, 1, 0, 1, 0, 0, 0, 0, 0]
    assert number_N.tolist() == [3002, 5001, 3003, 5002, 3004, 5003, 5004, 5005, 5006, 5007]


def test_a_mixture_does_not_depend_on_paths_and_their_order(tmp_path: Path):
    one, other = hand_made(tmp_path / "b", [5, 7]), hand_made(tmp_path / "a", [3, 4])
    mixed = Corpora([one, other], [3, 1])
    again = Corpora([other, one], [0.25, 0.75])
    assert [x.folder for x in mixed.shards] == [x.folder for x in again.shards]
    assert mixed.weights == again.weights
    assert mixed.fingerprint == again.fingerprint
    assert len({mixed.fingerprint, Corpora([one, other], [1, 1]).fingerprint, one.fingerprint}) == 3
    assert Corpora([one], [7]).fingerprint == one.fingerprint


def test_other_tokenizers_and_tiny_weights_are_refused(tmp_path: Path):
    one, other = hand_made(tmp_path / "a", [5]), hand_made(tmp_path / "b", [5], tokenizer="other")
    with pytest.raises(DataError, match=rf"^{tmp_path}/a and {tmp_path}/b: tokens of different tokenizers") as refused:
        Corpora([one, other], [1, 1])
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=rf"^data\.mixture: {tmp_path}/a has less than one sample in 10,000; remove"):
        Corpora([one, hand_made(tmp_path / "c", [9])], [1e-5, 1])
