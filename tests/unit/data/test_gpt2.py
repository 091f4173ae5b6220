"""GPT-2's tokenizer gives OpenAI's ids for any text and refuses other files."""

import gzip
import hashlib
import json
import pickle
import random
from typing import Any

import numpy as np
import pytest
import regex
from shared_data import GPT2_BPE, SHARED, needs_shared

from tost_lm.data.tokenizers import Gpt2Tokenizer, read_tokenizer
from tost_lm.data.tokenizers.gpt2 import SPACES, gpt2_tokenizer
from tost_lm.errors import DataError

pytestmark = pytest.mark.quick

BOOK = SHARED / "books/valid.jsonl.gz"


@pytest.fixture(scope="module")
def tokenizer() -> Gpt2Tokenizer:
    return gpt2_tokenizer(GPT2_BPE)


def other_implementation() -> Any:
    """Hugging Face's implementation, from the same files."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.ByteLevelBPETokenizer(
        str(GPT2_BPE / "encoder.json"), str(GPT2_BPE / "vocab.bpe"), add_prefix_space=False
    )


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
def test_random_texts_have_the_ids_of_another_implementation_and_decode(tokenizer):
    other = other_implementation()
    for text in random_texts(1000):
        array = tokenizer.encode_array(text)
        assert array.dtype == np.uint32
        assert array.tolist() == tokenizer.encode(text) == other.encode(text).ids, repr(text)
        assert tokenizer.decode(array) == text


@needs_shared
def test_a_book_has_the_ids_of_another_implementation_and_decodes(tokenizer):
    other = other_implementation()
    with gzip.open(BOOK, "rt", encoding="utf-8") as file:
        for row in (json.loads(next(file)) for _ in range(2)):
            ids = tokenizer.encode(row["text"])
            assert ids == other.encode(row["text"]).ids
            assert tokenizer.decode(ids) == row["text"]


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


def test_the_spaces_are_unicodes():
    every = "".join(map(chr, range(0xD800))) + "".join(map(chr, range(0xE000, 0x110000)))
    assert SPACES.findall(every) == regex.findall(r"\p{White_Space}+", every)


@needs_shared
def test_the_tokenizer_file_and_pickles_are_read_back(tokenizer, tmp_path):
    path = tmp_path / tokenizer.file_name
    path.write_bytes(tokenizer.model_bytes)
    assert path.name == "tokenizer.tiktoken"
    assert path.read_bytes().startswith(b"IQ== 0\nIg== 1\n")
    read = read_tokenizer(path)
    assert read.sha256 == tokenizer.sha256
    assert read.encode("Hello world") == [15496, 995]
    assert pickle.loads(pickle.dumps(read)).encode("Hello world") == [15496, 995]


@needs_shared
def test_damaged_files_are_refused(tokenizer, tmp_path):
    lines = tokenizer.model_bytes.splitlines(keepends=True)
    path = tmp_path / "tokenizer.tiktoken"
    for damaged in (b"", b"junk", b"".join(lines[:-1]), b"".join([*lines, lines[0]]), b"".join(lines[::-1])):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"tokenizer\.tiktoken: not GPT-2's tokenizer, or damaged"):
            read_tokenizer(path)
    for name in ("encoder.json", "vocab.bpe"):
        for other in ("encoder.json", "vocab.bpe"):
            (tmp_path / other).write_bytes((GPT2_BPE / other).read_bytes())
        assert gpt2_tokenizer(tmp_path).sha256 == tokenizer.sha256
        data = bytearray((tmp_path / name).read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}: not GPT-2's, or damaged"):
            gpt2_tokenizer(tmp_path)


def test_a_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.path .*encoder\.json cannot be read: No such file"):
        gpt2_tokenizer(tmp_path)


@needs_shared
def test_the_downloaded_tokenizer_is_the_same(monkeypatch, tmp_path, tokenizer):
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name in ("encoder.json", "vocab.bpe"):  # tiktoken's cache
        url = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes((GPT2_BPE / name).read_bytes())
    assert gpt2_tokenizer(None).model_bytes == tokenizer.model_bytes


def test_a_failed_download_names_the_fix(monkeypatch, tmp_path):
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    problem = r"^GPT-2's .* cannot be downloaded: .*; set tokenizer\.path to a folder[^\n]*$"
    with pytest.raises(DataError, match=problem):
        gpt2_tokenizer(None)
