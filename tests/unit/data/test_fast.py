"""tiktoken gives the library's ids for a tokenizer.json that it can run; any other is left to the library."""

import json
import pickle
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from builds import prep_config
from hf_tokenizers import EOT, TEXTS, byte_level, made, prefixed_bpe, with_added
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from benchmarks.data import LLAMA3, QWEN
from tost_lm.data.settings import DataPrepConfig
from tost_lm.data.tokenizers import HfTokenizer, SentencePieceTokenizer, fastest, make_tokenizer
from tost_lm.data.tokenizers.fast import TiktokenTokenizer, UnsuitableError
from tost_lm.data.tokenizers.training import train_sentencepiece
from tost_lm.data_prep.build import build_shards
from tost_lm.data_prep.making import make_shards

THINK = ("<think>", "</think>")
HARD_CASES = [
    " ", "  ", "\n", "\r\n", "'s", "'S", "'\u017f", "a", "1", "1234", "é", "e\u0301", "\u0301", "漢", "😀", "\u3000",
    "\x85", EOT, "<", *THINK, "The lines", "\ufb01", "\u212b",
]  # fmt: skip


def split(pattern: str, normalizer: Any = None, **changes: Any) -> Pipeline:
    """Byte-level BPE with words of a pattern, and with settings of its model changed."""
    tree = json.loads(byte_level(normalizer=normalizer).to_str())
    tree["model"] |= changes
    pipeline = Pipeline.from_str(json.dumps(tree))
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return pipeline


KINDS: dict[str, Callable[[], Pipeline]] = {
    "GPT-2": byte_level,
    "Llama 3": lambda: split(LLAMA3, ignore_merges=True),
    "Qwen": lambda: with_added(split(QWEN, normalizers.NFC()), *THINK),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[TiktokenTokenizer, HfTokenizer]:
    library = made(KINDS[request.param]())
    return TiktokenTokenizer(library), library


@pytest.mark.quick
def test_each_kind_is_run_by_tiktoken_with_the_same_ids(pair: tuple[TiktokenTokenizer, HfTokenizer]):
    _, library = pair
    fast, line = fastest(library, TEXTS)
    size = len("".join(TEXTS))
    assert (
        line == f"tokenizing with tiktoken: the library's ids for each token, each character, {size:,} bytes of corpus"
    )
    for tokenizer in (fast, pickle.loads(pickle.dumps(fast))):
        assert isinstance(tokenizer, TiktokenTokenizer)
        assert (tokenizer.eot, tokenizer.vocab_size, tokenizer.sha256) == (1, library.vocab_size, library.sha256)
        for text in [*TEXTS, "".join(HARD_CASES), ""]:
            assert tokenizer.encode_array(text).tolist() == tokenizer.encode(text) == library.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text))


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.lists(st.sampled_from(HARD_CASES)).map("".join))
@example(text="</think>\u0338")
@example(text=" " * 1_000_000 + "a")
def test_any_text_has_the_ids_of_the_library(pair: tuple[TiktokenTokenizer, HfTokenizer], text: str):
    fast, library = pair
    assert fast.encode(text) == library.encode(text)


def edited(pipeline: Pipeline, change: Callable[[dict[str, Any]], Any]) -> HfTokenizer:
    tree = json.loads(pipeline.to_str())
    change(tree)
    return made(Pipeline.from_str(json.dumps(tree)))


def merges_of_bytes(tree: dict[str, Any]) -> list[list[str]]:
    return [pair for pair in tree["model"]["merges"] if len("".join(pair)) == 2]


def swap_merges(tree: dict[str, Any]) -> None:
    """The first two merges of which the one takes the byte that the other needs."""
    merges = tree["model"]["merges"]
    pairs = merges_of_bytes(tree)
    one, other = next(
        (merges.index(one), merges.index(other)) for one, other in combinations(pairs, 2) if one[1] == other[0]
    )
    merges[one], merges[other] = merges[other], merges[one]


def shards(folder: Path, tokenizer: HfTokenizer, make: Callable[[DataPrepConfig], Any]) -> list[bytes]:
    """The files of tokens of TEXTS and of words in which two merges of bytes compete."""
    pairs = merges_of_bytes(json.loads(tokenizer.tokenizer_json))
    words = " ".join(x + y + z for x, y in pairs for first, z in pairs if first == y).replace("Ġ", " ")
    source, path = folder / "corpus.jsonl", folder / "tokenizer.json"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, words]))
    path.write_text(tokenizer.tokenizer_json)
    out = folder / make.__name__ / tokenizer.sha256
    out.parent.mkdir(exist_ok=True)
    make(prep_config(source, out, tokenizer={"path": str(path), "eot_token": EOT}))
    return [file.read_bytes() for file in sorted(out.glob("*.bin"))]


def test_swapped_merges_are_found_and_lead_to_the_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pipeline = byte_level()
    plain, swapped = made(pipeline), edited(pipeline, swap_merges)
    chosen, line = fastest(swapped, iter(()))
    assert chosen is swapped
    reason = "not tiktoken: its merges are not in the order of their ids"
    assert line == f"tokenizing with the library tokenizers, {reason}"

    def by_library(config: DataPrepConfig) -> None:
        build_shards(config, make_tokenizer(config))

    ids = []
    for tokenizer, line in ((plain, "tokenizing with tiktoken: "), (swapped, f"library tokenizers, {reason}\n")):
        ids.append(shards(tmp_path, tokenizer, make_shards))
        assert line in capsys.readouterr().out
        assert ids[-1] == shards(tmp_path, tokenizer, by_library)
    assert ids[0] != ids[1]


def add(pipeline: Pipeline, token: AddedToken) -> Pipeline:
    pipeline.add_tokens([token])
    return pipeline


NOT_SPLIT = "its pre-tokenizer is not ByteLevel, alone or after one pattern, without a space before texts"
ADDED = "its added tokens may overlap, or depend on the text beside them"
MEANING = "its pattern may mean something else to tiktoken"
MORE = "it changes texts by more than NFC or NFKC"
OTHERS: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "characters": (lambda: prefixed_bpe(), MORE),
    "a normalizer": (lambda: byte_level(normalizer=normalizers.Replace("colour", "color")), MORE),
    "added tokens of one beginning": (lambda: with_added(byte_level(), "<a>", "<a>b"), ADDED),
    "added tokens that overlap": (lambda: with_added(byte_level(), "<a", "a>"), ADDED),
    "an added token that takes spaces": (lambda: add(byte_level(), AddedToken("<a>", rstrip=True)), ADDED),
    "two patterns": (lambda: split_twice(), NOT_SPLIT),
    "a line's beginning": (lambda: split(r"^a|[\s\S]"), MEANING),
    "a possessive count": (lambda: split(r"\p{N}{1,3}+|[\s\S]"), MEANING),
    "a set of classes": (lambda: split(r"[a-z&&b]|[\s\S]"), MEANING),
    "a flag for the rest": (lambda: split(r"(?i)'s|[\s\S]"), MEANING),
    "words": (lambda: split(r"\w+|[\s\S]"), MEANING),
    "a part of the text": (lambda: split(r"\p{L}+"), "it gives other ids for "),
}


def split_twice() -> Pipeline:
    pipeline = byte_level()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (r"\p{N}", r"\p{L}+|[\s\S]")]
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return pipeline


@pytest.mark.parametrize("name", OTHERS)
def test_what_tiktoken_may_not_run_is_left_to_the_library(name: str):
    pipeline, reason = OTHERS[name]
    library = made(pipeline(), "</s>" if name == "characters" else EOT)
    chosen, line = fastest(library, TEXTS)
    assert chosen is library
    assert line.startswith(f"tokenizing with the library tokenizers, not tiktoken: {reason}")


def test_two_tokens_of_one_id_are_left_to_the_library():
    tree = json.loads(byte_level().to_str())
    tree["model"]["vocab"]["unused"] = 399
    library = HfTokenizer(json.dumps({"eot_token": EOT, "tokenizer": json.dumps(tree)}).encode())
    chosen, line = fastest(library, TEXTS)
    assert chosen is library
    assert line.endswith("not tiktoken: its vocabulary lacks bytes, or two tokens have one id")


def test_a_difference_that_only_the_corpus_shows_is_found():
    library = made(split(r"(?!lqz)[\s\S]"))
    assert isinstance(fastest(library, TEXTS)[0], TiktokenTokenizer)
    chosen, line = fastest(library, [*TEXTS, "Say lqz."])
    assert chosen is library
    assert line == "tokenizing with the library tokenizers, not tiktoken: it gives other ids for ' lqz.'"


def without_last_merge(tree: dict[str, Any]) -> None:
    first, second = tree["model"]["merges"].pop()
    assert tree["model"]["vocab"][first + second] == 399


def test_a_token_without_merges_is_not_made():
    pipeline = byte_level()
    library = edited(pipeline, without_last_merge)
    text = pipeline.decode([399])
    fast = TiktokenTokenizer(library)
    assert fast.encode(text) == library.encode(text) != [399]
    assert TiktokenTokenizer(made(pipeline)).encode(text) == [399]


def test_a_token_that_is_only_looked_up_must_not_be_made_of_two():
    library = edited(KINDS["Llama 3"](), without_last_merge)
    with pytest.raises(UnsuitableError, match="no merges make its token '"):
        TiktokenTokenizer(library)


def test_without_tiktoken_the_library_runs_and_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    library = made(byte_level())
    chosen, line = fastest(library, TEXTS)
    assert chosen is library
    hint = "it is not installed; run pip install '.[train]' in a checkout of tost_lm"
    assert line == f"tokenizing with the library tokenizers, not tiktoken: {hint}"
    sentencepiece = SentencePieceTokenizer(train_sentencepiece(TEXTS, 300))
    assert fastest(sentencepiece, TEXTS) == (sentencepiece, "")
