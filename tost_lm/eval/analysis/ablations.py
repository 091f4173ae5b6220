"""Ablations of the operator in all TSSA layers of a trained model.

    as it is         y_t = −Π_t w_t / (1 + D_t),  D_t = Σ_{s≤t} Π_s w_s² / Σ_{s≤t} Π_s
    uniform          Π is 1/H everywhere, also in D
    by position      Π_t is its mean at that position over other sequences, also in D
    constant moments D_t is the mean over other sequences of D at their last token

The other sequences are the even ones for an odd sequence and the odd ones for an even sequence.

Shapes: N sequences, T tokens, L TSSA layers, H heads, D channels per head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tost_lm.eval.analysis.layers import (
    TILE_TOKENS,
    LayerTile,
    layer_scores,
    project,
    run_in_tiles,
    standard_error,
    tssa_mixers,
)
from tost_lm.eval.analysis.memberships import Analysis
from tost_lm.inference.protocol_names import ABLATIONS
from tost_lm.markdown import table, with_error
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.mixers.tssa.naive import TssaState, memberships
from tost_lm.model import TostLM
from tost_lm.ops.precision import MASS_FLOOR, statistics_dtype
from tost_lm.report.page import DARK, Chart, Page, new_figure
from tost_lm.report.protocols import analysis_section

AS_IT_IS, UNIFORM, BY_POSITION, CONSTANT = "as it is", "uniform", "by position", "constant moments"

Ablation = Callable[[int, slice, Tensor], tuple[Tensor, Tensor | None]]
"""Maps the layer's index, the tokens' positions and Π [1, T, H] to the Π and the D [H, D] to use instead.

With None, D is computed from that Π.
"""


@torch.inference_mode()
def ablation_losses(model: TostLM, sequences_NT: Tensor) -> dict[str, Tensor]:
    """Mean loss of each sequence [N] in nats per token, float64, of the model as it is and with each ablation.

    A single sequence has no ablation that needs other sequences.
    """
    losses = {AS_IT_IS: _losses(model, sequences_NT)}
    with ablated(model, lambda layer, positions, pi_1TH: (torch.full_like(pi_1TH, 1 / pi_1TH.shape[-1]), None)):
        losses[UNIFORM] = _losses(model, sequences_NT)
    if len(sequences_NT) > 1:
        losses |= {name: torch.empty_like(losses[AS_IT_IS]) for name in (BY_POSITION, CONSTANT)}
        for half in (0, 1):
            for name, ablation in _mean_ablations(model, sequences_NT[1 - half :: 2]).items():
                with ablated(model, ablation):
                    losses[name][half::2] = _losses(model, sequences_NT[half::2])
    return losses


def summarize_losses(losses: Mapping[str, Tensor], documents_N: Tensor) -> list[dict[str, Any]]:
    """For each ablation: its name, nats_per_token, the mean change from the model as it is and its standard error.

    The standard error is over documents; None if there is only one.
    """
    rows = []
    for name, loss_N in losses.items():
        change_N = loss_N - losses[AS_IT_IS]
        error = standard_error(change_N, documents_N)
        means = {"nats_per_token": float(loss_N.mean()), "change": float(change_N.mean())}
        rows.append({"name": name, **means, "standard_error": None if error is None else float(error)})
    return rows


@contextmanager
def ablated(model: TostLM, ablation: Ablation) -> Iterator[None]:
    """Until the context ends, the TSSA layers compute −Π w / (1 + D) with the Π and D of `ablation`.

    The model takes one row at a time, in one call or in several.
    """
    sums: dict[int, tuple[Tensor, Tensor]] = {}

    def compute(layer: int, mixer: TssaMixer, arguments: Any, result: Any) -> Any:
        z_1TC, state, info = arguments
        w_1THD = project(mixer, z_1TC)
        w_1THD = w_1THD.to(statistics_dtype(w_1THD))
        positions = slice(info.start_positions[0], info.start_positions[0] + w_1THD.shape[1])
        pi_1TH = memberships(layer_scores(mixer, w_1THD, state, info), mixer.membership)
        pi_1TH, moment = ablation(layer, positions, pi_1TH)
        if moment is None:
            before = sums[layer] if positions.start else None
            weighted_1THD, mass_1TH = _running_sums(w_1THD, pi_1TH, before)
            sums[layer] = weighted_1THD[:, -1:], mass_1TH[:, -1:]
            moment = weighted_1THD / (mass_1TH + MASS_FLOOR)[..., None]
        y_1THD = -pi_1TH[..., None] * w_1THD / (1 + moment)
        return mixer.out_proj(y_1THD.flatten(-2).to(z_1TC.dtype)), result[1]

    with ExitStack() as hooks:
        for layer, mixer in enumerate(tssa_mixers(model)):
            hooks.enter_context(mixer.register_forward_hook(partial(compute, layer)))
        yield


def _running_sums(w_1THD: Tensor, pi_1TH: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Σ Π w² [1, T, H, D] and Σ Π [1, T, H] up to each token, `before` included."""
    weighted_1THD, mass_1TH = (pi_1TH[..., None] * w_1THD.square()).cumsum(1), pi_1TH.cumsum(1)
    return (weighted_1THD, mass_1TH) if before is None else (before[0] + weighted_1THD, before[1] + mass_1TH)


def _mean_ablations(model: TostLM, sequences_NT: Tensor) -> dict[str, Ablation]:
    """The ablations that use means over these sequences: of Π at each position, and of D at the last token."""
    (sequences, tokens), layers = sequences_NT.shape, len(tssa_mixers(model))
    shape = (layers, tokens, model.config.heads)
    mean_LTH = torch.zeros(shape, dtype=torch.float64, device=sequences_NT.device)
    moments_LHD = torch.zeros(())

    def on_tile(tile: LayerTile) -> None:
        mean_LTH[tile.layer, tile.positions] += tile.pi[0] / sequences

    for tokens_T in sequences_NT:
        states = run_in_tiles(model, tokens_T[None], on_tile).layers
        ends = [layer for layer in states if isinstance(layer, TssaState)]
        last_moments = [(end.weighted_energy / (end.mass + MASS_FLOOR)[..., None])[0].double() for end in ends]
        moments_LHD = moments_LHD + torch.stack(last_moments) / sequences
    return {
        BY_POSITION: lambda layer, positions, pi_1TH: (mean_LTH[layer, positions].to(pi_1TH.dtype)[None], None),
        CONSTANT: lambda layer, positions, pi_1TH: (pi_1TH, moments_LHD[layer].to(pi_1TH.dtype)),
    }


def _losses(model: TostLM, sequences_NT: Tensor) -> Tensor:
    """Mean loss of each sequence [N] in nats per token."""
    return torch.stack(
        [torch.cat(list(model.stream(tokens_T, tile_tokens=TILE_TOKENS))).mean() for tokens_T in sequences_NT]
    )


def measure(of: Analysis) -> dict[str, Any]:
    """Losses with ablations of the operator."""
    return {"losses": summarize_losses(ablation_losses(of.model, of.sequences), of.text.document_of)}


@analysis_section("Ablations of the operator", ABLATIONS)
def section(results: dict[str, Any], page: Page) -> list[str]:
    """The loss with each ablation."""
    rows = [
        (loss["name"], f"{loss['nats_per_token']:.4f}", with_error(loss["change"], loss["standard_error"], "+.4f"))
        for loss in results["losses"]
    ]
    return [
        page.add_figure("ablations", ablations_chart(results["losses"]), "Change of the loss by ablation"),
        table(("TSSA layers", "nats per token", "change"), rows),
        f"Mean over {results['sequences']} sequences; ± is the standard error of the change over documents. Uniform: "
        "each head has the membership 1/H. By position: memberships are their mean at that position over other "
        "sequences. Constant moments: second moments are their mean at the end of other sequences.",
    ]


def ablations_chart(losses: Sequence[Mapping[str, Any]]) -> Chart:
    """Change of the loss by ablation, with its standard error."""
    _, *others = losses
    figure, axes = new_figure(6, 0.9 + 0.5 * len(others))
    rows = list(range(len(others), 0, -1))
    changes, errors = [loss["change"] for loss in others], [loss["standard_error"] or 0 for loss in others]
    axes.errorbar(changes, rows, xerr=errors, color=DARK, marker="o", linestyle="none", capsize=3)
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set_yticks(rows, [loss["name"] for loss in others])
    axes.set_ylim(0.5, len(others) + 0.5)
    axes.set_xlabel("change of the loss (nats per token), above 0: worse")
    axes.grid(alpha=0.3, axis="x")
    keys = ("name", "nats_per_token", "change", "standard_error")
    header = ["ablation", "loss (nats/token)", "change (nats/token)", "standard error (nats/token)"]
    return Chart(figure, header, [[loss[key] for key in keys] for loss in losses])
