"""The loss by position far beyond the length that a model was trained for (protocol positions).

    python -m eval.positions runs/demo
    python -m eval.positions runs/long positions.times=64 positions.sequences=4 heldout.shards=data/books/shards
    torchrun --standalone --nproc-per-node 4 -m eval.positions runs/long parallel.sequence=2

Held-out documents, one after another with an end of text after each, are cut into sequences of positions.times ×
model.max_positions tokens. Each is read as one stream: a token is predicted from all that stand before it, and a TSSA
model holds no more of them than its state. A model that has learned something for each position reads no further than
those. Writes eval/positions/results.json: nats a token in stretches of positions that double in length, with standard
errors over the sequences, and whether the model was trained on positions so far.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tost_lm.config import run_program
from tost_lm.evaluation.positions_config import POSITIONS, PositionsConfig


def main(path: Path, config: PositionsConfig) -> None:
    from tost_lm.evaluation.positions import HeldoutText, Lengths, by_position, measure
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import Subject
    from tost_lm.model.checkpoint import read_model_config

    started = time.monotonic()
    with joined_ranks(config.parallel, copies=True) as ranks:
        subject = Subject.find(path)
        shards = subject.open_shards(config.heldout.shards)
        identity = subject.identity(config, shards)
        if ranks.reusable(subject, POSITIONS, identity):
            return
        facts, wanted = read_model_config(subject.checkpoint), config.positions
        lengths = Lengths.of(subject, facts, wanted.times)
        text = HeldoutText(shards, wanted, lengths)
        if text.sequences < wanted.sequences:
            print(f"the held-out text has {text.sequences} such sequences, not positions.sequences {wanted.sequences}")
        print(f"reading {text.sequences} sequences of {lengths.read:,} tokens", flush=True)
        nats_NP = measure(ranks, ranks.load(subject), text, lengths.ends)
    if ranks.rank > 0:
        return

    rows = by_position(nats_NP, lengths.ends, lengths.trained)
    print_table(rows, lengths.trained)
    if lengths.limit:
        print(f"the model has learned {lengths.limit:,} positions and reads no further")
    results = {
        "pattern": facts.pattern,
        "sequences": text.sequences,
        "tokens": text.sequences * lengths.read,
        "trained_tokens": lengths.trained,
        "position_limit": lengths.limit,
        "by_position": rows,
    }
    subject.write_results(POSITIONS, identity, started, results)


def print_table(rows: Sequence[dict[str, Any]], trained: int) -> None:
    """With a mark behind the trained length."""
    print("positions up to  nats/token  ± standard error")
    for row in rows:
        error = "–" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        print(f"{row['end']:>15,}  {row['nats_per_token']:>10.4f}  {error:>16}")
        if row["end"] == trained:
            print(f"{'':->15}  trained so far")


if __name__ == "__main__":
    run_program(main, name="eval.positions", doc=__doc__ or "", takes="RUN", config=PositionsConfig)
