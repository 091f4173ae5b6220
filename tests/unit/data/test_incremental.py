"""Encoding and decoding in blocks equals encoding and decoding of the whole text."""

import random
import re
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hf_tokenizers import byte_level, made, prefixed_bpe
from shared_data import gpt2_tokenizer, skip_without_shared

from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.interface import (
    BLOCK_CHARACTERS,
    ESCAPE,
    SPACE_MARK,
    decode_ids,
    encode_blocks,
)
from tost_lm.data.tokenizers.training import train_sentencepiece

WORDS = [
    "a", "page", "Pages,", "\n", "\n\n", "  ", "\t", " ", "naïve", "漢字", "🙂", "e\u0301", "\u3000", "\x1c", "x=1",
    "it's", SPACE_MARK, ESCAPE, f"{ESCAPE}0", "\ufffd", "<|endoftext|>",
]  # fmt: skip


def text_of(seed: int, words: int) -> str:
    draws = random.Random(seed)
    return "".join(draws.choice(WORDS) + " " * draws.randrange(3) for _ in range(words))


def random_blocks(text: str, seed: int) -> Iterator[str]:
    draws = random.Random(seed)
    rest = iter(text)
    while block := "".join(islice(rest, draws.randrange(1, 40))):
        yield block


@pytest.fixture(scope="module", params=["sentencepiece", "gpt2", "hf", "hf with a space before a text"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "gpt2":
        skip_without_shared()
        return gpt2_tokenizer()
    texts = [text_of(seed, 300) for seed in range(50)]
    if request.param == "hf":
        return made(byte_level(texts))
    if request.param.startswith("hf"):
        return made(prefixed_bpe(texts), "</s>")
    return SentencePieceTokenizer(train_sentencepiece(texts, 400))


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(20))
def test_blocks_give_the_ids_of_the_whole_text(tokenizer: Tokenizer, seed: int):
    text = text_of(seed, 200)
    found = list(encode_blocks(tokenizer, random_blocks(text, seed)))
    assert len(found) > 20
    assert np.concatenate(found).tolist() == tokenizer.encode(text)


def test_a_text_without_spaces_is_cut_at_block_ends_without_loss(tokenizer: Tokenizer):
    block = "a" * BLOCK_CHARACTERS
    read: list[str] = []

    def blocks() -> Iterator[str]:
        for _ in range(4):
            read.append(block)
            yield block

    decoded = ""
    for number, array in enumerate(encode_blocks(tokenizer, blocks()), start=1):
        assert len(read) == number
        decoded += tokenizer.decode(array.tolist())
    assert decoded == 4 * block


def test_an_empty_text_has_no_ids(tokenizer: Tokenizer):
    assert list(encode_blocks(tokenizer, [])) == list(encode_blocks(tokenizer, ["", ""])) == []


@pytest.mark.parametrize("seed", range(10))
def test_ids_are_decoded_in_complete_characters(tokenizer: Tokenizer, seed: int):
    text = text_of(seed, 200).replace("\ufffd", "")
    found = list(decode_ids(tokenizer, tokenizer.encode(text)))
    assert "".join(found) == text
    assert sum(map(bool, found)) > 100
    assert not any("\ufffd" in string or re.search(f"{ESCAPE}$", string) for string in found if ESCAPE not in text)


@pytest.mark.parametrize("seed", range(20))
def test_ids_of_invalid_utf8_are_decoded_like_the_whole(tokenizer: Tokenizer, seed: int):
    draws = random.Random(seed)
    byte_ids = [i for i in range(258) if len(tokenizer.decode([i])) == 1]
    ids = [
        draws.choice(byte_ids) if draws.random() < 0.8 else draws.randrange(tokenizer.vocab_size) for _ in range(300)
    ]
    assert "".join(decode_ids(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_never_form_a_character_are_decoded(tokenizer: Tokenizer):
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd")
    found = list(decode_ids(tokenizer, [byte] * 1000))
    assert max(map(len, found)) <= 64
    assert "".join(found) == tokenizer.decode([byte] * 1000)
