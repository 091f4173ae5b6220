"""Tasks on hand-written test sets in the published formats, and on the real files where they exist."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
from evaluations import scored
from shared_data import SHARED, gpt2_tokenizer, needs_shared

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Likelihoods
from tost_lm.tasks.perplexity import detokenized_wikitext, pages, wikitext_rows
from tost_lm.tasks.scored import GPT2_SAMPLE, Example, is_gpt2_tokenizer
from tost_lm.tasks.task import Row

pytestmark = pytest.mark.quick

EOT, WINDOW = 0, 16


class Words(Tokenizer):
    """An id for each character; a space is part of the character after it."""

    eot, stop, vocab_size = EOT, EOT, 1 << 22

    def encode(self, text: str) -> list[int]:
        ids, space = [], 0
        for character in text:
            if character == " " and not space:
                space = 1 << 21
            else:
                ids.append(ord(character) + space)
                space = 0
        return ids + [ord(" ")] * bool(space)

    def decode(self, ids) -> str:
        return "".join(" " * (i >> 21) + chr(i & ((1 << 21) - 1)) for i in map(int, ids))


TOKENIZER = Words(b"")


def examples_of(name: str, path: Path, window: int = WINDOW) -> list[Example]:
    return list(scored(name).examples(path, TOKENIZER, window))


def rows_of(name: str, examples: list[Example], nats: list[list[float]], greedy: bool = False) -> list[Row]:
    rows = []
    for example, values in zip(examples, nats, strict=True):
        tokens = np.array([len(request.target) for request in example.requests])
        scores = Likelihoods(np.array(values), tokens, np.full(len(tokens), greedy))
        rows.append(scored(name).row(example, scores))
    return rows


def read(example: Example) -> list[tuple[str, str]]:
    """Context and target of each request as text; `|` is the end of text."""
    texts = [[TOKENIZER.decode(ids).replace("\0", "|") for ids in request] for request in example.requests]
    return [(context, target) for context, target in texts]


WIKI = """ 
 = One Title = 
 
 It was 2 @.@ 5 . 
 
 = = Part = = 
 
 The end , " so " it said . 
 = Other = 
 
 More . 
"""


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    (tmp_path / "wiki.test.raw").write_text(WIKI)
    return tmp_path / "wiki.test.raw"


def test_wikitext_rows_are_those_of_hugging_face(wiki: Path):
    text = "\n\n".join(wikitext_rows(wiki))
    assert text.startswith("\n\n = One Title = \n\n\n\n\n It was 2 @.@ 5 . \n\n\n")
    assert text.endswith(" More . \n")
    [*windows, last] = examples_of("wikitext2@hf-stride16", wiki)
    assert all(len(example.requests[0].target) == WINDOW - 1 for example in windows)
    tokens = sum(len(example.requests[0].target) for example in [*windows, last])
    rows = rows_of("wikitext2@hf-stride16", [*windows, last], [[2.0]] * (len(windows) + 1))
    totals = scored("wikitext2@hf-stride16").totals(rows)
    assert (totals["tokens"], totals["bytes"], totals["words"]) == (tokens, len(text), len(text.split()))
    assert totals["token_perplexity"] == pytest.approx(math.exp(2.0 * len(rows) / tokens))


def test_wikitext_pages_are_detokenized_and_counted_before(wiki: Path):
    first, second = pages(wiki)
    assert first.startswith(" = One Title = \n")
    assert second == " = Other = \n \n More . \n"
    assert detokenized_wikitext(first) == ' = One Title =\n\nIt was 2.5.\n\n== Part ==\n\nThe end, "so" it said. '
    assert detokenized_wikitext(second) == " = Other =\n\nMore.\n"
    examples = examples_of("wikitext2@lm-eval", wiki)
    assert [example.facts["bytes"] for example in examples] == [len(first), len(second)]
    [(context, target)] = read(examples[1])
    assert (context, target) == ("|", detokenized_wikitext(second))
    assert "".join(target for _, target in read(examples[0])) == detokenized_wikitext(first)


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("the dogs ' tails", "the dogs' tails"),
        ("1 @,@ 000 @.@ 5 @-@ inch", "1,000.5-inch"),
        ("so , he said ; no : yes ! why ? well . end", "so, he said; no: yes! why? well. end"),
        ("( a b ) [ c ] { d }", "(a b) [c] {d}"),
        ("say \" a b \" and ' c ' now", "say \"a b\" and 'c' now"),
        ("N and N dogs 's", "N and 1 dogs's"),
    ],
)
def test_wikitext_detokenization(page: str, text: str):
    assert detokenized_wikitext(page) == text


def test_standard_errors_of_perplexities(wiki: Path):
    examples = examples_of("wikitext2@lm-eval", wiki)
    nats = [[1.0 + number + len(request.target) for request in e.requests] for number, e in enumerate(examples)]
    totals = scored("wikitext2@lm-eval").totals(rows_of("wikitext2@lm-eval", examples, nats))
    error = totals["nats_per_token_standard_error"]
    assert error > 0
    for measure, count in (("token", "tokens"), ("word", "words"), ("byte", "bytes")):
        mean = totals["nats"] / totals[count]
        assert totals[f"{measure}_perplexity"] == pytest.approx(math.exp(mean))
        higher = math.exp(mean + error * totals["tokens"] / totals[count])
        found = totals[f"{measure}_perplexity_standard_error"]
        assert found == pytest.approx(higher - math.exp(mean), rel=0.2)


class Gpt2Ids(Words):
    """Encodes the sample of `is_gpt2_tokenizer` as GPT-2 does."""

    eot = 50256

    def encode(self, text: str) -> list[int]:
        return GPT2_SAMPLE if text.startswith("Hello world") else super().encode(text)


def test_each_token_of_nanogpts_file_is_scored_once(tmp_path: Path):
    ids = np.array([*range(1, 40), 50256], dtype="<u2")
    (tmp_path / "val.bin").write_bytes(ids.tobytes())
    measured = scored("owt@nanogpt")
    examples = measured.examples(tmp_path / "val.bin", Gpt2Ids(b""), WINDOW)
    assert np.concatenate([example.requests[0].target for example in examples]).tolist() == [*range(2, 40), 50256]
    assert [example.requests[0].context.tolist() for example in examples] == [[1], [17], [33]]
    with pytest.raises(DataError, match=r"has ids of GPT-2.s tokenizer, but the model has another; leave"):
        measured.examples(tmp_path / "val.bin", TOKENIZER, WINDOW)
    for data in (b"", b"abc", np.array([1, 50257], "<u2").tobytes(), b'{"text": "a b"}\n'):
        (tmp_path / "val.bin").write_bytes(data)
        with pytest.raises(DataError, match=r"wrong format, not ids of GPT-2's tokenizer .* give val\.bin"):
            measured.examples(tmp_path / "val.bin", Gpt2Ids(b""), WINDOW)


def lambada(tmp_path: Path, *texts: str) -> Path:
    path = tmp_path / "lambada.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode()))
    return path


def test_lambada_scores_the_last_word(tmp_path: Path):
    path = lambada(tmp_path, "He saw it", "A line end\u2028in it, and a long passage")
    short, long = examples_of("lambada_openai@lm-eval", path)
    assert read(short) == [("He saw", " it")]
    assert read(long)[0][1] == " passage"
    assert long.requests[0].inputs == WINDOW
    [(context, target), _] = [read(example)[0] for example in examples_of("lambada_openai@last-token", path)]
    assert (context, target) == ("He saw i", "t")
    rows = rows_of("lambada_openai@lm-eval", [short, long], [[1.0], [3.0]], greedy=True)
    totals = scored("lambada_openai@lm-eval").totals(rows)
    assert (totals["accuracy"], totals["word_perplexity"]) == (1.0, pytest.approx(math.exp(2.0)))
    assert rows[0] == {"word": "it", "tokens": 2, "nats": 1.0, "right": True}


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"text": "a b"}', "a b"], "line 2: wrong format, the file begins with .*; give JSON lines"),
        (['{"text": "a b"}', "", '{"text": "a b"}'], "line 2: wrong format"),
        (['{"texts": "a b"}'], 'line 1: no passage of two or more words under "text"'),
        (['{"text": "word"}'], 'line 1: no passage of two or more words under "text"'),
        (["[1]"], "line 1: no passage"),
        ([], "line 1: wrong format, the file begins with ''; give JSON lines"),
    ],
)
def test_malformed_lambada_lines_are_rejected(tmp_path: Path, lines: list[str], problem: str):
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(DataError, match=problem):
        examples_of("lambada_openai@lm-eval", path)


def test_ptb_is_measured_by_the_words_of_the_file(tmp_path: Path):
    (tmp_path / "ptb.test.txt").write_text(" no it was n't <unk> 's \n N N to N %\n cost $ N or # N \n either\\/or \n")
    examples = examples_of("ptb@megatron", tmp_path / "ptb.test.txt")
    text = "".join(target for example in examples for _, target in read(example))
    assert text == "no it wasn't ?'s\n1 1 to 1 %\ncost $1 or #1\neither/or"
    assert read(examples[0])[0][0] == "|"
    assert examples[0].facts["words"] == (6 + 1) + (5 + 1) + (6 + 1) + (1 + 1)


WRONG = {
    "wikitext2@lm-eval": ['{"text": "a b c"}\n', " no it was n't <unk> \n"],
    "wikitext2@hf-stride16": [" \n", " = One = \n It is <unk> . \n"],
    "ptb@megatron": [WIKI, '{"text": "a b c"}\n', "\n\n", "<mediawiki>\n<Page>"],
    "lambada_openai@lm-eval": [WIKI, "Some words.\nSome more.\n"],
    "lambada_standard@lm-eval": ["1 A b .\n2 C d .\n"],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_file_of_another_format_is_rejected(tmp_path: Path, name: str, text: str):
    (tmp_path / "file").write_text(text)
    with pytest.raises(DataError, match="file, line 1: wrong format, the file begins with ") as error:
        examples_of(name, tmp_path / "file")
    assert f"begins with {text[:30]!r}; give " in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_text_is_rejected(tmp_path: Path):
    (tmp_path / "wiki").write_bytes(b"one\ntwo \xff\n")
    with pytest.raises(DataError, match=r"wiki, line 2: not UTF-8 \(byte 0xff\)"):
        wikitext_rows(tmp_path / "wiki")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"text" * 1000)[:-20])
    with pytest.raises(DataError, match=r"cut\.gz: cannot be read"):
        wikitext_rows(tmp_path / "cut.gz")


def test_a_stride_longer_than_the_window_is_rejected(wiki: Path):
    with pytest.raises(DataError, match=r"wikitext2@hf-stride17: the stride is longer than a window of 16 tokens"):
        examples_of("wikitext2@hf-stride17", wiki)


@needs_shared
def test_counts_of_the_real_files():
    tokenizer = gpt2_tokenizer()
    wiki, passages = SHARED / "eval/wiki.test.raw.gz", SHARED / "eval/lambada_test.jsonl.gz"
    assert len(tokenizer.encode("\n\n".join(wikitext_rows(wiki)))) == 287_644
    assert is_gpt2_tokenizer(tokenizer)
    assert not is_gpt2_tokenizer(TOKENIZER)
    assert len(list(pages(wiki))) == 62
    examples = scored("lambada_openai@lm-eval").examples(passages, tokenizer, 1024)
    assert len(examples) == 5153
    assert sum(len(example.requests[0].target) == 1 for example in examples) == 4010
