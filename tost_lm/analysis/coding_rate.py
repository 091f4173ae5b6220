"""What a TSSA layer compresses: the coding rate of its tokens in the heads' subspaces, and the bound it descends.

With w_h = U_hᵀ z (and the bias, if there is one) what head h projects a token to, π_h its memberships, n_h = Σ_t π_h
and M_h = (1/n_h) Σ_t π_h w_h w_hᵀ over the first n tokens (Token Statistics Transformer, arXiv 2412.17810; ε and the
prefactor d/ε² are 1, as in the released operator, which also adds 1e-8 to that n_h; rates are in nats):

    R_c   = ½ Σ_h (n_h/n) log det(I + M_h)             the projected coding rate
    R_var = ½ Σ_h (n_h/n) Σ_i log(1 + (M_h)_ii)        its variational form

R_c ≤ R_var for any U (a determinant is at most the product of the diagonal), equal where the moments are diagonal. The
operator's 1/(1 + D) is the derivative of log(1 + x) at (M_h)_ii. Neither is a bound of the rate of the unprojected
tokens, ½ Σ_h (n_h/n) log det(I + (1/n_h) Σ π_h z zᵀ), but that in orthonormal bases R_c is never above it (eigenvalues
of a projection interlace).

Shapes: T tokens, H heads, D channels per head, C channels, L layers of TSSA, P prefixes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.analysis.errors import standard_error
from tost_lm.analysis.layers import LayerPiece, projected, read, tssa_mixers
from tost_lm.model import TostLM
from tost_lm.model.positions import position_ends
from tost_lm.model.tssa import TssaMixer

LEAST_MASS = torch.finfo(torch.float64).tiny  # a head without tokens counts nothing


class Rates(NamedTuple):
    """Of the same tokens, in nats, float64."""

    coding: Tensor
    """R_c."""
    variational: Tensor
    """R_var, never below it but by rounding."""


class BranchRates(NamedTuple):
    """Of one TSSA layer that reads one sequence. Before and after its branch memberships and U are the same."""

    before: Rates
    """Of the tokens that the mixer reads, each by prefix [P]; the last prefix is the sequence."""
    after: Rates
    """Of what it would read once its branch is added."""


class LayerRates(NamedTuple):
    """Of one TSSA layer that reads one sequence."""

    branch: BranchRates
    orthonormal: Rates
    """Before its branch, in the orthonormal bases nearest to the U_h, without bias; of the whole sequence, as is what
    follows."""
    full: Tensor
    """½ Σ_h (n_h/n) log det(I + (1/n_h) Σ π_h z zᵀ), of the tokens before they are projected."""


@torch.inference_mode()
def branch_rates(model: TostLM, tokens_T: Tensor) -> list[BranchRates]:
    """Those of each TSSA layer while the model reads a sequence, at the prefixes of `position_ends`."""
    layers = [_RunningBranch(position_ends(len(tokens_T))) for _ in tssa_mixers(model)]
    read(model, tokens_T[None], lambda piece: layers[piece.layer].add(piece))
    return [layer.rates() for layer in layers]


@torch.inference_mode()
def layer_rates(model: TostLM, tokens_T: Tensor) -> list[LayerRates]:
    """As `branch_rates`, and in other bases.

    Besides what `read` holds there are H·C² numbers for each layer, whatever the sequence's length.
    """
    ends = position_ends(len(tokens_T))
    layers = [_RunningLayer(mixer, ends) for mixer in tssa_mixers(model)]
    read(model, tokens_T[None], lambda piece: layers[piece.layer].add(piece))
    return [layer.rates() for layer in layers]


def summed_up(
    found: Sequence[Sequence[BranchRates]] | Sequence[Sequence[LayerRates]], documents_N: Tensor
) -> list[dict[str, Any]]:
    """For each layer, over the sequences: mean and standard error of each figure, plain numbers or by prefix a list.

    A change is that by the layer's branch, below 0 where it compresses; a gap is R_var − R_c.
    """
    return [
        {
            name: _over_sequences([_figures(layer)[name] for layer in layers], documents_N)
            for name in _figures(layers[0])
        }
        for layers in zip(*found, strict=True)
    ]


class RunningRates:
    """R_c and R_var of the first so many tokens, for each of `ends`, rising numbers from 1 on. The tokens come in
    pieces; between them there is a moment of each head, in float64."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = list(ends)
        self._count = 0
        self._moment_HDD = self._mass_H = torch.zeros(())
        self._found: list[Rates] = []

    def add(self, w_THD: Tensor, pi_TH: Tensor) -> None:
        """Take the tokens that follow."""
        while len(w_THD) and len(self._found) < len(self._ends):
            tokens = min(len(w_THD), self._ends[len(self._found)] - self._count)
            self._add_before_next_end(w_THD[:tokens].double(), pi_TH[:tokens].double())
            w_THD, pi_TH = w_THD[tokens:], pi_TH[tokens:]

    def rates(self) -> Rates:
        """At all ends that were reached, each [P]."""
        coding, variational = zip(*self._found, strict=True)
        return Rates(torch.stack(coding), torch.stack(variational))

    def _add_before_next_end(self, w_THD: Tensor, pi_TH: Tensor) -> None:
        of_heads = zip(w_THD.unbind(1), pi_TH.T[..., None], strict=True)  # one by one: a weighted copy of one head only
        moments_HDD = torch.stack([(pi_T1 * w_TD).T @ w_TD for w_TD, pi_T1 in of_heads])
        self._moment_HDD, self._mass_H = self._moment_HDD + moments_HDD, self._mass_H + pi_TH.sum(0)
        self._count += len(w_THD)
        if self._count == self._ends[len(self._found)]:
            self._found.append(self._rates_here())

    def _rates_here(self) -> Rates:
        share_H = self._mass_H / self._count / 2
        moment_HDD = self._moment_HDD / self._mass_H.clamp_min(LEAST_MASS)[:, None, None]
        variational_H = moment_HDD.diagonal(dim1=-2, dim2=-1).log1p().sum(-1)
        return Rates((share_H * _log_det(moment_HDD)).sum(), (share_H * variational_H).sum())


def for_all_heads(z_TC: Tensor, pi_TH: Tensor) -> Tensor:
    """z as [T, H, C], not copied for each head."""
    return z_TC.double()[:, None].expand(-1, pi_TH.shape[1], -1)


def orthonormal(u_HDC: Tensor) -> Tensor:
    """The orthonormal bases nearest to the rows of each head's U, its polar factors."""
    left, _, right = torch.linalg.svd(u_HDC, full_matrices=False)
    return left @ right


def _figures(layer: BranchRates | LayerRates) -> dict[str, Tensor]:
    if isinstance(layer, LayerRates):
        in_bases = layer.orthonormal
        return {
            **_figures(layer.branch),
            "orthonormal_coding": in_bases.coding,
            "orthonormal_variational": in_bases.variational,
            "full": layer.full,
        }
    before, after = layer
    return {
        "coding": before.coding[-1],
        "variational": before.variational[-1],
        "coding_change": after.coding[-1] - before.coding[-1],
        "variational_change": after.variational[-1] - before.variational[-1],
        "gap": before.variational[-1] - before.coding[-1],
        "coding_by_prefix": before.coding,
        "variational_by_prefix": before.variational,
        "variational_change_by_prefix": after.variational - before.variational,
    }


def _over_sequences(values: Sequence[Tensor], documents_N: Tensor) -> dict[str, Any]:
    of_all_N = torch.stack(list(values))
    error = standard_error(of_all_N, documents_N)
    return {"mean": of_all_N.mean(0).tolist(), "standard_error": None if error is None else error.tolist()}


class _RunningBranch:
    """`BranchRates` of a sequence that comes in pieces."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._before, self._after = RunningRates(ends), RunningRates(ends)

    def add(self, piece: LayerPiece) -> None:
        moved_BTC = piece.block.mixer_norm(piece.x_BTC + piece.branch)
        self._before.add(piece.projected[0], piece.pi[0])
        self._after.add(projected(piece.mixer, moved_BTC)[0], piece.pi[0])

    def rates(self) -> BranchRates:
        return BranchRates(self._before.rates(), self._after.rates())


class _RunningLayer:
    """`LayerRates` of a sequence that comes in pieces."""

    def __init__(self, mixer: TssaMixer, ends: Sequence[int]) -> None:
        self._branch = _RunningBranch(ends)
        self._basis_HDC = orthonormal(mixer.in_proj.weight.double().unflatten(0, (mixer.heads, -1)))
        self._orthonormal, self._full = RunningRates(ends[-1:]), RunningRates(ends[-1:])

    def add(self, piece: LayerPiece) -> None:
        self._branch.add(piece)
        z_TC, pi_TH = piece.z_BTC[0], piece.pi[0]
        self._orthonormal.add(torch.einsum("tc,hdc->thd", z_TC.double(), self._basis_HDC), pi_TH)
        self._full.add(for_all_heads(z_TC, pi_TH), pi_TH)

    def rates(self) -> LayerRates:
        in_bases, full = self._orthonormal.rates(), self._full.rates().coding
        return LayerRates(self._branch.rates(), Rates(in_bases.coding[0], in_bases.variational[0]), full[0])


def _log_det(moments: Tensor) -> Tensor:
    """log det(I + M) of symmetric positive semidefinite matrices […, D, D]."""
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return 2 * torch.linalg.cholesky(identity + moments).diagonal(dim1=-2, dim2=-1).log().sum(-1)
