"""Results of two tiny models with fixed weights in float64, which change when a protocol or the scorer changes."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from evaluations import FILES, scored
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.inference.hugging_face import HuggingFaceLM
from tost_lm.inference.ranks import Ranks
from tost_lm.tasks.scored import rows_of

pytestmark = pytest.mark.quick

GOLDEN: dict[str, dict[str, float]] = {
    "wikitext2@hf-stride10": {"tost": 706.8375066548083, "gpt2": 855.6584617734095},
    "wikitext2@lm-eval": {"tost": 530.0290670131624, "gpt2": 636.1296870216246},
    "lambada_openai@lm-eval": {"tost": 62.16579754012815, "gpt2": 79.94321521162206},
    "lambada_openai@last-token": {"tost": 15.400909279337526, "gpt2": 12.257777973924416},
    "ptb@megatron": {"tost": 214.65482683470748, "gpt2": 278.5288944074743},
    "cbt_cn@gpt2": {"tost": 483.45483932016793, "gpt2": 614.1089341295586},
}
"""Summed nats of all rows."""


Model = TypeVar("Model", bound=nn.Module)


class Bytes(Tokenizer):
    """An id for each byte; 256 is the end of text."""

    eot, vocab_size = 256, 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@torch.no_grad()
def fixed(model: Model) -> Model:
    """Weights that do not depend on the version of torch."""
    draws = np.random.default_rng(0)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.from_numpy(draws.normal(size=tuple(parameter.shape)))
        parameter.copy_(1 + drawn / 10 if "ln" in name or "norm" in name else drawn / 2)
    return model.double().eval()


def gpt2() -> HuggingFaceLM:
    settings = GPT2Config(vocab_size=257, n_positions=24, n_embd=8, n_layer=2, n_head=2, eos_token_id=256)
    return HuggingFaceLM(fixed(GPT2LMHeadModel(settings)))


@pytest.mark.parametrize("task", list(GOLDEN))
@pytest.mark.parametrize("name", ["tost", "gpt2"])
def test_results_are_unchanged(name: str, task: str, make_model, tmp_path: Path):
    model = gpt2() if name == "gpt2" else fixed(make_model("TA", vocab_size=257, max_positions=24, width=8))
    measured = scored(task)
    path = tmp_path / "file"
    path.write_text(FILES[measured.data_set.name])
    examples = measured.examples(path, Bytes(b""), model.config.context_length)
    rows = rows_of(Ranks(), model, measured, examples, 100)
    nats = float(np.sum([np.sum(row["nats"]) for row in rows]))
    assert nats == pytest.approx(GOLDEN[task][name], rel=1e-9)
