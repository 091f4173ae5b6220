"""Texts to ids and back in blocks: what the tokenizers make of the whole, holding a block."""

import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer
from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
from tost_lm.data.tokenizers.piecewise import BLOCK_CHARACTERS, decode_ids, encode_blocks, token_text
from tost_lm.data.tokenizers.sentencepiece_bpe import ESCAPE, SPACE_MARK
from tost_lm.data.tokenizers.training import symbol_pieces, train_sentencepiece

GPT2_FILES = Path(__file__).parents[3] / "../shared/data/gpt2_bpe"
WORDS = [
    "a", "page", "Pages,", "\n", "\n\n", "  ", "\t", " ", "naïve", "漢字", "🙂", "e\u0301", "\u3000", "\x1c", "x=1",
    "it's", SPACE_MARK, ESCAPE, f"{ESCAPE}0", "\ufffd", "<|endoftext|>",
]  # fmt: skip


def text_of(seed: int, words: int) -> str:
    draws = random.Random(seed)
    return "".join(draws.choice(WORDS) + " " * draws.randrange(3) for _ in range(words))


def cut_anywhere(text: str, seed: int) -> Iterator[str]:
    draws = random.Random(seed)
    rest = iter(text)
    while block := "".join(islice(rest, draws.randrange(1, 40))):
        yield block


@pytest.fixture(scope="module", params=["sentencepiece", "gpt2"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "gpt2":
        if not GPT2_FILES.is_dir():
            pytest.skip("GPT-2's encoder.json and vocab.bpe are not here")
        return gpt2_tokenizer(GPT2_FILES)
    texts = [text_of(seed, 300) for seed in range(50)]
    return SentencePieceTokenizer(train_sentencepiece(texts, 400, symbol_pieces(["  ", " x", "\n "])))


def test_the_text_of_a_token_is_what_it_adds(tokenizer: Tokenizer):
    ids = tokenizer.encode("a  page naïve page x=1.\n")
    assert "".join(token_text(tokenizer, i) for i in ids) == "a  page naïve page x=1.\n"
    assert " page" in [token_text(tokenizer, i) for i in ids]
    assert token_text(tokenizer, tokenizer.eot) == ""


@pytest.mark.parametrize("seed", range(20))
def test_blocks_give_the_ids_of_the_whole(tokenizer: Tokenizer, seed: int):
    text = text_of(seed, 200)
    parts = list(encode_blocks(tokenizer, cut_anywhere(text, seed)))
    assert len(parts) > 20
    assert np.concatenate(parts).tolist() == tokenizer.encode(text)


def test_a_text_without_spaces_is_cut_at_the_end_of_blocks_and_nothing_is_lost(tokenizer: Tokenizer):
    block = "a" * BLOCK_CHARACTERS
    taken: list[str] = []

    def blocks() -> Iterator[str]:
        for _ in range(4):
            taken.append(block)
            yield block

    decoded = ""
    for number, part in enumerate(encode_blocks(tokenizer, blocks()), start=1):
        assert len(taken) == number
        decoded += tokenizer.decode(part.tolist())
    assert decoded == 4 * block


def test_an_empty_text_has_no_ids(tokenizer: Tokenizer):
    assert list(encode_blocks(tokenizer, [])) == list(encode_blocks(tokenizer, ["", ""])) == []


@pytest.mark.parametrize("seed", range(10))
def test_ids_are_told_in_whole_characters(tokenizer: Tokenizer, seed: int):
    text = text_of(seed, 200).replace("\ufffd", "")
    parts = list(decode_ids(tokenizer, tokenizer.encode(text)))
    assert "".join(parts) == text
    assert sum(map(bool, parts)) > 100
    assert not any("\ufffd" in part or re.search(f"{ESCAPE}$", part) for part in parts if ESCAPE not in text)


@pytest.mark.parametrize("seed", range(20))
def test_ids_that_are_no_text_are_told_as_they_are_decoded(tokenizer: Tokenizer, seed: int):
    draws = random.Random(seed)
    byte_ids = [i for i in range(258) if len(tokenizer.decode([i])) == 1]
    ids = [
        draws.choice(byte_ids) if draws.random() < 0.8 else draws.randrange(tokenizer.vocab_size) for _ in range(300)
    ]
    assert "".join(decode_ids(tokenizer, ids)) == tokenizer.decode(ids)


def test_what_never_becomes_a_character_is_told_too(tokenizer: Tokenizer):
    byte = next(i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) == "\ufffd")
    parts = list(decode_ids(tokenizer, [byte] * 1000))
    assert max(map(len, parts)) <= 64
    assert "".join(parts) == tokenizer.decode([byte] * 1000)
