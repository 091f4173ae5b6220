"""Coding rates of the tokens in a TSSA layer: the projected coding rate and the variational form that TSSA descends.

Head h projects a token z to w_h = U_hᵀ z (plus the bias, if there is one). π_h are its memberships, n_h = Σ_t π_h and
M_h = (1/n_h) Σ_t π_h w_h w_hᵀ, summed over the first n tokens (Token Statistics Transformer, arXiv 2412.17810). Rates
are in nats. ε and the prefactor d/ε² are 1, as in the released operator, which also adds 1e-8 to n_h in M_h.

    R_c   = ½ Σ_h (n_h/n) log det(I + M_h)             the projected coding rate
    R_var = ½ Σ_h (n_h/n) Σ_i log(1 + (M_h)_ii)        its variational form

R_c ≤ R_var for any U, because a determinant is at most the product of the diagonal (Hadamard). They are equal where the
moments are diagonal. The operator's 1/(1 + D) is the derivative of log(1 + x) at (M_h)_ii. The rate of the unprojected
tokens is ½ Σ_h (n_h/n) log det(I + (1/n_h) Σ π_h z zᵀ). In orthonormal bases R_c is never above it, because the
eigenvalues of a projection interlace. R_var has no such bound.

Shapes: T tokens, H heads, D channels per head, C channels, L TSSA layers, P prefixes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.layers import LayerTile, project, run_in_tiles, tssa_mixers
from tost_lm.analysis.standard_errors import standard_error
from tost_lm.model import TostLM
from tost_lm.model.positions import position_ends
from tost_lm.model.tssa import TssaMixer

MIN_MASS = torch.finfo(torch.float64).tiny  # avoids 0/0 for a head without tokens


class Rates(NamedTuple):
    """Rates of the same tokens in nats, float64."""

    coding: Tensor
    """R_c."""
    variational: Tensor
    """R_var, at least R_c up to rounding."""


def branch_rates(model: TostLM, tokens_T: Tensor) -> list[dict[str, Tensor]]:
    """Rates of the mixer's input of each TSSA layer on a sequence, by name, in nats.

    A change is the effect of adding the layer's branch to the residual stream, with the same memberships and U: it is
    negative where the layer compresses. The gap is R_var − R_c. Rates by prefix [P] are at `position_ends`.
    """
    return _rates(_BranchRates, model, tokens_T)


def layer_rates(model: TostLM, tokens_T: Tensor) -> list[dict[str, Tensor]]:
    """As `branch_rates`, with reference rates of the whole sequence.

    The `orthonormal` rates use the orthonormal bases nearest to the U_h, without bias. `full` is the rate of the
    unprojected tokens. Each layer holds H·C² numbers in addition to the memory of `run_in_tiles`.
    """
    return _rates(_LayerRates, model, tokens_T)


def summarize_rates(found: Sequence[Sequence[dict[str, Tensor]]], documents_N: Tensor) -> list[dict[str, Any]]:
    """For each layer, mean and standard error of each rate over the sequences: numbers, or lists by prefix."""
    return [
        {name: _mean_and_error(torch.stack([rates[name] for rates in layers]), documents_N) for name in layers[0]}
        for layers in zip(*found, strict=True)
    ]


class RunningRates:
    """R_c and R_var of the first n tokens for each n of `ends`, which are increasing and at least 1.

    The tokens are added tile by tile. The state between tiles is one float64 moment per head.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = list(ends)
        self._count = 0
        self._moment_HDD = self._mass_H = torch.zeros(())
        self._found: list[Rates] = []

    def add(self, w_THD: Tensor, pi_TH: Tensor) -> None:
        """Add the next tokens."""
        while len(w_THD) and len(self._found) < len(self._ends):
            tokens = min(len(w_THD), self._ends[len(self._found)] - self._count)
            self._add_before_next_end(w_THD[:tokens].double(), pi_TH[:tokens].double())
            w_THD, pi_TH = w_THD[tokens:], pi_TH[tokens:]

    def rates(self) -> Rates:
        """The rates at all ends so far, each [P]."""
        coding, variational = zip(*self._found, strict=True)
        return Rates(torch.stack(coding), torch.stack(variational))

    def _add_before_next_end(self, w_THD: Tensor, pi_TH: Tensor) -> None:
        of_heads = zip(w_THD.unbind(1), pi_TH.T[..., None], strict=True)  # a weighted copy of one head at a time
        moments_HDD = torch.stack([(pi_T1 * w_TD).T @ w_TD for w_TD, pi_T1 in of_heads])
        self._moment_HDD, self._mass_H = self._moment_HDD + moments_HDD, self._mass_H + pi_TH.sum(0)
        self._count += len(w_THD)
        if self._count == self._ends[len(self._found)]:
            self._found.append(self._rates_here())

    def _rates_here(self) -> Rates:
        weight_H = self._mass_H / self._count / 2
        moment_HDD = self._moment_HDD / self._mass_H.clamp_min(MIN_MASS)[:, None, None]
        variational_H = moment_HDD.diagonal(dim1=-2, dim2=-1).log1p().sum(-1)
        return Rates((weight_H * _log_det(moment_HDD)).sum(), (weight_H * variational_H).sum())


def expand_heads(z_TC: Tensor, pi_TH: Tensor) -> Tensor:
    """z as [T, H, C], a view without copies."""
    return z_TC.double()[:, None].expand(-1, pi_TH.shape[1], -1)


def orthonormal(u_HDC: Tensor) -> Tensor:
    """The polar factor of each head's U: the nearest orthonormal basis."""
    left, _, right = torch.linalg.svd(u_HDC, full_matrices=False)
    return left @ right


def _mean_and_error(values_N: Tensor, documents_N: Tensor) -> dict[str, Any]:
    error = standard_error(values_N, documents_N)
    return {"mean": values_N.mean(0).tolist(), "standard_error": None if error is None else error.tolist()}


class _BranchRates:
    """Rates of `branch_rates` of one layer, tile by tile."""

    def __init__(self, mixer: TssaMixer, ends: Sequence[int]) -> None:
        self._before, self._after = RunningRates(ends), RunningRates(ends)

    def add(self, tile: LayerTile) -> None:
        after_BTC = tile.block.mixer_norm(tile.x_BTC + tile.branch)
        self._before.add(tile.projected[0], tile.pi[0])
        self._after.add(project(tile.mixer, after_BTC)[0], tile.pi[0])

    def rates(self) -> dict[str, Tensor]:
        before, after = self._before.rates(), self._after.rates()
        change_P = after.variational - before.variational
        return {
            "coding": before.coding[-1],
            "variational": before.variational[-1],
            "coding_change": after.coding[-1] - before.coding[-1],
            "variational_change": change_P[-1],
            "gap": before.variational[-1] - before.coding[-1],
            "coding_by_prefix": before.coding,
            "variational_by_prefix": before.variational,
            "variational_change_by_prefix": change_P,
        }


class _LayerRates(_BranchRates):
    """Rates of `layer_rates` of one layer, tile by tile."""

    def __init__(self, mixer: TssaMixer, ends: Sequence[int]) -> None:
        super().__init__(mixer, ends)
        self._basis_HDC = orthonormal(mixer.in_proj.weight.double().unflatten(0, (mixer.heads, -1)))
        self._orthonormal, self._full = RunningRates(ends[-1:]), RunningRates(ends[-1:])

    def add(self, tile: LayerTile) -> None:
        super().add(tile)
        z_TC, pi_TH = tile.z_BTC[0], tile.pi[0]
        self._orthonormal.add(torch.einsum("tc,hdc->thd", z_TC.double(), self._basis_HDC), pi_TH)
        self._full.add(expand_heads(z_TC, pi_TH), pi_TH)

    def rates(self) -> dict[str, Tensor]:
        coding, variational = self._orthonormal.rates()
        bases = {"orthonormal_coding": coding[0], "orthonormal_variational": variational[0]}
        return super().rates() | bases | {"full": self._full.rates().coding[0]}


@torch.inference_mode()
def _rates(kind: type[_BranchRates], model: TostLM, tokens_T: Tensor) -> list[dict[str, Tensor]]:
    ends = position_ends(len(tokens_T))
    layers = [kind(mixer, ends) for mixer in tssa_mixers(model)]
    run_in_tiles(model, tokens_T[None], lambda tile: layers[tile.layer].add(tile))
    return [layer.rates() for layer in layers]


def _log_det(moments: Tensor) -> Tensor:
    """log det(I + M) of symmetric positive semidefinite matrices […, D, D]."""
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return 2 * torch.linalg.cholesky(identity + moments).diagonal(dim1=-2, dim2=-1).log().sum(-1)
