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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.analysis.charts import layers_chart, number_ticks
from experiments.analysis.layers import Analysis, LayerTile, project, run_in_tiles, standard_error, tssa_mixers
from tost_lm.checkpointing.reading import load
from tost_lm.errors import CheckpointError
from tost_lm.markdown import escape, table, with_error
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.model import TostLM
from tost_lm.ops.positions import position_ends
from tost_lm.page import CONTRAST, DARK, Chart, Page, line_data, new_figure

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
    return _rates(BranchRates, model, tokens_T)


def layer_rates(model: TostLM, tokens_T: Tensor) -> list[dict[str, Tensor]]:
    """Like `branch_rates`, with reference rates of the whole sequence.

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


class BranchRates:
    """Rates of `branch_rates` of one layer, tile by tile; `ends` as in `RunningRates`."""

    def __init__(self, mixer: TssaMixer, ends: Sequence[int]) -> None:
        self._before, self._after = RunningRates(ends), RunningRates(ends)

    def add(self, tile: LayerTile) -> None:
        after_BTC = tile.block.branch_input(tile.x_BTC + tile.branch, tile.block.mixer_norm)
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


class _LayerRates(BranchRates):
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
def _rates(kind: type[BranchRates], model: TostLM, tokens_T: Tensor) -> list[dict[str, Tensor]]:
    ends = position_ends(len(tokens_T))
    layers = [kind(mixer, ends) for mixer in tssa_mixers(model)]
    run_in_tiles(model, tokens_T[None], lambda tile: layers[tile.layer].add(tile))
    return [layer.rates() for layer in layers]


def _log_det(moments: Tensor) -> Tensor:
    """log det(I + M) of symmetric positive semidefinite matrices […, D, D]."""
    identity = torch.eye(moments.shape[-1], dtype=moments.dtype, device=moments.device)
    return 2 * torch.linalg.cholesky(identity + moments).diagonal(dim1=-2, dim2=-1).log().sum(-1)


def measure(of: Analysis, kept: Sequence[Path]) -> dict[str, Any]:
    """Coding rates of each TSSA layer, also by retained checkpoint of the run (`kept`)."""
    steps, left_out, documents_N = [], [], of.text.document_of
    for folder in kept:
        try:
            model = load(folder, str(of.sequences.device))
        except CheckpointError as error:
            left_out.append(str(error))
            continue
        layers = summarize_rates([branch_rates(model, tokens_T) for tokens_T in of.sequences], documents_N)
        steps.append({"step": int(folder.name.removeprefix("step_")), "layers": layers})
    return {
        "sequences": len(of.sequences),
        "position_ends": position_ends(of.sequences.shape[1]),
        "layers": summarize_rates([layer_rates(of.model, tokens_T) for tokens_T in of.sequences], documents_N),
        "steps": steps,
        "left_out_checkpoints": left_out,
    }


CHANGE = "change of R_var (nats)"
COLUMNS = {
    "coding": ("R_c", ".3f"),
    "variational": ("R_var", ".3f"),
    "gap": ("R_var − R_c", ".3f"),
    "coding_change": ("change of R_c", "+.4f"),
    "variational_change": ("change of R_var", "+.4f"),
    "orthonormal_coding": ("R_c, orthonormal bases", ".3f"),
    "orthonormal_variational": ("R_var, orthonormal bases", ".3f"),
    "full": ("unprojected tokens", ".3f"),
}
RATES = {"coding": "R_c, coding rate", "variational": "R_var, variational form"}


def section(results: dict[str, Any], page: Page) -> list[str]:
    """Rates before and after each layer's branch."""
    layers: list[dict[str, Any]] = results["layers"]
    rows = [
        (str(number), *[with_error(**layer[name], form=form) for name, (_, form) in COLUMNS.items()])
        for number, layer in enumerate(layers, start=1)
    ]
    return [
        "## Coding rates",
        page.add_figure("coding_rate", change_chart(layers), "Change of the coding rates by each TSSA layer's branch"),
        table(("TSSA layer", *[label for label, _ in COLUMNS.values()]), rows),
        f"Rates in nats, mean over {results['sequences']} sequences of {results['position_ends'][-1]:,} tokens ± "
        "standard error over documents. R_c is the coding rate of the tokens in the heads' subspaces. R_var ≥ R_c is "
        "its variational form, which the operator descends. A change is the effect of the layer's branch, negative "
        "where the layer compresses.",
        page.add_figure("coding_rate_prefixes", prefix_chart(results), "Coding rates by prefix"),
        "Rates of the first tokens of a sequence, the prefixes that the causal operator uses.",
        *_over_training(results["steps"], results["left_out_checkpoints"], page),
    ]


def change_chart(layers: Sequence[Mapping[str, Any]]) -> Chart:
    """Change by the layer's branch with its standard error, for each layer and rate."""
    figure, axes = new_figure(7, 3.4)
    numbers = list(range(1, len(layers) + 1))
    lines = {}
    for (name, label), color, marker, offset in zip(RATES.items(), (DARK, CONTRAST), "os", (-0.08, 0.08), strict=True):
        changes = [layer[f"{name}_change"] for layer in layers]
        means, errors = [change["mean"] for change in changes], [change["standard_error"] or 0.0 for change in changes]
        axes.errorbar(
            [number + offset for number in numbers], means, yerr=errors, color=color, marker=marker, linestyle="none",
            capsize=3, label=label,
        )  # fmt: skip
        lines |= {f"change of {label} (nats)": (numbers, means), f"standard error of {label} (nats)": (numbers, errors)}
    axes.axhline(0, color="0.5", linewidth=1)
    number_ticks(axes.xaxis, len(numbers), 1)
    axes.set_xlabel("TSSA layer")
    axes.set_ylabel("change by its branch (nats)\nbelow 0: compression")
    axes.legend()
    return Chart(figure, **line_data("TSSA layer", lines))


def prefix_chart(results: Mapping[str, Any]) -> Chart:
    """R_var by prefix, and its change by the layer's branch."""
    panels = {
        label: [layer[f"{name}_by_prefix"]["mean"] for layer in results["layers"]]
        for name, label in (("variational", "R_var (nats)"), ("variational_change", CHANGE))
    }
    return layers_chart("tokens of the prefix", results["position_ends"], panels)


def steps_chart(steps: Sequence[Mapping[str, Any]]) -> Chart:
    """Change of R_var by the layers' branches, and R_var − R_c, over training."""
    panels = {
        label: list(zip(*[[layer[name]["mean"] for layer in row["layers"]] for row in steps], strict=True))
        for name, label in (("variational_change", CHANGE), ("gap", "R_var − R_c (nats)"))
    }
    return layers_chart("training step", [row["step"] for row in steps], panels, steps=True)


def _over_training(steps: Sequence[Mapping[str, Any]], left_out: Sequence[str], page: Page) -> list[str]:
    """Rates of the retained checkpoints, if there are several."""
    if len(steps) < 2:
        return []
    return [
        page.add_figure("coding_rate_steps", steps_chart(steps), "Coding rates of the retained checkpoints"),
        f"Rates of the {len(steps)} retained checkpoints (`checkpoint.keep_latest_k`, `checkpoint.retain_interval`).",
        *[f"Skipped checkpoint: {escape(problem)}." for problem in left_out],
    ]
