"""What the operator does in a trained model: how its heads share tokens out, and whether its layers compress them.

    python -m eval.analyze runs/demo

Of the memberships Π: how concentrated they are by position, what position, word, word class and document explain of
them, which words each head takes, and what becomes of them when other text is read before. Of the layers: the coding
rate R_c of their tokens and its variational form R_var, before and after the branch, for each checkpoint that the run
keeps; the heads' subspaces; rare tokens and long ones in the residual stream; how far a swapped token reaches; and the
loss with parts of the operator taken away. Writes results.json to eval/memberships@3, tokens (with text.html, a text
coloured by head), coding_rate@2, subspaces, stream, influence and swaps@2; docs/analysis.md says what the figures mean.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import AnalyzeConfig

if TYPE_CHECKING:
    from tost_lm.analysis.results import Analysis
    from tost_lm.data.shards import Shards
    from tost_lm.evaluation.subject import Subject


def main(path: Path, config: AnalyzeConfig) -> None:
    from tost_lm.evaluation.subject import (
        CODING_RATE,
        INFLUENCE,
        MEMBERSHIPS,
        STREAM,
        SUBSPACES,
        SWAPS,
        TOKENS,
        Subject,
    )
    from tost_lm.files import sha256_file
    from tost_lm.model.checkpoint import MANIFEST, step_folders

    subject = Subject.find(path)
    shards = subject.open_shards(config.heldout.shards)
    kept = [folder for folder in step_folders(subject.home) if (folder / MANIFEST).is_file()]
    identity = subject.identity(config, shards)
    names = (MEMBERSHIPS, TOKENS, CODING_RATE, SUBSPACES, STREAM, INFLUENCE, SWAPS)
    identities: dict[str, dict[str, Any]] = dict.fromkeys(names, identity)
    identities[CODING_RATE] = {**identity, "kept": {folder.name: sha256_file(folder / MANIFEST) for folder in kept}}
    wanted = [name for name in names if not subject.reusable(name, identities[name])]
    if not wanted:
        return

    from tost_lm.analysis import results

    analysis = _open(subject, shards, config)
    probe_tokens, contexts = config.memberships.probe_tokens, config.memberships.context_tokens
    page = subject.results_path(TOKENS).with_name("text.html")
    parts: dict[str, tuple[Callable[[Analysis], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        MEMBERSHIPS: (partial(results.memberships, probe_tokens=probe_tokens, contexts=contexts), _tell_memberships),
        TOKENS: (partial(results.tokens, page=page), _tell_tokens),
        CODING_RATE: (partial(results.coding_rates, kept=kept), _tell_coding_rates),
        SUBSPACES: (results.subspaces, _tell_subspaces),
        STREAM: (results.stream, _tell_stream),
        INFLUENCE: (results.influences, _tell_influence),
        SWAPS: (results.swaps, _tell_swaps),
    }
    for name in wanted:
        measure, tell = parts[name]
        started = time.monotonic()
        found = {"sequences": len(analysis.sequences), **measure(analysis)}
        tell(found)
        subject.write_results(name, identities[name], started, found)


def _open(subject: "Subject", shards: "Shards", config: AnalyzeConfig) -> "Analysis":
    """The model and the text.

    Raises:
        ConfigError: no layer shares tokens out.
        DataError: there is too little text.
    """
    import tost_lm
    from tost_lm.analysis.results import Analysis, readable
    from tost_lm.analysis.text import information, read_text
    from tost_lm.evaluation.subject import pick_device

    device, settings = pick_device(), config.memberships
    model = tost_lm.load(subject.checkpoint, device)
    if "T" not in model.config.pattern or model.config.heads < 2:
        raise ConfigError(
            f"{subject.home}: has no layer in which heads share tokens out, so there is nothing to analyze"
        )
    if model.config.max_positions < 2:
        raise ConfigError(f"{subject.home}: reads one token (model.max_positions), before which there is none")
    contexts = readable(model.config, settings.context_tokens, settings.probe_tokens)
    text = read_text(shards, settings.sequences, model.config.max_positions, max(contexts, default=0))
    return Analysis(model, text.to(device), shards.tokenizer(), information(shards))


def _tell_memberships(found: dict[str, Any]) -> None:
    print(f"concentration of memberships by position, over {found['sequences']} sequences:")
    _print_rows("positions up to", found["position_ends"], found["concentration_by_position"])
    print("standard deviation of their scores over the heads:")
    _print_rows("positions up to", found["position_ends"], found["score_spread_by_position"])
    print(f"the first {found['probe_tokens']} tokens of them after other text:")
    for row in found["after_context"]:
        print(
            f"after {row['context_tokens']:>7,}  loss {row['nats_per_token']:.4f}  moved by {_figures(row['moved'])}  "
            f"concentration {_figures(row['concentration'])}"
        )
    if found["left_out_contexts"]:
        left_out = ", ".join(f"{n:,}" for n in found["left_out_contexts"])
        print(f"not after {left_out}: the model reads {found['limit']:,} tokens at most")
    print("share of their variance at those positions that the position alone explains:")
    _print_rows("positions up to", found["position_ends"], found["explained_within_stretches"])
    print(f"of all their variance the position alone explains, by layer: {_shares(found['explained_by_position'])}")


def _tell_tokens(found: dict[str, Any]) -> None:
    for name, shares in found["explained"].items():
        print(f"of their variance at a position the {name} explains, by layer: {_shares(shares)}")


def _tell_coding_rates(found: dict[str, Any]) -> None:
    print(f"coding rates in nats, and their change by the layer's branch, over {found['sequences']} sequences:")
    for number, layer in enumerate(found["layers"], start=1):
        told = "  ".join(
            f"{name} {layer[key]['mean']:.3f} ({_with_error(**layer[f'{key}_change'])})"
            for name, key in (("R_c", "coding"), ("R_var", "variational"))
        )
        print(f"TSSA layer {number:<5}{told}  of the tokens unprojected {layer['full']['mean']:.3f}")
    for row in found["steps"]:
        changes = " ".join(f"{layer['variational_change']['mean']:+.4f}" for layer in row["layers"])
        print(f"after step {row['step']:>7,} the branches change R_var by {changes}")
    for problem in found["left_out_checkpoints"]:
        print(f"left out: {problem}")


def _tell_subspaces(found: dict[str, Any]) -> None:
    print("the subspaces of the heads, means over them:")
    for number, layer in enumerate(found["layers"], start=1):
        of_heads = layer["mean"]
        print(
            f"TSSA layer {number:<5}effective rank {of_heads['effective_rank']:.1f} of {layer['channels']}  "
            f"from orthogonal {of_heads['orthogonality']:.3f}  overlap {of_heads['overlap']:.3f} (by chance "
            f"{layer['chance_overlap']:.3f})  outside of all {layer['outside']:.1%} of the tokens"
        )


def _tell_stream(found: dict[str, Any]) -> None:
    print("tokens by their information, layer by layer: the branch's update beside the residual stream, and how much")
    print("of the stream before the first TSSA layer is kept (cosine):")
    for group in found["groups"]:
        nats = f"{group['from_nats']:.1f} to {group['to_nats']:.1f} nats"
        updates = " ".join(f"{update:.2g}" for update in group["update"])
        print(f"{nats:<19}update {updates}  kept {_figures(group['kept'])}")
    print(f"tokens longer than {found['long_medians']:g} medians, and the longest:")
    for number, layer in enumerate(found["layers"], start=1):
        longest = layer["longest"][0]
        at = f"{longest['text']!r} at position {longest['position']:,}"
        print(f"TSSA layer {number:<5}{layer['long_share']:.2%}, {longest['medians']:.1f} medians: {at}")


def _tell_influence(found: dict[str, Any]) -> None:
    print(f"how far a layer's output moves when one token before is swapped, over {found['swaps']} swaps:")
    _print_rows("tokens later", found["distance_ends"], found["mean"], form=".2g")


def _tell_swaps(found: dict[str, Any]) -> None:
    print("loss in nats per token, and its change, with a part of the operator taken away:")
    as_it_is, *others = found["losses"]
    print(f"{as_it_is['name']:<17}{as_it_is['nats_per_token']:.4f}")
    for loss in others:
        change = _with_error(loss["change"], loss["standard_error"])
        print(f"{loss['name']:<17}{loss['nats_per_token']:.4f}  ({change})")


def _with_error(mean: float, standard_error: float | None) -> str:
    return f"{mean:+.4f}" + ("" if standard_error is None else f" ± {standard_error:.4f}")


def _print_rows(name: str, ends: Sequence[int], values_LP: Sequence[Sequence[float | None]], form: str = ".3f") -> None:
    print(f"{name:<16}" + "".join(f"{end:>8,}" for end in ends))
    for layer, values in enumerate(values_LP, start=1):
        told = ("–" if value is None else f"{value:{form}}" for value in values)
        print(f"TSSA layer {layer:<5}" + "".join(f"{value:>8}" for value in told))


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _shares(shares: Sequence[float | None]) -> str:
    return " ".join("–" if share is None else f"{share:.1%}" for share in shares)


if __name__ == "__main__":
    run_program(main, name="eval.analyze", doc=__doc__ or "", takes="RUN", config=AnalyzeConfig)
