"""Retrieval from long texts by length, beside controls without what is asked for: does a model use what it has read?

    python -m eval.retrieval runs/demo
    python -m eval.retrieval runs/long 'retrieval.tasks=["niah_single_1@own-words", "vt@own-words"]' \\
      'retrieval.lengths=[1024, 4096, 16384]' retrieval.samples=100
    torchrun --standalone --nproc-per-node 4 -m eval.retrieval runs/demo parallel.tensor=2

    needle@words                  a secret word at a depth of a text: a grid of length by depth
    niah_single_1@own-words       a number of seven digits by its key, in a few sentences over and over
    niah_single_2@own-words       the same in a text
    niah_single_3@own-words       a UUID in a text
    niah_multikey_1@own-words     four keys in a text, one asked for
    niah_multikey_2@own-words     nothing but keys and their numbers, one asked for
    niah_multikey_3@own-words     the same with UUIDs for both
    niah_multivalue@own-words     four numbers of one key in a text, all asked for
    niah_multiquery@own-words     four keys in a text, all asked for
    vt@own-words                  five variables, each set to the one before it: those with a given value

The last nine have the structure of RULER's tasks (arXiv 2404.06654) and sentences of their own. Each cell is written
when it is measured, to eval/TASK/cells/ with all its examples, and all of a task's scores to eval/TASK/results.json; a
cell that is there already, of this checkpoint, text and seed, is not measured again. On more than tensor × sequence
ranks, copies of the model share the cells.
"""

import time
from pathlib import Path

from tost_lm.config import run_program
from tost_lm.evaluation.retrieval_config import RetrievalConfig


def main(path: Path, config: RetrievalConfig) -> None:
    from tost_lm.evaluation.hugging_face import find_subject
    from tost_lm.evaluation.ranks import joined_ranks
    from tost_lm.evaluation.retrieval.grid import Grid, describe, identity_of, lengths_of
    from tost_lm.evaluation.retrieval.scoring import model_scorer
    from tost_lm.evaluation.retrieval.tasks import find_text, make_tasks

    with joined_ranks(config.parallel, copies=True) as ranks:
        subject = find_subject(path)
        tokenizer = subject.tokenizer()
        tasks = make_tasks(config, tokenizer, lambda: find_text(config, subject, tokenizer))
        identities = [identity_of(task, config, subject) for task in tasks]
        wanted = [
            (task, identity)
            for task, identity in zip(tasks, identities, strict=True)
            if not ranks.reusable(subject, task.name, identity)
        ]
        if not wanted:
            return

        model = ranks.load(subject)
        settings, facts = config.retrieval, model.config
        grids = []
        for task, identity in wanted:
            lengths = lengths_of(task, settings.lengths, settings.samples, facts.max_positions, facts.position_limit)
            grids.append(Grid(task, identity, subject, lengths))
        scorer = model_scorer(model, tokenizer.vocab_size)
        for grid in grids:
            started = time.monotonic()
            grid.measure(ranks, scorer, tokenizer)
            if ranks.rank == 0:
                results = {"pattern": facts.pattern, "chance": grid.task.chance, "cells": grid.results()}
                subject.write_results(grid.task.name, grid.identity, started, results)
    if ranks.rank == 0:
        print("\nmeans over the examples, those without the needles in parentheses:")
        for grid in grids:
            print(f"{grid.task.name}, chance {grid.task.chance:.2g}:")
            for cell in grid.results():
                print(f"  {describe(cell)}")


if __name__ == "__main__":
    run_program(main, name="eval.retrieval", doc=__doc__ or "", takes="RUN", config=RetrievalConfig)
