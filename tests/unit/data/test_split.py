"""The split: by a hash of the text alone, or the rows that nanoGPT draws."""

import pickle
import sys

import pytest

from tost_lm.data.config import CorpusConfig
from tost_lm.data.split import Splitter
from tost_lm.errors import ConfigError, DataError

TEXTS = [f"document {number}" for number in range(20_000)]


def splitter(rows: int | None = None, **settings) -> Splitter:
    return Splitter(CorpusConfig.model_validate({"source": "embedded", **settings}), rows)


def side(name: str, **settings) -> set[str]:
    split = splitter(**settings)
    return {text for row, text in enumerate(TEXTS) if split.split_of(row, text) == name}


def test_hash_meets_its_shares():
    valid, test, train = (side(name, valid_share=0.05, test_share=0.1) for name in ("valid", "test", "train"))
    assert 0.045 < len(valid) / len(TEXTS) < 0.055
    assert 0.09 < len(test) / len(TEXTS) < 0.11
    assert len(valid) + len(test) + len(train) == len(TEXTS)
    assert side("train", valid_share=0, test_share=0) == set(TEXTS)


def test_shares_that_grow_take_from_training_only():
    valid, test = (side(name, valid_share=0.05, test_share=0.05) for name in ("valid", "test"))
    assert valid < side("valid", valid_share=0.1, test_share=0.3)
    assert test < side("test", valid_share=0.1, test_share=0.3)


def test_hash_goes_by_the_text_alone():
    small, grown = splitter(valid_share=0.5), splitter(rows=10**6, valid_share=0.5)
    for row, text in enumerate(TEXTS[:1000]):
        assert small.split_of(row, text) == grown.split_of(row + 12_345, text)
    # fixed for good: shards of one corpus that were written years apart agree
    assert [small.split_of(0, text) for text in ("", "tost", "😀", "document 3")] == ["valid"] * 4


def owt_rows(count: int) -> set[int]:
    numpy = pytest.importorskip("numpy")
    held_out = -(-count * 5 // 10_000)
    return set(numpy.random.default_rng(2357).permutation(count)[:held_out].tolist())


def test_nanogpt_draws_its_4007_rows_of_openwebtext():
    pytest.importorskip("datasets")
    split = splitter(rows=8_013_769, split="nanogpt")
    expected = owt_rows(8_013_769)
    assert len(expected) == 4007
    assert {split.split_of(row, "") for row in expected} == {"valid"}
    some = range(0, 8_013_769, 20)
    assert {row for row in some if split.split_of(row, "") == "valid"} == expected.intersection(some)


@pytest.mark.parametrize("rows", [2, 3, 1999, 2000, 2001, 100_000])
def test_nanogpt_draws_as_numpy_does(rows, capfd):
    pytest.importorskip("datasets")
    split = splitter(rows=rows, split="nanogpt", valid_share=0.5)
    assert {row for row in range(rows) if split.split_of(row, "x") == "valid"} == owt_rows(rows)
    assert {split.split_of(row, "x") for row in range(rows)} == {"train", "valid"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rows", [0, 1])
def test_nanogpt_of_too_few_rows_is_refused_in_a_line(rows):
    with pytest.raises(ConfigError, match=r"corpus.split nanogpt: .*; use corpus.split=hash"):
        splitter(rows=rows, split="nanogpt")


def test_nanogpt_without_datasets_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(DataError, match=r"^corpus\.split nanogpt: .*: pip install datasets$"):
        splitter(rows=100, split="nanogpt")


@pytest.mark.parametrize(("settings", "rows"), [({}, None), ({"split": "nanogpt"}, 5000)])
def test_a_splitter_travels_to_workers(settings, rows):
    split = splitter(rows, **settings)
    copy = pickle.loads(pickle.dumps(split))
    for row, text in enumerate(TEXTS[:5000]):
        assert copy.split_of(row, text) == split.split_of(row, text)
