"""Character-level tokenizers."""

from pathlib import Path

import pytest

from tost_lm.data.tokenizers import CharacterTokenizer, read_tokenizer
from tost_lm.errors import DataError


def test_a_text_is_its_characters(tmp_path: Path):
    (tmp_path / "characters.json").write_text('"a\\né"')
    tokenizer = read_tokenizer(tmp_path / "characters.json")
    assert type(tokenizer) is CharacterTokenizer
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.has_eot) == (3, 1, False)
    assert tokenizer.encode_array("é\na").tolist() == tokenizer.encode("é\na") == [2, 1, 0]
    assert tokenizer.decode([2, 1, 0]) == "é\na"
    with pytest.raises(DataError, match="character outside the model's vocabulary: 'b'; remove it"):
        tokenizer.encode("ab")


@pytest.mark.parametrize("content", [b"", b'""', b'"aa"', b'["a"]', b"3", b"\xff"])
def test_files_without_distinct_characters_are_refused(tmp_path: Path, content: bytes):
    (tmp_path / "characters.json").write_bytes(content)
    with pytest.raises(DataError, match=r"characters\.json: not a JSON string of distinct characters"):
        read_tokenizer(tmp_path / "characters.json")
