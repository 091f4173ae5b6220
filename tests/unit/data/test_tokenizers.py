"""Every text comes back from its tokens, and training says how many pieces a corpus allows."""

import random
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tost_lm.data.tokenizers import ESCAPE, SPACE_MARK, Tokenizer, train_tokenizer
from tost_lm.errors import DataError

HARD_CASES = [
    "", " ", "  leading", "trailing  ", "\0", "a\0b", "\r\n", "\n\n\t x", "<0x0A>", "<unk>", "<|endoftext|>", "</s>",
    SPACE_MARK, f"{SPACE_MARK} {SPACE_MARK}a", "\u2585", "\ufeff", "\ufeffx", "\ufffd", "e\u0301", "ﬁ", "😀", "\u3000",
    ESCAPE, ESCAPE * 2, f"{ESCAPE}0", f"{ESCAPE}1", f"{ESCAPE}{SPACE_MARK}1", "\ue000", "\U0010ffff", "a\u2028b",
]  # fmt: skip


def corpus() -> list[str]:
    """Code-like text with byte piece names, escapes, NUL and rare characters in it."""
    generator = random.Random(0)
    words = ["def", "return", "<0x0A>", "<|endoftext|>", "<unk>", "value_1", "naïve", SPACE_MARK, ESCAPE, "\0", "漢字"]
    words += ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(100)]
    texts = []
    for number in range(300):
        lines = [" ".join(generator.choices(words, k=generator.randrange(1, 9))) for _ in range(20)]
        texts.append(f"document {number}\r\n" + "\n    ".join(lines))
    return texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_tokenizer(corpus(), 400))


any_text = st.text(st.characters(exclude_categories=["Cs"]))
awkward_text = st.lists(st.sampled_from([*HARD_CASES, "0", "1", "a", "<", ">"])).map("".join)


@pytest.mark.parametrize("text", HARD_CASES)
def test_hard_cases_come_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids


@settings(max_examples=500, deadline=None)
@given(any_text | awkward_text)
@example("".join(HARD_CASES))
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eot not in ids
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 399)))
def test_any_ids_decode_to_a_text_that_comes_back(tokenizer, ids):
    text = tokenizer.decode(ids)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whole_documents_come_back_in_batches(tokenizer):
    texts = corpus()
    batch = tokenizer.encode_batch(texts)
    assert batch == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(ids) for ids in batch] == texts


def test_end_of_text_decodes_to_nothing(tokenizer):
    assert tokenizer.eot == 1
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode(" b")]) == "a b"


def test_newlines_take_part_in_merges(tokenizer):
    assert len(tokenizer.encode("\n    ")) < 5


def test_training_is_repeatable():
    texts = corpus()
    assert train_tokenizer(texts, 400) == train_tokenizer(iter(texts), 400)
    assert train_tokenizer(texts, 400) != train_tokenizer(texts, 401)


def test_vocabulary_as_large_as_the_message_says_can_be_trained():
    with pytest.raises(DataError, match=r"vocab_size 50000: too large, .* at most \d+;") as caught:
        train_tokenizer(corpus(), 50_000)
    most = re.search(r"at most (\d+)", str(caught.value))
    assert most is not None
    assert Tokenizer(train_tokenizer(corpus(), int(most[1]))).vocab_size == int(most[1])
    with pytest.raises(DataError, match="too large"):
        train_tokenizer(corpus(), int(most[1]) + 1)


def test_vocabulary_too_small_for_the_characters():
    with pytest.raises(DataError, match=r"vocab_size 300: too small, .* at least 1258"):
        train_tokenizer(["".join(map(chr, range(0x4E00, 0x4E00 + 1000)))], 300)


@pytest.mark.parametrize("texts", [[], [""], ["\0"]])
def test_nothing_to_train_on(texts):
    with pytest.raises(DataError, match="no training document"):
        train_tokenizer(texts, 300)


@pytest.mark.parametrize("error", [DataError("row 3: bad"), KeyboardInterrupt()])
def test_what_the_corpus_raises_comes_through(error):
    def texts():
        yield "some text"
        raise error

    with pytest.raises(type(error)) as caught:
        train_tokenizer(texts(), 300)
    assert caught.value is error


def test_files_that_are_no_tokenizer_are_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.model"
    with pytest.raises(DataError, match="no such tokenizer"):
        Tokenizer.from_file(path)
    for data in (b"", b"junk", tokenizer.model_bytes[:-7]):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"tokenizer\.model: not a SentencePiece model"):
            Tokenizer.from_file(path)
    with pytest.raises(DataError, match="cannot be read"):
        Tokenizer.from_file(tmp_path)
    path.write_bytes(tokenizer.model_bytes)
    assert Tokenizer.from_file(path).sha256 == tokenizer.sha256
