"""The split: by a hash of the text, or by the rows that nanoGPT draws."""

import pyarrow
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


@pytest.mark.parametrize("rows", [2, 3, 1999, 2000, 2001, 8_013_769])
def test_nanogpt_split_is_that_of_datasets(rows):
    """As nanoGPT draws 4,007 rows of OpenWebText, which has 8,013,769."""
    datasets = pytest.importorskip("datasets")
    numbers = datasets.Dataset(pyarrow.table({"row": range(rows)}), fingerprint=f"rows-{rows}")
    sides = numbers.train_test_split(test_size=0.0005, seed=2357, shuffle=True, keep_in_memory=True)
    split = splitter(rows=rows, split="nanogpt", valid_fraction=0.5)
    assert {row for row in range(rows) if split.split_of(row, "x") == "valid"} == set(sides["test"]["row"])


@pytest.mark.parametrize("rows", [0, 1])
def test_nanogpt_split_of_too_few_rows_is_refused(rows):
    with pytest.raises(ConfigError, match=r"corpus.split nanogpt: too few .*; set corpus.split=hash"):
        splitter(rows=rows, split="nanogpt")
