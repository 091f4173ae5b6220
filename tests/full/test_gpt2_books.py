"""GPT-2's tokenizer on whole books: the ids of OpenAI's implementation, and the text back byte for byte."""

import gzip
import hashlib
import json
from collections.abc import Callable

import numpy as np
import pytest
from shared_data import SHARED, gpt2_tokenizer, needs_shared

from tost_lm.data.tokenizers import HfTokenizer, Tokenizer
from tost_lm.data.tokenizers.fast import TiktokenTokenizer

# SHA-256 of the uint16 ids that tiktoken 0.14.0 gives for the texts of each file.
IDS = {
    "train-00.jsonl.gz": "59e061eca026bad641c18e4c19d4cab2a9ce0d4d4ac2bc4c8e1d54baac1a03d7",
    "train-01.jsonl.gz": "8d91e8cd818ce60193b8fec1cd4feba2088fb76ebf40f2624c3cfe28ceb210c4",
    "train-02.jsonl.gz": "bedda8dec00bc937fc5581a80c21dd0eb79fd730cde6f3847d07d5d80a1f19d1",
    "train-03.jsonl.gz": "6f0d1e53296522946f9237ba771630b0e2df119054646b315819e4c6adfa938f",
    "valid.jsonl.gz": "5b9e674e13738582ab879fb91fcdcd2dd990a5c66e46e7be1cf341f2b719b858",
}


@needs_shared
@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("implementation", [lambda library: library, TiktokenTokenizer], ids=["library", "tiktoken"])
def test_books_have_the_ids_of_openais_implementation_and_come_back(
    name: str, implementation: Callable[[HfTokenizer], Tokenizer]
):
    tokenizer, digest = implementation(gpt2_tokenizer()), hashlib.sha256()
    with gzip.open(SHARED / "books" / name, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            ids = tokenizer.encode_array(row["text"])
            digest.update(ids.astype(np.uint16).tobytes())
            assert tokenizer.decode(ids) == row["text"], row["title"]
    assert digest.hexdigest() == IDS[name]
