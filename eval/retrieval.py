"""Needle-in-a-haystack grid of a checkpoint, length by depth, with its control (protocol needle@words).

    python -m eval.retrieval runs/demo
    torchrun --standalone --nproc-per-node 4 -m eval.retrieval runs/demo parallel.tensor=2 parallel.sequence=2

Writes eval/needle@words/results.json (scores of each cell) and examples.jsonl (a row an example).
"""

import time
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.config import RetrievalConfig
from tost_lm.files import write_rows


def main(path: Path, config: RetrievalConfig) -> None:
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.subject import NEEDLE, Subject

    started = time.monotonic()
    with joined_ranks(config.parallel) as ranks:
        subject = Subject.find(path)
        shards = subject.open_shards(config.heldout.shards)
        identity = subject.identity(config, shards)
        if ranks.reusable(subject, NEEDLE, identity):
            return

        from tost_lm.evaluation.needle import CHANCE, NeedleTask, model_scorer, run_grid

        tokenizer = shards.tokenizer()
        model = ranks.load(subject.checkpoint)
        max_positions, limit = model.config.max_positions, model.config.position_limit
        task = NeedleTask(config.needle, tokenizer, shards.documents("valid"), max_positions, limit)
        cells, rows = run_grid(task, model_scorer(model, tokenizer.vocab_size))
    if ranks.rank > 0:
        return

    print("choice accuracy (exact match), and the same without the needle:")
    for cell in cells:
        print(
            f"length {cell['length']:>6}  depth {cell['depth']:<5g} "
            f"{cell['choice_accuracy']:6.1%} ({cell['exact_accuracy']:.1%})   "
            f"{cell['control_choice_accuracy']:6.1%} ({cell['control_exact_accuracy']:.1%})"
        )
    write_rows(subject.results_path(NEEDLE).with_name("examples.jsonl"), rows)
    results = {"pattern": model.config.pattern, "chance": CHANCE, "cells": cells}
    subject.write_results(NEEDLE, identity, started, results)


if __name__ == "__main__":
    run_program(main, name="eval.retrieval", doc=__doc__ or "", takes="RUN", config=RetrievalConfig)
