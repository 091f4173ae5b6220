"""The harness's scores and texts equal ours on the same files."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from evaluations import scored
from lm_eval.api.instance import Instance
from local_tasks import run_local_task

import tost_lm
from tost_lm.checkpointing.format import write_checkpoint
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import CheckpointError, TostError
from tost_lm.eval.lm_eval import HarnessModel
from tost_lm.inference.generation import GREEDY, Continuation
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.requests import Likelihoods
from tost_lm.model.streaming import prefill
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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "pretrained is missing; give pretrained=RUN"),
        ("pretrained={},revision=main", "unknown argument: revision"),
        ("pretrained={},max_length=17", r"max_length=17: not an integer from 1 to the model's positions \(16\)"),
    ],
)
def test_invalid_arguments_are_refused(make_export, arguments: str, problem: str):
    with pytest.raises(TostError, match=problem):
        HarnessModel.create_from_arg_string(arguments.format(make_export()))


@pytest.mark.quick
def test_texts_are_ours(make_export: Callable[..., Path], tokenizer: Tokenizer):
    """Contexts of several lengths in one batch; a long one loses its beginning."""
    folder, tokens = make_export(), 9
    model, texts, expected = tost_lm.load(folder), ("The page", "No. They say", TEXT), []
    for text in texts:
        ids = tokenizer.encode(text)[-(WINDOW - tokens) :]
        output = prefill(model, [torch.tensor([ids])])
        expected.append("".join(Continuation(model, output, tokenizer, tokens, GREEDY, ["."])))
    assert len(set(expected)) == len(texts)
    harness = HarnessModel(str(folder), batch_size=2)
    of_token = harness.tok_decode
    # The library's decoder turns more of invalid UTF-8 into U+FFFD, and these random weights generate much of it.
    harness.tok_decode = lambda ids, **how: tokenizer.decode(ids) if isinstance(ids, list) else of_token(ids, **how)
    options = {"until": ["."], "max_gen_toks": tokens, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, options), number) for number, text in enumerate(texts)]
    assert harness.generate_until(requests, disable_tqdm=True) == expected


def test_scores_that_are_not_finite_are_refused(make_export: Callable[..., Path], tokenizer: Tokenizer, tmp_path: Path):
    model = tost_lm.load(make_export())
    model.norm.weight.data[0] = math.nan
    write_checkpoint(tmp_path / "broken", model.config, model.state_dict(), tokenizer)
    harness = HarnessModel(str(tmp_path / "broken"))
    with pytest.raises(CheckpointError, match=r"broken: its logits are not finite .*; use an earlier checkpoint"):
        harness.loglikelihood([Instance("loglikelihood", {}, ("No", "."), 0)], disable_tqdm=True)
    options = {"until": ["."], "max_gen_toks": 3, "do_sample": False}
    with pytest.raises(CheckpointError, match=r"broken: its logits are not finite"):
        harness.generate_until([Instance("generate_until", {}, ("No", options), 0)], disable_tqdm=True)


def native(folder: Path, task_name: str, path: Path, tokenizer: Tokenizer) -> dict:
    """Totals of `tost eval`."""
    task, model = scored(task_name), tost_lm.load(folder)
    examples = task.examples(path, tokenizer, WINDOW)
    rows = [task.row(one, Likelihoods(*score_requests(model, one.requests))) for one in examples]
    return task.totals(rows)


@torch.inference_mode()
def passages_with_greedy_ends(folder: Path, tokenizer: Tokenizer, count: int) -> list[str]:
    """Texts whose last word is one token, the most likely after the others."""
    found, draws, model = [], random.Random(0), tost_lm.load(folder)
    while len(found) < count:
        text = " ".join(draws.choices(TEXT.split(), k=3))
        ids = tokenizer.encode(text)
        (best, second), (token, _) = (x.tolist() for x in model(torch.tensor([ids])).logits[0, -1].topk(2))
        word = tokenizer.decode([token]) if token < tokenizer.vocab_size else ""
        if word.startswith(" ") and tokenizer.encode(text + word) == [*ids, token] and best - second > 1e-4:
            found.append(text + word)
    return found


def test_the_harness_s_scores_are_ours(make_export, tokenizer, tmp_path):
    folder = make_export()
    right = passages_with_greedy_ends(folder, tokenizer, 5)
    lambada, wiki = tmp_path / "lambada.jsonl", tmp_path / "wiki.raw"
    lambada.write_text(LAMBADA + "".join(json.dumps({"text": text}) + "\n" for text in right))
    wiki.write_text(WIKI)
    ours = native(folder, "lambada_openai@lm-eval", lambada, tokenizer)
    documents = [{"text": text} for text in passages(lambada)]
    theirs, _ = run_local_task(folder, "lambada/lambada_openai.yaml", documents, tmp_path / "1")
    assert theirs["acc,none"] == pytest.approx(ours["accuracy"], rel=FLOAT32_REORDERED)
    assert theirs["acc_stderr,none"] == pytest.approx(ours["accuracy_standard_error"], rel=FLOAT32_REORDERED)
    assert math.log(theirs["perplexity,none"]) == pytest.approx(ours["nats_per_word"], rel=FLOAT32_REORDERED)
    assert ours["accuracy"] == 5 / 35
    ours = native(folder, "wikitext2@lm-eval", wiki, tokenizer)
    documents = [{"page": page} for page in pages(wiki)]
    theirs, _ = run_local_task(folder, "wikitext/wikitext.yaml", documents, tmp_path / "2")
    assert theirs["bits_per_byte,none"] == pytest.approx(ours["bits_per_byte"], rel=FLOAT32_REORDERED)
    words = ours["nats"] / ours["words"]
    assert math.log(theirs["word_perplexity,none"]) == pytest.approx(words, rel=FLOAT32_REORDERED)
