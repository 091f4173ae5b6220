"""What a TSSA layer compresses: the coding rate of its tokens in the heads' subspaces, and the bound it descends.

With w_h = U_hᵀ z (and the bias, if there is one) what head h projects a token to, π_h its memberships, n_h = Σ_t π_h
and M_h = (1/n_h) Σ_t π_h w_h w_hᵀ over the first n tokens (Token Statistics Transformer, arXiv 2412.17810; ε and the
prefactor d/ε² are 1, as in the released operator, which also adds 1e-8 to that n_h; rates are in nats):

    R_c   = ½ Σ_h (n_h/n) log det(I + M_h)             the projected coding rate
    R_var = ½ Σ_h (n_h/n) Σ_i log(1 + (M_h)_ii)        its variational form

R_c ≤ R_var for any U (a determinant is at most the product of the diagonal), equal where the moments are diagonal. The
operator's 1/(1 + D) is the derivative of log(1 + x) at (M_h)_ii. Neither bounds the rate of the unprojected tokens, log
det(I + (1/n_h) Σ π_h z zᵀ), unless the U_h are orthonormal and together span z.

Shapes: T tokens, H heads, D channels per head, C channels, L layers of TSSA, P prefixes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import while_hooked
from tost_lm.analysis.memberships import memberships_of
from tost_lm.model import TostLM
from tost_lm.model.block import Block
from tost_lm.model.positions import position_ends
from tost_lm.model.tssa import TssaMixer

PIECE_TOKENS = 4096
LEAST_MASS = torch.finfo(torch.float64).tiny  # a head without tokens counts nothing


class Rates(NamedTuple):
    """Of the same tokens, in nats, float64."""

    coding: Tensor
    """R_c."""
    variational: Tensor
    """R_var, never below it but by rounding."""


class LayerRates(NamedTuple):
    """Of one TSSA layer that reads one sequence. Before and after its branch memberships and U are the same."""

    before: Rates
    """Of the tokens that the mixer reads, each […] by prefix [P]; the last prefix is the sequence."""
    after: Rates
    """Of what it would read once its branch is added."""
    orthonormal: Rates
    """Before, in the orthonormal bases nearest to the U_h, without bias; of the whole sequence, as is what follows."""
    full: Tensor
    """½ Σ_h (n_h/n) log det(I + (1/n_h) Σ π_h z zᵀ), of the tokens before they are projected."""


@torch.inference_mode()
def layer_rates(model: TostLM, tokens_T: Tensor) -> list[LayerRates]:
    """The rates of each TSSA layer while the model reads a sequence, at the prefixes of `position_ends`."""
    with recorded_rates(model, position_ends(len(tokens_T))) as recorded:
        model(tokens_T[None], output_state=False)
    return recorded


def summed_up(found: Sequence[Sequence[LayerRates]]) -> list[dict[str, Any]]:
    """For each layer, over the sequences: mean and standard error of each figure, plain numbers or by prefix a list.

    A change is that by the layer's branch, below 0 where it compresses; a gap is R_var − R_c.
    """
    return [
        {name: _over_sequences([_figures(layer)[name] for layer in layers]) for name in _figures(layers[0])}
        for layers in zip(*found, strict=True)
    ]


@contextmanager
def recorded_rates(model: TostLM, ends: Sequence[int]) -> Iterator[list[LayerRates]]:
    """Those of each TSSA layer, in the order in which they are computed while the model is called on one sequence."""
    recorded: list[LayerRates] = []
    blocks = [block for block in model.modules() if isinstance(block, Block) and isinstance(block.mixer, TssaMixer)]
    inputs: list[Tensor] = []

    def before(block: Any, arguments: Any) -> None:
        inputs.append(arguments[0])

    def after(block: Block, mixer: TssaMixer, arguments: Any, result: Any) -> None:
        z_BTC, state, places = arguments
        pi_TH = memberships_of(mixer, z_BTC, state, places)[0].double()
        moved_BTC = block.mixer_norm(inputs.pop() + block.mixer_scale(result[0]))
        recorded.append(_rates_of_layer(mixer, z_BTC[0], moved_BTC[0], pi_TH, ends))

    of_inputs = [block.register_forward_pre_hook(before) for block in blocks]
    of_mixers = [block.mixer.register_forward_hook(partial(after, block)) for block in blocks]
    with while_hooked(*of_inputs, *of_mixers):
        yield recorded


def rates(w_THD: Tensor, pi_TH: Tensor, ends: Sequence[int]) -> Rates:
    """R_c and R_var [P] of the first so many tokens, for each of `ends`, rising numbers from 1 on."""
    moments_PHDD, mass_PH = _moments(w_THD.double(), pi_TH.double(), ends)
    share_PH = mass_PH / torch.tensor(ends, dtype=torch.float64, device=mass_PH.device)[:, None] / 2
    moments_PHDD = moments_PHDD / mass_PH.clamp_min(LEAST_MASS)[..., None, None]
    variational_PH = moments_PHDD.diagonal(dim1=-2, dim2=-1).log1p().sum(-1)
    return Rates((share_PH * _log_det(moments_PHDD)).sum(-1), (share_PH * variational_PH).sum(-1))


def full_rate(z_TC: Tensor, pi_TH: Tensor) -> Tensor:
    """½ Σ_h (n_h/n) log det(I + (1/n_h) Σ π_h z zᵀ), head by head: a moment is [C, C]."""
    heads = [rates(z_TC[:, None], pi_T1, [len(z_TC)]).coding[0] for pi_T1 in pi_TH.split(1, dim=1)]
    return torch.stack(heads).sum()


def orthonormal(u_HDC: Tensor) -> Tensor:
    """The orthonormal bases nearest to the rows of each head's U, its polar factors."""
    left, _, right = torch.linalg.svd(u_HDC, full_matrices=False)
    return left @ right


def _figures(layer: LayerRates) -> dict[str, Tensor]:
    before, after = layer.before, layer.after
    return {
        "coding": before.coding[-1],
        "variational": before.variational[-1],
        "coding_change": after.coding[-1] - before.coding[-1],
        "variational_change": after.variational[-1] - before.variational[-1],
        "gap": before.variational[-1] - before.coding[-1],
        "orthonormal_coding": layer.orthonormal.coding,
        "orthonormal_variational": layer.orthonormal.variational,
        "full": layer.full,
        "coding_by_prefix": before.coding,
        "variational_by_prefix": before.variational,
        "variational_change_by_prefix": after.variational - before.variational,
    }


def _over_sequences(values: Sequence[Tensor]) -> dict[str, Any]:
    of_all_N = torch.stack(list(values))
    count = len(of_all_N)
    error = (of_all_N.std(0) / count**0.5).tolist() if count > 1 else None
    return {"mean": of_all_N.mean(0).tolist(), "standard_error": error}


def _rates_of_layer(mixer: TssaMixer, z_TC: Tensor, moved_TC: Tensor, pi_TH: Tensor, ends: Sequence[int]) -> LayerRates:
    before, after = (
        rates(mixer.in_proj(x_TC).unflatten(-1, (mixer.heads, -1)), pi_TH, ends) for x_TC in (z_TC, moved_TC)
    )
    z_TC = z_TC.double()
    basis_HDC = orthonormal(mixer.in_proj.weight.double().unflatten(0, (mixer.heads, -1)))
    in_bases = rates(torch.einsum("tc,hdc->thd", z_TC, basis_HDC), pi_TH, [len(z_TC)])
    return LayerRates(before, after, Rates(*(rate_P[0] for rate_P in in_bases)), full_rate(z_TC, pi_TH))


def _moments(w_THD: Tensor, pi_TH: Tensor, ends: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Σ π w wᵀ [P, H, D, D] and Σ π [P, H] of the first so many tokens."""
    _, heads, channels = w_THD.shape
    moment_HDD, mass_H = w_THD.new_zeros(heads, channels, channels), w_THD.new_zeros(heads)
    moments, masses = [], []
    for begin, end in pairwise([0, *ends]):
        for start in range(begin, end, PIECE_TOKENS):
            here = slice(start, min(end, start + PIECE_TOKENS))
            w_HtD = w_THD[here].transpose(0, 1)
            moment_HDD = moment_HDD + (w_HtD * pi_TH[here].T[..., None]).mT @ w_HtD
            mass_H = mass_H + pi_TH[here].sum(0)
        moments.append(moment_HDD)
        masses.append(mass_H)
    return torch.stack(moments), torch.stack(masses)


def _log_det(moments: Tensor) -> Tensor:
    """log det(I + M) of symmetric positive semidefinite matrices […, D, D]."""
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return 2 * torch.linalg.cholesky(identity + moments).diagonal(dim1=-2, dim2=-1).log().sum(-1)
