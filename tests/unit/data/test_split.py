"""The split: by a hash of the text, or by the rows that nanoGPT draws."""

import pytest

from tost_lm.data.settings import CorpusConfig
from tost_lm.data.sources import Splitter
from tost_lm.errors import ConfigError

TEXTS = [f"document {number}" for number in range(20_000)]


def splitter(rows: int | None = None, **settings) -> Splitter:
    return Splitter(CorpusConfig.model_validate({"source": "embedded", **settings}), rows)


def texts_of(name: str, **settings) -> set[str]:
    split = splitter(**settings)
    return {text for row, text in enumerate(TEXTS) if split.split_of(row, text) == name}


def test_hash_split_has_the_requested_fractions():
    valid, test, train = (texts_of(name, valid_fraction=0.05, test_fraction=0.1) for name in ("valid", "test", "train"))
    assert 0.045 < len(valid) / len(TEXTS) < 0.055
    assert 0.09 < len(test) / len(TEXTS) < 0.11
    assert len(valid) + len(test) + len(train) == len(TEXTS)
    assert texts_of("train", valid_fraction=0, test_fraction=0) == set(TEXTS)


def test_hash_split_depends_on_the_text_alone():
    small, grown = splitter(valid_fraction=0.5), splitter(rows=10**6, valid_fraction=0.5)
    for row, text in enumerate(TEXTS[:1000]):
        assert small.split_of(row, text) == grown.split_of(row + 12_345, text)
    # later versions must split a corpus in the same way
    assert [small.split_of(0, text) for text in ("", "tost", "😀", "document 3")] == ["valid"] * 4


def owt_rows(count: int) -> set[int]:
    numpy = pytest.importorskip("numpy")
    held_out = -(-count * 5 // 10_000)
    return set(numpy.random.default_rng(2357).permutation(count)[:held_out].tolist())


def test_nanogpt_split_has_its_4007_rows_of_openwebtext():
    pytest.importorskip("datasets")
    split = splitter(rows=8_013_769, split="nanogpt")
    expected = owt_rows(8_013_769)
    assert len(expected) == 4007
    assert {split.split_of(row, "") for row in expected} == {"valid"}
    some = range(0, 8_013_769, 20)
    assert {row for row in some if split.split_of(row, "") == "valid"} == expected.intersection(some)


@pytest.mark.parametrize("rows", [2, 3, 1999, 2000, 2001, 100_000])
def test_nanogpt_split_is_numpys_permutation(rows, capfd):
    pytest.importorskip("datasets")
    split = splitter(rows=rows, split="nanogpt", valid_fraction=0.5)
    assert {row for row in range(rows) if split.split_of(row, "x") == "valid"} == owt_rows(rows)
    assert {split.split_of(row, "x") for row in range(rows)} == {"train", "valid"}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rows", [0, 1])
def test_nanogpt_split_of_too_few_rows_is_refused(rows):
    with pytest.raises(ConfigError, match=r"corpus.split nanogpt: too few .*; set corpus.split=hash"):
        splitter(rows=rows, split="nanogpt")
