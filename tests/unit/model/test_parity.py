"""The model against a plain transcription of the published formulas, in float64, with every gradient.

LayerScale is drawn near 1 and temp and denom_bias at random: at the published 1e-5 a wrong sign would hide.
"""

import math

import pytest
import torch
from torch import Tensor

from tost_lm.config import validate
from tost_lm.model import ModelConfig, TostLM

pytestmark = pytest.mark.quick

LAYERS, HEADS, WIDTH, VOCAB, POSITIONS = 2, 3, 12, 17, 8


def published_loss(p: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and loss from named weights, written from the formulas with nothing of ours but the names."""
    T = tokens.shape[1]
    x = p["embedding.weight"][tokens] + p["positions.weight"][:T]
    for i in range(LAYERS):
        q = {name.removeprefix(f"blocks.{i}."): value for name, value in p.items() if name.startswith(f"blocks.{i}.")}
        w = (layer_norm(x, q["mixer_norm.weight"]) @ q["mixer.in_proj.weight"].T).unflatten(-1, (HEADS, -1))
        w_sq = w.movedim(2, 1) ** 2  # [B, H, T, D]
        lower = torch.ones(T, T, dtype=x.dtype).tril()  # sums over s ≤ t as a matrix
        share = w_sq / (lower @ w_sq).clamp(min=1e-12) + q["mixer.denom_bias"][:, :T, None]
        scores = share.sum(-1) * q["mixer.temp"][:, None]  # [B, H, T]
        pi = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True)
        dots = (lower @ (pi[..., None] * w_sq)) / (pi @ lower.T + 1e-8)[..., None]
        y = -(pi[..., None] * w.movedim(2, 1)) * (1 / (1 + dots))
        y = y.movedim(1, 2).flatten(-2) @ q["mixer.out_proj.weight"].T
        x = x + q["mixer_scale.gamma"] * y
        h = layer_norm(x, q["mlp_norm.weight"]) @ q["mlp.in_proj.weight"].T
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        x = x + q["mlp_scale.gamma"] * (h @ q["mlp.out_proj.weight"].T)
    logits = layer_norm(x, p["norm.weight"]) @ p["embedding.weight"].T
    log_p = logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))
    return logits, -log_p.gather(-1, labels[..., None]).mean()


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight


def drawn_model() -> TostLM:
    torch.manual_seed(0)
    settings = {"layers": LAYERS, "heads": HEADS, "width": WIDTH, "vocab_size": VOCAB, "max_positions": POSITIONS}
    model = TostLM(validate(ModelConfig, settings, "test")).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = {"gamma": 0.2, "temp": 0.5, "denom_bias": 0.3}.get(name.rsplit(".", 1)[-1], 0.3)
            centre = 1.0 if parameter.dim() == 1 else 0.0  # norms, LayerScale and temp near 1
            parameter.copy_(centre + spread * torch.randn_like(parameter))
    return model


def largest_relative_difference(model: TostLM) -> float:
    """Over logits and every gradient: ‖ours − published‖ / ‖published‖."""
    tokens, labels = torch.randint(VOCAB, (2, 3, POSITIONS), generator=torch.Generator().manual_seed(1))
    out = model(tokens, labels=labels)
    assert out.loss is not None
    ours = torch.autograd.grad(out.loss, list(model.parameters()), materialize_grads=True)
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits, loss = published_loss(copies, tokens, labels)
    theirs = torch.autograd.grad(loss, list(copies.values()))
    pairs = [(out.logits, logits), *zip(ours, theirs, strict=True)]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


def test_logits_and_every_gradient_equal_the_published_formulas():
    model = drawn_model()
    assert len(list(model.parameters())) == 2 + 1 + LAYERS * 10
    assert largest_relative_difference(model) < 1e-10


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("pattern", ["T", "A", "TA"])
def test_a_later_token_changes_no_earlier_logit(pattern: str, window: int):
    settings = {"layers": 2, "heads": 2, "width": 16, "vocab_size": VOCAB, "max_positions": POSITIONS}
    settings |= {"pattern": pattern, "softmax": {"window": window}, "layer_scale": 1.0}
    model = TostLM(validate(ModelConfig, settings, "test"))
    tokens = torch.randint(VOCAB, (2, POSITIONS))
    before = model(tokens).logits
    for t in range(1, POSITIONS):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCAB
        after = model(changed).logits
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])
