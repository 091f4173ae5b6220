"""Coding rates compared with explicit determinants, the bound and its equality, and the gradient of R_var."""

import math

import pytest
import torch
from torch import Tensor

from experiments.analysis.coding_rate import Rates, RunningRates, expand_heads, layer_rates, orthonormal
from tost_lm.mixers.tssa.causal import causal_tssa
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.mixers.tssa.statistics import TssaState, token_scores
from tost_lm.model.block import Block


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rates(w_THD: Tensor, pi_TH: Tensor, ends: list[int]) -> Rates:
    running = RunningRates(ends)
    running.add(w_THD, pi_TH)
    return running.rates()


def full_rate(z_TC: Tensor, pi_TH: Tensor) -> Tensor:
    return rates(expand_heads(z_TC, pi_TH), pi_TH, [len(z_TC)]).coding[0]


def written_out(w_THD: Tensor, pi_TH: Tensor) -> tuple[float, float]:
    """R_c and R_var, token by token and head by head."""
    tokens, heads, channels = w_THD.shape
    coding = variational = 0.0
    for h in range(heads):
        mass = float(pi_TH[:, h].sum())
        moment = sum(pi_TH[t, h] * torch.outer(w_THD[t, h], w_THD[t, h]) for t in range(tokens)) / mass
        assert isinstance(moment, Tensor)
        coding += 0.5 * mass / tokens * float(torch.logdet(torch.eye(channels, dtype=torch.float64) + moment))
        variational += 0.5 * mass / tokens * sum(math.log(1 + float(moment[i, i])) for i in range(channels))
    return coding, variational


def test_rates_of_prefixes_equal_explicit_determinants():
    w, pi = 3 * draw(40, 3, 5), draw(40, 3, seed=1).softmax(-1)
    ends = [1, 2, 17, 40]
    found = rates(w, pi, ends)
    for i, end in enumerate(ends):
        coding, variational = written_out(w[:end], pi[:end])
        assert float(found.coding[i]) == pytest.approx(coding, rel=1e-12)
        assert float(found.variational[i]) == pytest.approx(variational, rel=1e-12)


def test_the_operator_is_the_gradient_of_the_variational_rate():
    """y_t = −t · ∂R_var/∂w_t over the first t tokens with fixed memberships."""
    w = draw(1, 12, 3, 5)
    temp = torch.tensor([0.1, 0.2, 0.05], dtype=torch.float64)
    y, _ = causal_tssa(w, temp)
    pi = token_scores(w.square(), w.square().cumsum(1), temp, None).softmax(-1)[0]
    for end in (1, 5, 12):  # equal up to the 1e-8 that the operator adds to Σ Π
        leaf = w[0].clone().requires_grad_()
        [gradient] = torch.autograd.grad(rates(leaf, pi, [end]).variational[0], leaf)
        torch.testing.assert_close(
            -end * gradient[end - 1], y[0, end - 1], rtol=1e-7, atol=1e-9
        )  # the operator adds 1e-8 to Σ Π


@pytest.mark.parametrize("settings", [{}, {"layer_scale": 0.0, "bias": True}, {"pattern": "TA"}])
def test_rates_of_a_model_use_the_input_of_its_layers(float64_model, settings: dict):
    model, tokens = float64_model(**settings), torch.randint(50, (33,), generator=torch.Generator().manual_seed(1))
    found = layer_rates(model, tokens)
    with torch.no_grad():
        states = model(tokens[None]).state
        assert states is not None
        x = torch.nn.functional.embedding(tokens, model.embedding.weight)
        assert model.positions is not None
        x = x + model.positions.weight[:33]
    of_tssa = [layer for layer in states.layers if isinstance(layer, TssaState)]
    assert len(found) == len(of_tssa) == (1 if "pattern" in settings else 2)
    for layer, state in zip(found, of_tssa, strict=True):
        diagonal = state.weighted_energy[0] / state.mass[0][:, None]
        expected = 0.5 * (state.mass[0] / 33 * diagonal.log1p().sum(-1)).sum()
        assert float(layer["variational"]) == pytest.approx(float(expected), rel=1e-9)
        assert layer["coding_by_prefix"].shape == (4,)  # 8, 16, 32, 33
    # The first layer, by hand.
    block = model.blocks[0]
    assert isinstance(block, Block)
    mixer, norm = block.mixer, block.mixer_norm
    assert isinstance(mixer, TssaMixer)
    w = lambda x_TC: mixer.in_proj(norm(x_TC)).unflatten(-1, (4, -1))
    bias, temp = mixer.denom_bias, mixer.temp
    bias = None if bias is None else bias.T[None, :33]
    with torch.no_grad():
        w_sq = w(x)[None].square()
        pi = token_scores(w_sq, w_sq.cumsum(1), temp, bias).softmax(-1)[0]
        mixed, _ = causal_tssa(w(x)[None], temp, None if bias is None else bias.mT)
        after = x + block.mixer_scale(mixer.out_proj(mixed.flatten(-2))[0])
        z = norm(x)
        bases = orthonormal(mixer.in_proj.weight.unflatten(0, (4, -1)))
    names, rate = ("coding", "variational"), found[0]
    for measured, of in (([rate[x] for x in names], w(x)), ([rate[x] + rate[f"{x}_change"] for x in names], w(after))):
        torch.testing.assert_close(tuple(map(float, measured)), written_out(of.detach(), pi))
    in_bases = written_out(torch.einsum("tc,hdc->thd", z, bases), pi)
    torch.testing.assert_close(tuple(float(rate[f"orthonormal_{x}"]) for x in names), in_bases)
    torch.testing.assert_close(rate["full"], full_rate(z, pi))
