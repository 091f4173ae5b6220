"""A Hugging Face model by our scorer and by the harness's own class for such models: the same log-likelihoods."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from tost_lm.evaluation.hugging_face import HuggingFaceLM, HuggingFaceTokenizer
from tost_lm.evaluation.likelihood import score_requests
from tost_lm.evaluation.windows import after_what_fits, disjoint_windows

BPE = Path(__file__).parents[4] / "shared/data/gpt2_bpe"
PAIRS = [
    ("He saw", " it"),
    ("a long text " * 12 + "and", " words of it"),
    ("One", " two, three"),
    ("", "Nothing before"),
]
TEXT = "Some text, which is longer than a window; the rest of it is read in other windows. " * 3


@pytest.mark.skipif(not BPE.is_dir(), reason="GPT-2's BPE files are not at hand")
def test_both_give_the_same():
    torch.manual_seed(0)
    settings = GPT2Config(n_positions=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5)
    model = GPT2LMHeadModel(settings).eval()
    theirs: Any = GPT2Tokenizer(vocab=str(BPE / "encoder.json"), merges=str(BPE / "vocab.bpe"))
    harness_class: Any = HFLM
    harness = harness_class(pretrained=model, tokenizer=theirs, batch_size=2, device="cpu")
    pairs = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    expected = [nats for nats, _ in harness.loglikelihood(pairs, disable_tqdm=True)]
    expected += harness.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (TEXT,), 0)], disable_tqdm=True)

    tokenizer, ours = HuggingFaceTokenizer(theirs), HuggingFaceLM(model)
    requests = []
    for context, target in PAIRS:
        before = tokenizer.encode(context) or [tokenizer.eot]
        requests.append(after_what_fits(np.array([*before, *tokenizer.encode(target)]), len(before), 24))
    windows = list(disjoint_windows(tokenizer.encode_array(TEXT), tokenizer.eot, 24, fill_last=True))
    nats = score_requests(ours, [*requests, *windows]).nats
    found = [*-nats[: len(PAIRS)], -nats[len(PAIRS) :].sum()]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
