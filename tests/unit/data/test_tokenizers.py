"""SentencePiece tokenizers are lossless; tokenizer files are found, read and refused."""

import pickle
import random
import tracemalloc

import numpy as np
import pytest
import sentencepiece
from builds import LOSSLESS, trained_elsewhere
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tost_lm.data.tokenizers import SentencePieceTokenizer, Tokenizer, find_tokenizer, read_tokenizer
from tost_lm.data.tokenizers.interface import ESCAPE, SPACE_MARK, escape
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.errors import DataError

SYMBOLS = ["<|fim|>", " x", "\n\n", "  ", ",", '"', "12", "🙂"]
BEYOND_WORDS = ["a b", "def ", "\n "]
HARD_CASES = [
    "", " ", "  leading", "trailing  ", "\0", "a\0b", "\r\n", "\n\n\t x", "<0x0A>", "<unk>", "<|endoftext|>", "</s>",
    SPACE_MARK, f"{SPACE_MARK} {SPACE_MARK}a", "\u2585", "\ufeff", "\ufeffx", "\ufffd", "e\u0301", "ﬁ", "😀", "\u3000",
    ESCAPE, ESCAPE * 2, f"{ESCAPE}0", f"{ESCAPE}1", f"{ESCAPE}{SPACE_MARK}1", "\ue000", "\U0010ffff", "a\u2028b",
    *SYMBOLS, *BEYOND_WORDS, "<|fim|><|fim|>", "xa b", f"a{SPACE_MARK}b", "\n\n\n", "   ", "<|fim| >",
]  # fmt: skip


def corpus() -> list[str]:
    """Code-like text with names of byte pieces, escapes, NUL and rare characters."""
    generator = random.Random(0)
    words = ["def", "return", "<0x0A>", "<|endoftext|>", "<unk>", "value_1", "naïve", SPACE_MARK, ESCAPE, "\0", "漢字"]
    words += ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(100)]
    texts = []
    for number in range(300):
        lines = [" ".join(generator.choices(words, k=generator.randrange(1, 9))) for _ in range(20)]
        texts.append(f"document {number}\r\n" + "\n    ".join(lines))
    return texts


@pytest.fixture(scope="module", params=["ours", "symbols", "symbols beyond words"])
def tokenizer(request) -> Tokenizer:
    if request.param == "ours":
        return SentencePieceTokenizer(train_sentencepiece(corpus(), 400))
    symbols = {"symbols": SYMBOLS, "symbols beyond words": [*SYMBOLS, *BEYOND_WORDS]}[request.param]
    return trained_elsewhere(corpus(), 400, symbols, **LOSSLESS, add_dummy_prefix=False, unk_id=0, eos_id=1, bos_id=-1)


any_text = st.text(st.characters(exclude_categories=["Cs"]))
hard_text = st.lists(st.sampled_from([*HARD_CASES, "0", "1", "a", "<", ">"])).map("".join)


@pytest.mark.quick
@pytest.mark.parametrize("text", HARD_CASES)
def test_hard_cases_are_lossless(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids


@settings(max_examples=200, deadline=None)
@given(any_text | hard_text)
@example("".join(HARD_CASES))
def test_any_text_is_lossless(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 399)))
def test_the_text_of_any_ids_is_lossless(tokenizer, ids):
    text = tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_texts_are_lossless_and_have_sentencepieces_ids(tokenizer):
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    generator = random.Random(0)
    hard = ["  ".join(generator.choices(HARD_CASES, k=1000)), " " * 5000, "x" * 5000, "x " * 3000]
    for text in [*corpus(), *hard]:
        array = tokenizer.encode_array(text)
        assert array.dtype == np.uint32
        assert array.tolist() == tokenizer.encode(text) == whole.encode(escape(text))
        assert tokenizer.decode(array) == text


def test_encoding_a_long_text_has_bounded_memory(tokenizer):
    text = "some words in a row " * 50_000
    tracemalloc.start()
    array = tokenizer.encode_array(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tokenizer.decode(array[-1000:]) in text
    if tokenizer._cuts_at_spaces:  # otherwise SentencePiece encodes the whole text at once
        assert peak < 3 * array.nbytes + len(text)


def test_a_pickled_tokenizer_is_the_same(tokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.sha256 == tokenizer.sha256
    assert [*map(again.encode, HARD_CASES)] == [*map(tokenizer.encode, HARD_CASES)]


def test_models_trained_elsewhere_are_accepted_if_lossless():
    for name in LOSSLESS:
        with pytest.raises(DataError, match="is not lossless"):
            trained_elsewhere(corpus(), 500, **{key: value for key, value in LOSSLESS.items() if key != name})
    tokenizer = trained_elsewhere(corpus(), 500, **LOSSLESS)
    assert tokenizer.adds_space
    assert not trained_elsewhere(corpus(), 500, **LOSSLESS, add_dummy_prefix=False).adds_space
    whole = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.model_bytes)
    for text in corpus():
        assert tokenizer.encode(text) == whole.encode(escape(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_files_that_are_not_tokenizers_are_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match="no such tokenizer"):
        read_tokenizer(path)
    for data in (b"", b"junk", tokenizer.model_bytes[:-7]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"tokenizer\.model: not a SentencePiece model"):
            read_tokenizer(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_tokenizer(tmp_path)
    path.write_bytes(tokenizer.model_bytes)
    assert read_tokenizer(path).sha256 == tokenizer.sha256


def test_a_folder_has_one_tokenizer(tmp_path):
    with pytest.raises(DataError, match=r": no tokenizer, so .* restore tokenizer\.model, tokenizer\.hf\.json"):
        find_tokenizer(tmp_path)
    (tmp_path / "tokenizer.hf.json").touch()
    assert find_tokenizer(tmp_path) == tmp_path / "tokenizer.hf.json"
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(DataError, match=": 2 tokenizers"):
        find_tokenizer(tmp_path)
