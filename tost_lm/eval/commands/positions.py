"""Loss by position, far beyond the length that a model was trained for (protocol positions).

    tost eval positions runs/demo
    tost eval positions runs/long positions.times=64 positions.sequences=4 heldout.shards=data/books/shards
    tost eval positions runs/long launch.ranks=4 parallel.sequence=2

The held-out documents are concatenated, each with its end of text, and cut into sequences of positions.times ×
the model's context length. Each sequence is read as one stream: a token is predicted from all tokens before it, and
memory holds only the state of a TSSA model. A model with learned positions reads no more tokens than it has positions.
Writes eval/positions/results.json: nats per token in position buckets that double in length, with standard errors over
the sequences, and whether the model was trained on these positions.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tost_lm.config import run_program
from tost_lm.eval.settings import PositionsConfig
from tost_lm.inference.protocol_names import POSITIONS
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks


def main(path: Path, config: PositionsConfig) -> None:
    from tost_lm.checkpointing.format import read_model_config
    from tost_lm.eval.positions import HeldoutText, by_position, measure
    from tost_lm.inference.ranks import joined_ranks
    from tost_lm.inference.subject import Subject

    started = time.monotonic()
    start_ranks("eval positions", ranks_of_launch(config.parallel.model_ranks, config.launch))
    with joined_ranks(config.parallel, copies=True, graceful_stop=True) as ranks:
        subject = Subject.find(path)
        shards = subject.open_shards(config.heldout.shards)
        identity = subject.identity(config, shards)
        if ranks.reusable(subject, POSITIONS, identity):
            return
        model_config, wanted = read_model_config(subject.checkpoint), config.positions
        text = HeldoutText(shards, wanted, model_config)
        lengths = text.lengths
        if text.sequences < wanted.sequences:
            print(
                f"the held-out text has {text.sequences} sequences, fewer than positions.sequences {wanted.sequences}"
            )
        print(f"reading {text.sequences} sequences of {lengths.read:,} tokens", flush=True)
        nats_NP = measure(ranks, ranks.load(subject), text, lengths.ends)
    if ranks.rank > 0:
        return

    rows = by_position(nats_NP, lengths.ends, lengths.trained)
    print_table(rows, lengths.trained)
    if lengths.limit:
        print(f"the model has {lengths.limit:,} learned positions and cannot read beyond them")
    results = {
        "pattern": model_config.pattern,
        "sequences": text.sequences,
        "tokens": text.sequences * lengths.read,
        "trained_tokens": lengths.trained,
        "position_limit": lengths.limit,
        "by_position": rows,
    }
    subject.write_results(POSITIONS, identity, started, results)


def print_table(rows: Sequence[dict[str, Any]], trained: int) -> None:
    """Print the rows, with a line after the trained length."""
    print("positions up to  nats/token  ± standard error")
    for row in rows:
        error = "–" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
        print(f"{row['end']:>15,}  {row['nats_per_token']:>10.4f}  {error:>16}")
        if row["end"] == trained:
            print(f"{'':->15}  trained length")


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval positions",
        doc=__doc__ or "",
        positional="RUN",
        config=PositionsConfig,
    )


if __name__ == "__main__":
    run()
