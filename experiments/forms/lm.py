"""A small language model around any mixers, with equal parameters for all of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, linear

from experiments.forms.mixers import MIXERS, Form, Mixer
from experiments.mqar import PUBLISHED_WIDTH
from tost_lm.ops.initialization import INITIAL_STD


class Output(NamedTuple):
    logits: Tensor
    """[B, T, V]."""
    loss: Tensor | None
    """The mean over tokens with a label, in nats."""


class FormBlock(nn.Module):
    """A pre-norm block of a mixer and a GELU MLP; LayerScale begins at 1."""

    def __init__(self, form: Form, width: int, hidden: int):
        super().__init__()
        self.mixer_norm, self.mlp_norm = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.mixer = MIXERS[form.mixer](form, width)
        self.mixer_scale, self.mlp_scale = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.in_proj, self.out_proj = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.mixer_scale * self.mixer(self.mixer_norm(x_BTC))
        return x_BTC + self.mlp_scale * self.out_proj(gelu(self.in_proj(self.mlp_norm(x_BTC))))


class FormLM(nn.Module):
    """A decoder-only language model with a form for each layer, and the head tied to the embedding.

    The MLPs have so many channels that all models of a width and a number of layers have equally many parameters.
    """

    def __init__(self, forms: Sequence[Form], width: int, vocab_size: int):
        super().__init__()
        budget = len(forms) * (10 * width * width)
        mixing = sum(_parameters(MIXERS[form.mixer](form, width)) for form in forms)
        self.hidden = 2 * round((budget - mixing) / (2 * len(forms)) / (2 * width))
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(FormBlock(form, width, self.hidden) for form in forms)
        self.norm = nn.LayerNorm(width, bias=False)
        std = INITIAL_STD * math.sqrt(PUBLISHED_WIDTH / width)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                out = math.sqrt(2 * len(forms)) if name.endswith(".out_proj") else 1
                nn.init.normal_(module.weight, std=std / out)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Mixer):
                module.start()

    def forward(self, tokens_BT: Tensor, labels: Tensor | None = None, output_state: bool = False) -> "Output":
        """Arguments and results of `TostLM`, without a state."""
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = linear(self.norm(x_BTC), self.embedding.weight)
        if labels is None:
            return Output(logits_BTV, None)
        return Output(logits_BTV, cross_entropy(logits_BTV.flatten(0, 1), labels.flatten()))

    def parameter_count(self) -> int:
        return _parameters(self)


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
