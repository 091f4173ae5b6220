"""A tokenizer.json gives the library's ids, is lossless or refused, and travels in one file."""

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builds import prep_config
from hf_tokenizers import EOT, TEXTS, byte_level, made, metaspace_unigram, prefixed_bpe, with_added
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, normalizers, processors

from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.tokenizers import HfTokenizer, LosslessTokenizer, make_tokenizer, read_tokenizer
from tost_lm.data.tokenizers.hf import hf_tokenizer
from tost_lm.data.tokenizers.interface import ESCAPE, SPACE_MARK
from tost_lm.data_prep.build import build_shards
from tost_lm.errors import ConfigError, DataError

MADE: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "byte-level BPE": (byte_level, EOT),
    "byte-level BPE with added tokens": (lambda: with_added(byte_level(), "  ", "The lines", EOT * 2), EOT),
    "Unigram with a space before a text": (metaspace_unigram, "</s>"),
    "BPE with a space before a text": (prefixed_bpe, "</s>"),
}
HARD_CASES = [
    " ", "  ", "a", "\n", "\0", "<0x0A>", "<unk>", "<s>", "</s>", EOT, "<pad>", SPACE_MARK, ESCAPE, "0", "1", "2", "é",
    "e\u0301", "😀", "\ufeff", "\ufffd", "The lines", "0x0A>", "/s>", "<",
]  # fmt: skip


@pytest.fixture(scope="module", params=MADE)
def pair(request: pytest.FixtureRequest) -> tuple[HfTokenizer, Pipeline]:
    """A tokenizer, and the library's own."""
    make, eot_token = MADE[request.param]
    pipeline = make()
    return made(pipeline, eot_token), pipeline


def written(folder: Path, pipeline: Pipeline) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(pipeline.to_str())
    return path


def prep(path: Path, **tokenizer: Any) -> DataPrepConfig:
    return prep_config(Path("x"), tokenizer={"path": str(path), **tokenizer})


@pytest.mark.quick
def test_texts_have_the_ids_of_the_library(pair: tuple[HfTokenizer, Pipeline]):
    tokenizer, pipeline = pair
    for text in [*TEXTS, "\n".join(TEXTS * 20), "naïve 漢字 😀\0", ""]:
        array = tokenizer.encode_array(text)
        assert array.dtype == np.uint32
        assert array.tolist() == tokenizer.encode(text) == pipeline.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(array) == text


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(HARD_CASES)).map("".join))
@example(text="".join(HARD_CASES))
@example(text=" ".join(HARD_CASES))
def test_any_text_is_lossless_and_has_no_special_ids(pair: tuple[HfTokenizer, Pipeline], text: str):
    tokenizer, pipeline = pair
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not {i for i, token in pipeline.get_added_tokens_decoder().items() if token.special}.intersection(ids)


def test_special_tokens_decode_to_the_empty_string(pair: tuple[HfTokenizer, Pipeline]):
    tokenizer, pipeline = pair
    assert tokenizer.eot in pipeline.encode(f"a{tokenizer.eot_token}").ids
    text = tokenizer.decode([*tokenizer.encode("a"), tokenizer.eot, *tokenizer.encode("b")])
    assert text == ("a b" if tokenizer.adds_space else "ab")
    assert tokenizer.decode([tokenizer.eot]) == ""


def test_truncation_padding_and_the_post_processor_are_not_applied():
    pipeline = byte_level()
    expected = pipeline.encode(TEXTS[0]).ids
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=100)
    pipeline.post_processor = processors.TemplateProcessing(f"{EOT} $A {EOT}", special_tokens=[(EOT, 1)])
    assert len(pipeline.encode(TEXTS[0]).ids) == 100
    assert made(pipeline).encode(TEXTS[0]) == expected


def test_the_vocabulary_reaches_to_the_last_added_token():
    tree = json.loads(with_added(byte_level(), "<one>", "<two>").to_str())
    assert made(Pipeline.from_str(json.dumps(tree))).vocab_size == 402
    tree["model"]["vocab"]["unused"] = 500
    sparse = made(Pipeline.from_str(json.dumps(tree)))
    assert sparse.vocab_size == 501
    assert sparse.decode([450, *sparse.encode("a")]) == "a"


@pytest.mark.parametrize(
    ("pipeline", "eot_token", "loss"),
    [
        (lambda: byte_level(normalizer=normalizers.Lowercase()), EOT, "it decodes 'A Bc' as 'a bc'"),
        (lambda: byte_level(normalizer=normalizers.Strip()), EOT, "it decodes 'a ' as 'a'"),
        (lambda: byte_level(normalizer=normalizers.NFD()), EOT, "it decodes 'é"),
        (lambda: metaspace_unigram(byte_fallback=False), "</s>", "it decodes 'A Bc' as ' '"),
        (lambda: byte_level(normalizer=normalizers.Replace("ß", "")), EOT, "it decodes 'ÕÖ×ØÙÚÛÜÝÞßàáâãäåæçè' as "),
    ],
)
def test_tokenizers_that_change_texts_are_refused(tmp_path: Path, pipeline: Any, eot_token: str, loss: str):
    path = written(tmp_path, pipeline())
    with pytest.raises(DataError) as caught:
        make_tokenizer(prep(path, eot_token=eot_token))
    assert str(caught.value).startswith(f"tokenizer.path {path}: the tokenizer is not lossless: {loss}")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_fails_is_refused(tmp_path: Path):
    path = written(tmp_path, Pipeline(models.WordLevel({"a": 0}, "[UNK]")))
    with pytest.raises(DataError, match=r"json: the tokenizer fails for .*\[UNK\].*; use another tokenizer$"):
        make_tokenizer(prep(path, eot_token="a"))


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_a_unicode_form_must_be_that_of_the_corpus(tmp_path: Path, form: str):
    path = written(tmp_path, byte_level(normalizer=getattr(normalizers, form)()))
    with pytest.raises(DataError, match=rf"brings texts to {form} .*; set corpus\.normalization={form}$"):
        hf_tokenizer(path, EOT, "none")
    assert hf_tokenizer(path, EOT, form).encode("e\u0301") == hf_tokenizer(path, EOT, "NFKC").encode("é")


def test_the_end_of_text_token_must_be_named(tmp_path: Path):
    path = written(tmp_path, byte_level())
    choose = r"set it to the token that ends a document, one of <pad>, <\|endoftext\|>$"
    with pytest.raises(DataError, match=rf"json: tokenizer\.eot_token is not set; {choose}"):
        make_tokenizer(prep(path))
    with pytest.raises(DataError, match=rf"json: tokenizer\.eot_token </s>: not in its vocabulary; {choose}"):
        make_tokenizer(prep(path, eot_token="</s>"))
    path = written(tmp_path, with_added(byte_level(), "<|end|>", *(f"<|{n}|>" for n in range(9))))
    ordinary = make_tokenizer(prep(path, eot_token="<|end|>"))
    assert (ordinary.eot, ordinary.vocab_size) == (400, 410)
    assert ordinary.eot not in ordinary.encode("a<|end|>")
    plain = Pipeline(models.BPE({"a": 0}, []))
    with pytest.raises(DataError, match="it has no special tokens; add one that ends a document"):
        make_tokenizer(prep(written(tmp_path, plain)))


def test_settings_of_the_other_kind_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size 400: tokenizer\.json has its own; remove it"):
        prep(Path("tokenizer.json"), vocab_size=400)
    with pytest.raises(ConfigError, match=r"tokenizer\.eot_token </s>: tokenizer\.model has its own; remove it"):
        make_tokenizer(prep(tmp_path / "tokenizer.model", eot_token="</s>"))


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path):
    whole, path = byte_level().to_str(), tmp_path / "tokenizer.json"
    tree = json.loads(whole)
    tree["model"]["merges"][0] = ["no", "token"]
    others = ["", "{}", "[]", whole[:1000], whole[:-3], json.dumps(tree["model"]["vocab"]), json.dumps(tree), "\0"]
    for text in others:
        path.write_text(text)
        with pytest.raises(DataError) as caught:
            make_tokenizer(prep(path, eot_token=EOT))
        assert str(caught.value).startswith(f"tokenizer.path {path}: not a tokenizer.json, or damaged: ")
        assert "\n" not in str(caught.value)
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"not a tokenizer\.json: not UTF-8; set it to a tokenizer\.json"):
        make_tokenizer(prep(path, eot_token=EOT))
    (tmp_path / "folder").mkdir()
    missing = tmp_path / "no.json"
    for wrong, named in ((missing, missing), (tmp_path / "folder", tmp_path / "folder/tokenizer.json")):
        problem = f"{named}: cannot be read: No such file or directory; set it to a tokenizer.json"
        with pytest.raises(DataError, match=problem):
            make_tokenizer(prep(wrong, eot_token=EOT))


def test_the_file_holds_the_original_and_the_end_of_text_token(tmp_path: Path):
    path = written(tmp_path, byte_level())
    tokenizer = hf_tokenizer(path, EOT, "none")
    stored = tmp_path / tokenizer.file_name
    stored.write_bytes(tokenizer.model_bytes)
    content = json.loads(stored.read_bytes())
    assert content["tokenizer"].encode() == path.read_bytes()
    assert content["eot_token"] == EOT
    assert tokenizer.sha256 == hashlib.sha256(stored.read_bytes()).hexdigest()
    assert tokenizer.sha256 != hf_tokenizer(path, "<pad>", "none").sha256
    for again in (read_tokenizer(stored), pickle.loads(pickle.dumps(tokenizer))):
        assert type(again) is HfTokenizer
        assert (again.sha256, again.eot, again.vocab_size) == (tokenizer.sha256, 1, 400)
        assert again.encode(f"{TEXTS[0]}{EOT}") == tokenizer.encode(f"{TEXTS[0]}{EOT}")
    for damaged in (b"", b"[]", tokenizer.model_bytes[:-5], path.read_bytes()):
        stored.write_bytes(damaged)
        with pytest.raises(DataError, match=r"tokenizer\.hf\.json: not a file that tost prepare shards wrote"):
            read_tokenizer(stored)


def test_a_loss_that_only_the_corpus_shows_ends_the_build(tmp_path: Path):
    tokenizer = made(byte_level(normalizer=normalizers.Replace("colour", "color")))
    source = tmp_path / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "It has the colour blue."]))
    with pytest.raises(DataError) as caught:
        build_shards(prep_config(source, tmp_path / "shards"), tokenizer)
    assert str(caught.value) == (
        "the tokenizer is not lossless: in row 61 of the corpus it decodes 's the colour blue.' as "
        "'s the color blue.'; use a tokenizer that changes no text"
    )
    assert not (tmp_path / "shards").exists()


def test_all_held_out_documents_are_checked(tmp_path: Path):
    tokenizer = made(byte_level(normalizer=normalizers.Replace("colour", "color")))
    source, many = tmp_path / "corpus.jsonl", "They say little. " * 70_000
    texts = [many, *(f"It has the colour {number}." for number in range(8))]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = prep_config(source, tmp_path / "shards", workers=1, valid_fraction=0.5)
    with pytest.raises(DataError, match=r"in row \d of the corpus it decodes 's the colour"):
        build_shards(config, tokenizer)


def test_texts_that_are_scored_must_not_lose_anything():
    tokenizer = made(byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("oo", "o")])))
    tokenizer.stop = 3
    scored = LosslessTokenizer(tokenizer, "runs/a")
    assert scored.stop == 3
    text = "They saw little. é"
    assert scored.encode(text) == scored.encode_array(text).tolist() == tokenizer.encode(text)
    assert scored.decode(scored.encode(text)) == text
    facts = ("vocab_size", "eot", "adds_space", "sha256")
    assert [getattr(scored, name) for name in facts] == [getattr(tokenizer, name) for name in facts]
    lossy = r"^runs/a: the tokenizer is not lossless, so scores of this text would be wrong: it decodes "
    for encode in (scored.encode, scored.encode_array):
        with pytest.raises(DataError, match=lossy + "'They looked.' as 'They loked.'; remove such characters from the"):
            encode("They looked.")
        with pytest.raises(DataError, match=lossy + "'little e\u0301' as 'little é'; bring the text to NFC"):
            encode("little e\u0301")
