"""GPT-2's tokenizer on whole books: the ids of another implementation, and the text back byte for byte."""

import gzip
import json

import pytest
from shared_data import GPT2_BPE, SHARED, needs_shared

from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer

BOOKS = sorted((SHARED / "books").glob("*.jsonl.gz"))


@needs_shared
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.name)
def test_books_have_the_ids_of_another_implementation_and_come_back(path):
    tokenizers = pytest.importorskip("tokenizers")
    ours = gpt2_tokenizer(GPT2_BPE)
    other = tokenizers.ByteLevelBPETokenizer(str(GPT2_BPE / "encoder.json"), str(GPT2_BPE / "vocab.bpe"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            ids = ours.encode(row["text"])
            assert ids == other.encode(row["text"]).ids, row["title"]
            assert ours.decode(ids) == row["text"], row["title"]
