"""GPT-2's tokenizer on whole books: the ids of another implementation, and the text back byte for byte."""

import gzip
import json
from pathlib import Path

import pytest

from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer

SHARED = Path(__file__).parents[2] / "../shared/data"
FILES = SHARED / "gpt2_bpe"
BOOKS = sorted((SHARED / "books").glob("*.jsonl.gz"))


@pytest.mark.skipif(
    not BOOKS or not FILES.is_dir(), reason="the books, or GPT-2's encoder.json and vocab.bpe, are not here"
)
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.name)
def test_books_have_the_ids_of_another_implementation_and_come_back(path):
    tokenizers = pytest.importorskip("tokenizers")
    ours = gpt2_tokenizer(FILES)
    other = tokenizers.ByteLevelBPETokenizer(str(FILES / "encoder.json"), str(FILES / "vocab.bpe"))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            ids = ours.encode(row["text"])
            assert ids == other.encode(row["text"]).ids, row["title"]
            assert ours.decode(ids) == row["text"], row["title"]
