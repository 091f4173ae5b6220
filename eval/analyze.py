"""How TSSA's heads share tokens out in a trained model, its memberships Π (protocol memberships).

    python -m eval.analyze runs/demo

Two tables, layer by layer: how concentrated Π is by position, 1 − entropy over the heads / ln(heads); and what becomes
of the Π of the same tokens when other text is read before them: how far it moves (total variation), its concentration,
and the tokens' loss. Writes eval/memberships/results.json.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import AnalyzeConfig


def main(path: Path, config: AnalyzeConfig) -> None:
    from tost_lm.evaluation.subject import MEMBERSHIPS, Subject, pick_device

    started = time.monotonic()
    subject = Subject.find(path)
    shards = subject.open_shards(config.heldout.shards)
    identity = subject.identity(config, shards)
    if subject.reusable(MEMBERSHIPS, identity):
        return

    from dataclasses import asdict

    import tost_lm
    from tost_lm.analysis.memberships import after_context, concentration_by_position, read_text
    from tost_lm.model.positions import position_ends

    device = pick_device()
    model = tost_lm.load(subject.checkpoint, device)
    if "T" not in model.config.pattern or model.config.heads < 2:
        raise ConfigError(f"{path}: has no layer in which heads share tokens out, so there is nothing to analyze")
    tokens, limit, settings = model.config.max_positions, model.config.position_limit, config.memberships
    probe_tokens = min(settings.probe_tokens, tokens - 1)
    amounts = [n for n in settings.context_tokens if limit is None or n + probe_tokens <= limit]
    sequences_NT, context_S = read_text(shards, settings.sequences, tokens, max(amounts, default=0))
    sequences_NT, context_S = sequences_NT.to(device), context_S.to(device)

    by_position_LP = concentration_by_position(model, sequences_NT)
    ends = position_ends(tokens)
    print(f"concentration of memberships by position, over {settings.sequences} sequences:")
    _print_rows("positions up to", ends, by_position_LP.tolist())
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
    results = {
        "sequences": settings.sequences,
        "probe_tokens": probe_tokens,
        "position_ends": ends,
        "concentration_by_position": by_position_LP.tolist(),
        "after_context": rows,
    }
    subject.write_results(MEMBERSHIPS, identity, started, results)


def _print_rows(name: str, ends: Sequence[int], values_LP: Sequence[Sequence[float]]) -> None:
    print(f"{name:<16}" + "".join(f"{end:>8,}" for end in ends))
    for layer, values in enumerate(values_LP, start=1):
        print(f"TSSA layer {layer:<5}" + "".join(f"{value:>8.3f}" for value in values))


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


if __name__ == "__main__":
    run_program(main, name="eval.analyze", doc=__doc__ or "", takes="RUN", config=AnalyzeConfig)
