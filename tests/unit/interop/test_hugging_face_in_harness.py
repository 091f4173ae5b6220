"""A Hugging Face model by our scorer and by the harness's own class for such models: the same log-likelihoods."""

from typing import Any

import numpy as np
import torch
from lm_eval.api.instance import Instance, OutputType
from lm_eval.models.huggingface import HFLM
from shared_data import GPT2_BPE, needs_shared
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from tost_lm.inference.hugging_face import HuggingFaceLM, HuggingFaceTokenizer
from tost_lm.inference.likelihood import score_requests
from tost_lm.inference.requests import disjoint_windows, left_truncated
from tost_lm.testing import FLOAT32_REORDERED

PAIRS = [
    ("He saw", " it"),
    ("a long text " * 12 + "and", " words of it"),
    ("One", " two, three"),
    ("", "Nothing before"),
]
HARNESS_CLASS: Any = HFLM
TEXT = "Some text, which is longer than a window; the rest of it is read in other windows. " * 3


def requests_of(method: OutputType, *arguments: tuple) -> list[Instance]:
    return [Instance(method, {}, one, number) for number, one in enumerate(arguments)]


@needs_shared
def test_gpt2_has_the_scores_of_the_harness():
    torch.manual_seed(0)
    settings = GPT2Config(n_positions=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    model = GPT2LMHeadModel(settings).eval()
    theirs: Any = GPT2Tokenizer(vocab=str(GPT2_BPE / "encoder.json"), merges=str(GPT2_BPE / "vocab.bpe"))
    harness = HARNESS_CLASS(pretrained=model, tokenizer=theirs, batch_size=2, device="cpu")
    expected = [nats for nats, _ in harness.loglikelihood(requests_of("loglikelihood", *PAIRS), disable_tqdm=True)]
    expected += harness.loglikelihood_rolling(requests_of("loglikelihood_rolling", (TEXT,)), disable_tqdm=True)

    tokenizer, ours = HuggingFaceTokenizer(theirs, ""), HuggingFaceLM(model)
    requests = []
    for context, target in PAIRS:
        before = tokenizer.encode(context) or [tokenizer.eot]
        requests.append(left_truncated(np.array([*before, *tokenizer.encode(target)]), len(before), 24))
    windows = list(disjoint_windows(tokenizer.encode_array(TEXT), tokenizer.eot, 24, fill_last=True))
    nats = score_requests(ours, [*requests, *windows]).nats
    found = [*-nats[: len(PAIRS)], -nats[len(PAIRS) :].sum()]
    np.testing.assert_allclose(found, expected, rtol=FLOAT32_REORDERED)
