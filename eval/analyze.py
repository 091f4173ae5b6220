"""What the operator does in a trained model: how its heads share tokens out, and whether its layers compress them.

    python -m eval.analyze runs/demo

Of the memberships Π two tables, layer by layer: how concentrated Π is by position, 1 − entropy over the heads /
ln(heads); and what becomes of the Π of the same tokens when other text is read before them: how far it moves (total
variation), its concentration, and the tokens' loss. Then the coding rate R_c of each layer's tokens and its variational
form R_var, before and after the layer's branch, with standard errors over sequences; and how orthogonal the heads'
subspaces are, how much they overlap, and what of the tokens lies in none of them; and the loss with parts of the
operator taken away. Writes results.json to eval/memberships@2, eval/coding_rate, eval/subspaces, eval/swaps;
docs/analysis.md says what the figures mean.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import AnalyzeConfig, MembershipsConfig

if TYPE_CHECKING:
    from torch import Tensor

    from tost_lm.model import TostLM


def main(path: Path, config: AnalyzeConfig) -> None:
    from tost_lm.evaluation.subject import CODING_RATE, MEMBERSHIPS, SUBSPACES, SWAPS, Subject, pick_device

    subject = Subject.find(path)
    shards = subject.open_shards(config.heldout.shards)
    identity = subject.identity(config, shards)
    protocols = (MEMBERSHIPS, CODING_RATE, SUBSPACES, SWAPS)
    wanted = [protocol for protocol in protocols if not subject.reusable(protocol, identity)]
    if not wanted:
        return

    import tost_lm
    from tost_lm.analysis.memberships import read_text

    device = pick_device()
    model = tost_lm.load(subject.checkpoint, device)
    if "T" not in model.config.pattern or model.config.heads < 2:
        raise ConfigError(f"{path}: has no layer in which heads share tokens out, so there is nothing to analyze")
    tokens, limit, settings = model.config.max_positions, model.config.position_limit, config.memberships
    probe_tokens = min(settings.probe_tokens, tokens - 1)
    amounts = [n for n in settings.context_tokens if limit is None or n + probe_tokens <= limit]
    sequences_NT, context_S = read_text(shards, settings.sequences, tokens, max(amounts, default=0))
    sequences_NT, context_S = sequences_NT.to(device), context_S.to(device)
    for protocol in wanted:
        started = time.monotonic()
        if protocol == MEMBERSHIPS:
            results = _memberships(model, sequences_NT, context_S, settings, probe_tokens, amounts)
        else:
            measure = {CODING_RATE: _coding_rates, SUBSPACES: _subspaces, SWAPS: _swaps}[protocol]
            results = {"sequences": len(sequences_NT), **measure(model, sequences_NT)}
        subject.write_results(protocol, identity, started, results)


def _memberships(
    model: "TostLM",
    sequences_NT: "Tensor",
    context_S: "Tensor",
    settings: MembershipsConfig,
    probe_tokens: int,
    amounts: Sequence[int],
) -> dict[str, Any]:
    from dataclasses import asdict

    from tost_lm.analysis.memberships import after_context, by_position
    from tost_lm.model.positions import position_ends

    tokens, limit = model.config.max_positions, model.config.position_limit
    found = by_position(model, sequences_NT)
    ends = position_ends(tokens)
    print(f"concentration of memberships by position, over {settings.sequences} sequences:")
    _print_rows("positions up to", ends, found.concentration)
    told = " ".join("–" if share is None else f"{share:.1%}" for share in found.explained)
    print(f"of their variance the position alone explains, by layer: {told}")
    rows = []
    print(f"the first {probe_tokens} tokens of them after other text:")
    for row in after_context(model, sequences_NT[:, : probe_tokens + 1], context_S, amounts):
        rows.append(asdict(row))
        print(
            f"after {row.context_tokens:>7,}  loss {row.nats_per_token:.4f}  moved by {_figures(row.moved)}  "
            f"concentration {_figures(row.concentration)}",
            flush=True,
        )
    if len(amounts) < len(settings.context_tokens):
        left_out = ", ".join(f"{n:,}" for n in settings.context_tokens[len(amounts) :])
        print(f"not after {left_out}: the model reads {limit:,} tokens at most")
    return {
        "sequences": settings.sequences,
        "probe_tokens": probe_tokens,
        "position_ends": ends,
        "concentration_by_position": found.concentration,
        "explained_by_position": found.explained,
        "after_context": rows,
    }


def _coding_rates(model: "TostLM", sequences_NT: "Tensor") -> dict[str, Any]:
    from tost_lm.analysis.coding_rate import layer_rates, summed_up
    from tost_lm.model.positions import position_ends

    layers = summed_up([layer_rates(model, tokens_T) for tokens_T in sequences_NT])
    print(f"coding rates in nats, and their change by the layer's branch, over {len(sequences_NT)} sequences:")
    for number, layer in enumerate(layers, start=1):
        told = "  ".join(
            f"{name} {layer[key]['mean']:.3f} ({_with_error(**layer[f'{key}_change'])})"
            for name, key in (("R_c", "coding"), ("R_var", "variational"))
        )
        print(f"TSSA layer {number:<5}{told}  of the tokens unprojected {layer['full']['mean']:.3f}")
    return {"position_ends": position_ends(sequences_NT.shape[1]), "layers": layers}


def _subspaces(model: "TostLM", sequences_NT: "Tensor") -> dict[str, Any]:
    from tost_lm.analysis.subspaces import layer_subspaces, means

    layers = layer_subspaces(model, sequences_NT)
    print("the subspaces of the heads, means over them:")
    for number, layer in enumerate(layers, start=1):
        of_heads = means(layer)
        print(
            f"TSSA layer {number:<5}effective rank {of_heads['effective_rank']:.1f} of {layer.channels}  "
            f"from orthogonal {of_heads['orthogonality']:.3f}  overlap {of_heads['overlap']:.3f} (by chance "
            f"{layer.chance_overlap:.3f})  outside of all {layer.outside:.1%} of the tokens"
        )
    return {"layers": [{**layer._asdict(), "mean": means(layer)} for layer in layers]}


def _swaps(model: "TostLM", sequences_NT: "Tensor") -> dict[str, Any]:
    from tost_lm.analysis.swaps import AS_IT_IS, beside_as_it_is, swapped_losses

    losses = beside_as_it_is(swapped_losses(model, sequences_NT))
    print("loss in nats per token, and its change, with a part of the operator taken away:")
    for loss in losses:
        change = "" if loss["name"] == AS_IT_IS else f"  ({_with_error(loss['change'], loss['standard_error'])})"
        print(f"{loss['name']:<17}{loss['nats_per_token']:.4f}{change}")
    return {"losses": losses}


def _with_error(mean: float, standard_error: float | None) -> str:
    return f"{mean:+.4f}" + ("" if standard_error is None else f" ± {standard_error:.4f}")


def _print_rows(name: str, ends: Sequence[int], values_LP: Sequence[Sequence[float]]) -> None:
    print(f"{name:<16}" + "".join(f"{end:>8,}" for end in ends))
    for layer, values in enumerate(values_LP, start=1):
        print(f"TSSA layer {layer:<5}" + "".join(f"{value:>8.3f}" for value in values))


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    run_program(main, name="eval.analyze", doc=__doc__ or "", takes="RUN", config=AnalyzeConfig)
