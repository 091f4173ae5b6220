"""HarnessModel equals one pass per token, and the harness's scores equal ours on the same files."""

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from evaluations import scored
from lm_eval.api.instance import Instance, OutputType
from lm_eval.api.model import CachingLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from local_tasks import run_local_task
from shared_data import GPT2_BPE, SHARED, needs_shared

import tost_lm
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.data.tokenizers.gpt2 import gpt2_tokenizer
from tost_lm.errors import ConfigError, DataError, TostError
from tost_lm.eval.lm_eval import HarnessModel
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import Likelihoods
from tost_lm.tasks.missing_word import passages
from tost_lm.tasks.perplexity import pages
from tost_lm.testing import FLOAT32_REORDERED

WINDOW = 16
TEXT = "Page 7. The lines say little!  Do they? No. They are short lines, and this page is long.\n\nSo it is."
LAMBADA = "".join(
    json.dumps({"text": " ".join(TEXT.split()[first : first + words])}) + "\n"
    for first in range(10)
    for words in (2, 6, 9)
)
WIKI = "".join(
    f" = Page {number} = \n \n They say little , do they ? No . \n = = Part = = \n {TEXT * number} \n \n"
    for number in range(4)
)
TASKS = {
    "lambada_openai@lm-eval": "lambada/lambada_openai.yaml",
    "wikitext2@lm-eval": "wikitext/wikitext.yaml",
}


def requests_of(method: OutputType, *arguments: tuple) -> list[Instance]:
    return [Instance(method, {}, one, number) for number, one in enumerate(arguments)]


@torch.inference_mode()
def brute_force(lm: HarnessModel, context: list[int], target: list[int]) -> tuple[float, bool]:
    """Log-likelihood by one forward pass per token, and whether each token is the most likely."""
    ids, total, is_greedy = list(context), 0.0, True
    for token in target:
        logits_V = lm.model(torch.tensor([ids])).logits[0, -1]
        total += torch.log_softmax(logits_V.double(), dim=-1)[token].item()
        is_greedy &= int(logits_V.argmax()) == token
        ids.append(token)
    return total, is_greedy


@torch.inference_mode()
def most_likely(lm: HarnessModel, ids: list[int]) -> int:
    logits_V = lm.model(torch.tensor([ids])).logits[0, -1, : lm.text_tokenizer.vocab_size]
    best, second = logits_V.topk(2).values
    assert best - second > 1e-4, "two ids are equally likely, so the comparison is void"
    return int(logits_V.argmax())


def test_a_long_context_is_truncated_on_the_left(make_export):
    lm = HarnessModel(str(make_export()))
    encode = lm.text_tokenizer.encode
    pairs = [("", "The page"), ("Page 7. The", " lines"), ("The lines  ", "of"), (TEXT, " little"), ("No.", TEXT[:24])]
    expected = []
    for context, continuation in pairs:
        ids, target = [lm.text_tokenizer.eot], encode(continuation)
        if context:
            ids, target = encode(context.rstrip()), encode(context + continuation)[len(encode(context.rstrip())) :]
        expected.append(brute_force(lm, ids[len(ids) + len(target) - WINDOW - 1 if len(ids) > 9 else 0 :], target))
    found = lm.loglikelihood(requests_of("loglikelihood", *pairs))
    assert len(encode(TEXT)) > WINDOW
    np.testing.assert_allclose([total for total, _ in found], [total for total, _ in expected], rtol=FLOAT32_REORDERED)
    assert [is_greedy for _, is_greedy in found] == [False] * len(pairs)


def test_greedy_continuations_are_marked(make_export):
    lm = HarnessModel(str(make_export()))
    pairs = []
    for end in range(1, 20):
        context = TEXT[:end].rstrip()
        ids = lm.text_tokenizer.encode(context)
        token = most_likely(lm, ids)
        text = lm.text_tokenizer.decode([token])
        if lm.text_tokenizer.encode(context + text) == [*ids, token]:
            pairs += [(context, text), (context, "?" if text != "?" else "!")]
    assert pairs
    found = lm.loglikelihood(requests_of("loglikelihood", *pairs))
    assert [is_greedy for _, is_greedy in found] == [True, False] * (len(pairs) // 2)


def test_rolling_windows_are_the_harness_s(make_export):
    lm = HarnessModel(str(make_export()))
    texts = ["", "No.", TEXT, TEXT * 2]
    expected = []
    for text in texts:
        ids = lm.text_tokenizer.encode(text)
        windows = map(make_disjoint_window, get_rolling_token_windows(ids, lm.text_tokenizer.eot, WINDOW, 1))
        expected.append(sum(brute_force(lm, context, target)[0] for context, target in windows))
    found = lm.loglikelihood_rolling(requests_of("loglikelihood_rolling", *[(text,) for text in texts]))
    np.testing.assert_allclose(found, expected, rtol=FLOAT32_REORDERED)


@pytest.mark.quick
@pytest.mark.parametrize("batch_size", [1, "3", "auto", "auto:4"])
def test_scores_do_not_depend_on_the_batch(make_export, batch_size):
    folder, pairs = str(make_export()), [("No", "."), ("", TEXT[:20]), (TEXT[:40], " it")]
    requests = requests_of("loglikelihood", *pairs)
    expected = HarnessModel(folder).loglikelihood(requests)
    found = HarnessModel(folder, batch_size).loglikelihood(requests)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=FLOAT32_REORDERED)


@pytest.mark.parametrize(
    ("settings", "limited"), [({}, True), ({"positions": "sinusoidal", "tssa": {"denom_bias": "head"}}, False)]
)
def test_generation_is_greedy_up_to_a_stop_or_the_limit(make_export, settings: dict, limited: bool):
    lm = HarnessModel(str(make_export(**settings)))
    for context in ("", "Page 7.", TEXT):
        ids = lm.text_tokenizer.encode(context) or [lm.text_tokenizer.eot]
        ids = ids[-(WINDOW - 9) :] if limited else ids
        start = len(ids)
        for _ in range(9):
            ids.append(most_likely(lm, ids))
        text = lm.text_tokenizer.decode(ids[start:])
        assert len(set(ids[start:])) > 2
        stops = [text[6:8], text[3:5]]
        generated = lm.generate_until(
            requests_of(
                "generate_until",
                (context, {"until": [], "max_gen_toks": 9}),
                (context, {"until": [*stops, "", "never"], "max_gen_toks": 9, "do_sample": False, "temperature": 1}),
                (context, {"until": stops[0], "max_new_tokens": 9, "temperature": 0.0, "top_p": 0.5}),
            )
        )
        assert generated == [text, text[: min(map(text.index, stops))], text[: text.index(stops[0])]]


def test_generation_ends_at_the_end_of_text(make_export):
    lm = HarnessModel(str(make_export()))
    [text] = lm.generate_until(requests_of("generate_until", ("Page", {"max_gen_toks": 9})))
    ids = lm.text_tokenizer.encode("Page")
    for _ in range(3):
        ids.append(most_likely(lm, ids))
    lm.text_tokenizer.eot = ids[-1]
    [shorter] = lm.generate_until(requests_of("generate_until", ("Page", {"max_gen_toks": 9})))
    first = ids.index(ids[-1])
    assert shorter == lm.text_tokenizer.decode(ids[len(lm.text_tokenizer.encode("Page")) : first])
    assert text.startswith(shorter)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "pretrained is missing; give pretrained=RUN"),
        ("pretrained={},revision=main", "unknown argument: revision"),
        ("pretrained={},batch_size=0", "--batch_size 0: not a positive integer; give one, or auto"),
        ("pretrained={},device=abacus", "--device abacus: .*; give cpu or cuda"),
    ],
)
def test_invalid_arguments_are_refused(make_export, arguments: str, problem: str):
    with pytest.raises(TostError, match=problem):
        HarnessModel.create_from_arg_string(arguments.format(make_export()))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"temperature": 1.0, "do_sample": True, "min_p": 0.5}, "does not support: min_p=0.5"),
        ({"temperature": 1.0, "top_p": 0.0, "max_gen_toks": 3}, "invalid; set temperature"),
        ({"num_beams": 4}, "does not support: num_beams=4; give --gen_kwargs num_beams=1"),
        ({}, "exceed the model's 16 positions: 256; give --gen_kwargs max_gen_toks=N below 16"),
    ],
)
def test_unsupported_generation_settings_are_refused(make_export, settings: dict, problem: str):
    lm = HarnessModel(str(make_export()))
    with pytest.raises(ConfigError, match=problem):
        lm.generate_until(requests_of("generate_until", ("Page", settings)))


def test_requests_without_a_score_are_refused(make_export):
    lm = HarnessModel(str(make_export()))
    with pytest.raises(DataError, match="continuation without a token after 'The page': ''"):
        lm.loglikelihood(requests_of("loglikelihood", ("The page", "")))
    with pytest.raises(ConfigError, match="more than the model's positions"):
        lm.loglikelihood(requests_of("loglikelihood", ("The page", TEXT)))
    with pytest.raises(ConfigError, match="no chat template"):
        lm.apply_chat_template([])


def test_several_ranks_refuse_a_device_and_a_cache(make_export, monkeypatch):
    folder = str(make_export())
    lm = HarnessModel(folder, device="cpu")
    monkeypatch.setattr(HarnessModel, "ranks", Ranks(0, mesh=cast(Any, "of two ranks")))
    with pytest.raises(ConfigError, match="--device cpu: each rank has its own device"):
        HarnessModel(folder, device="cpu")
    with pytest.raises(ConfigError, match="--use_cache works on one rank only"):
        CachingLM(lm, f"{folder}/cache.db")


def native(folder: Path, task_name: str, path: Path, tokenizer: Tokenizer) -> dict:
    """Totals of `tost eval`."""
    task, model = scored(task_name), tost_lm.load(folder)
    examples = task.examples(path, tokenizer, WINDOW)
    rows = [task.row(one, Likelihoods(*score_requests(model, one.requests))) for one in examples]
    return task.totals(rows)


def harness(folder: Path, task_name: str, documents: list[dict], place: Path) -> dict:
    """Results of the harness's own task on our documents."""
    return run_local_task(folder, TASKS[task_name], documents, place)[0]


def check_parity(folder: Path, tokenizer: Tokenizer, lambada: str, wiki: str, place: Path) -> float:
    """Compare both sides; returns the accuracy."""
    (place / "lambada.jsonl").write_text(lambada)
    (place / "wiki.raw").write_text(wiki)
    ours = native(folder, "lambada_openai@lm-eval", place / "lambada.jsonl", tokenizer)
    theirs = harness(
        folder, "lambada_openai@lm-eval", [{"text": text} for text in passages(place / "lambada.jsonl")], place / "1"
    )
    assert theirs["acc,none"] == pytest.approx(ours["accuracy"], rel=FLOAT32_REORDERED)
    assert theirs["acc_stderr,none"] == pytest.approx(ours["accuracy_standard_error"], rel=FLOAT32_REORDERED)
    assert math.log(theirs["perplexity,none"]) == pytest.approx(ours["nats_per_word"], rel=FLOAT32_REORDERED)
    accuracy = ours["accuracy"]
    ours = native(folder, "wikitext2@lm-eval", place / "wiki.raw", tokenizer)
    theirs = harness(folder, "wikitext2@lm-eval", [{"page": page} for page in pages(place / "wiki.raw")], place / "2")
    assert theirs["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=FLOAT32_REORDERED)
    assert math.log(theirs["word_perplexity,none"]) == pytest.approx(
        ours["nats"] / ours["words"], rel=FLOAT32_REORDERED
    )
    return accuracy


@torch.inference_mode()
def passages_with_greedy_ends(lm: HarnessModel, count: int) -> list[str]:
    """Texts whose last word is one token, the most likely after the others."""
    found, draws, tokenizer = [], random.Random(0), lm.text_tokenizer
    while len(found) < count:
        text = " ".join(draws.choices(TEXT.split(), k=3))
        ids = tokenizer.encode(text)
        best, second = lm.model(torch.tensor([ids])).logits[0, -1].topk(2)[0]
        token = int(lm.model(torch.tensor([ids])).logits[0, -1].argmax())
        word = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
        if word.startswith(" ") and tokenizer.encode(text + word) == [*ids, token] and best - second > 1e-4:
            found.append(text + word)
    return found


def test_the_harness_s_scores_are_ours(make_export, tokenizer, tmp_path):
    folder = make_export()
    right = passages_with_greedy_ends(HarnessModel(str(folder)), 5)
    lambada = LAMBADA + "".join(json.dumps({"text": text}) + "\n" for text in right)
    assert check_parity(folder, tokenizer, lambada, WIKI, tmp_path) == 5 / 35


@needs_shared
def test_the_harness_s_scores_are_ours_on_the_real_texts(make_export, tmp_path):
    tokenizer = gpt2_tokenizer(GPT2_BPE)
    lambada = gzip.decompress((SHARED / "eval/lambada_test.jsonl.gz").read_bytes()).decode().split("\n")[:100]
    wiki = gzip.decompress((SHARED / "eval/wiki.test.raw.gz").read_bytes()).decode().split("\n")[:80]
    check_parity(make_export(tokenizer), tokenizer, "\n".join(lambada) + "\n", "\n".join(wiki), tmp_path)
