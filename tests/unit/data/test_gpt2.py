"""GPT-2's tokenizer gives OpenAI's ids for any text."""

import gzip
import hashlib
import json
import random
from collections.abc import Iterable
from itertools import islice

import numpy as np
import pytest
from shared_data import SHARED, gpt2_tokenizer, needs_shared

from tost_lm.data.tokenizers import HfTokenizer, Tokenizer
from tost_lm.data.tokenizers.fast import TiktokenTokenizer

pytestmark = pytest.mark.quick

BOOK = SHARED / "books/valid.jsonl.gz"
# SHA-256 of the uint16 ids that OpenAI's implementation, tiktoken 0.14.0, gives for texts.
IDS_OF_RANDOM_TEXTS = "af7097b29e18417fd3c96883cb34736698f5a1f23ecb6fa3da53c7c11477a654"
IDS_OF_TWO_ROWS = "d7b6c2048b558cb42be1db154bb28159e8e1ee1a0e1b097d8c983a94c818b58c"


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return gpt2_tokenizer()


def digest_of_ids(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """SHA-256 of the ids of all texts, which must decode to them."""
    digest = hashlib.sha256()
    for text in texts:
        array = tokenizer.encode_array(text)
        assert array.dtype == np.uint32
        assert array.tolist() == tokenizer.encode(text)
        assert tokenizer.decode(array) == text
        digest.update(array.astype(np.uint16).tobytes())
    return digest.hexdigest()


def random_texts(count: int) -> list[str]:
    """Texts of all Unicode planes, of the first scripts, of Latin, and of characters where GPT-2 splits texts."""
    generator = random.Random(0)
    cuts = " \n\t\r\v\f\x1c\x85\xa0\u2028\u3000a1'!é<|>" + "st"

    def characters(kind: int) -> str:
        length = generator.randrange(60)
        if kind == 3:
            return "".join(generator.choices(cuts, k=length))
        points = (generator.randrange((0x110000, 0x3000, 0x100)[kind]) for _ in range(length))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    return [characters(number % 4) for number in range(count)]


@needs_shared
def test_random_texts_have_the_ids_of_openais_implementation_and_decode(tokenizer):
    for implementation in (tokenizer, TiktokenTokenizer(tokenizer)):
        assert digest_of_ids(implementation, random_texts(1000)) == IDS_OF_RANDOM_TEXTS


@needs_shared
def test_a_book_has_the_ids_of_openais_implementation_and_decodes(tokenizer):
    with gzip.open(BOOK, "rt", encoding="utf-8") as file:
        texts = [json.loads(row)["text"] for row in islice(file, 2)]
    for implementation in (tokenizer, TiktokenTokenizer(tokenizer)):
        assert digest_of_ids(implementation, texts) == IDS_OF_TWO_ROWS


@needs_shared
def test_end_of_text_in_a_text_is_plain_text(tokenizer):
    assert tokenizer.encode("a<|endoftext|>b") == [64, 27, 91, 437, 1659, 5239, 91, 29, 65]
    assert tokenizer.eot not in tokenizer.encode_array("<|endoftext|>" * 1000)
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode(" b")]) == "a b"


@needs_shared
@pytest.mark.parametrize("unit", ["a", "7", "\n", " ", "e\u0301", "😀", "<|endoftext|>"])
def test_a_million_repetitions(tokenizer, unit):
    text = unit * (1_000_000 // len(unit))
    assert tokenizer.decode(tokenizer.encode_array(text)) == text


@needs_shared
@pytest.mark.parametrize("space", [" ", " \u3000"])
def test_a_long_run_of_spaces_before_text_is_split_as_gpt2_splits_it(tokenizer, space):
    run = space * (1_200_000 // len(space))
    for texts in (["before", run[:-1], run[-1] + "after it"], [run[:-1], run[-1] + "a", run]):
        assert tokenizer.encode("".join(texts)) == [i for text in texts for i in tokenizer.encode(text)]
