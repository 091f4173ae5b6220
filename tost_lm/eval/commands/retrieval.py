"""Retrieval from long texts by length, with controls whose text lacks the answer.

    tost eval retrieval runs/demo
    tost eval retrieval runs/long 'retrieval.tasks=["needle", "ruler"]' retrieval.samples=100 \\
      'retrieval.lengths=[1024, 4096, 16384]'
    tost eval retrieval runs/demo launch.ranks=4 parallel.tensor=2

    needle@words                  one secret word: a grid of length by depth
    niah_single_1@own-words       one key with a number of seven digits, in repeated sentences
    niah_single_2@own-words       one key with a number, in a text
    niah_single_3@own-words       one key with a UUID, in a text
    niah_multikey_1@own-words     four keys in a text; the question asks for one
    niah_multikey_2@own-words     a text of keys and numbers only; the question asks for one
    niah_multikey_3@own-words     a text of UUIDs as keys and values; the question asks for one
    niah_multivalue@own-words     one key with four numbers in a text; the question asks for all
    niah_multiquery@own-words     four keys in a text; the question asks for all
    vt@own-words                  a chain of five variables; the question asks for those with a value
    cwe@own-words                 a list of words; the question asks for the ten most common ones
    fwe@own-words                 a list of drawn letters; the question asks for the three most frequent words
    qa_1@own-words                documents about towns; one of them answers the question
    qa_2@own-words                documents about towns and persons; two of them answer the question

The last thirteen have the structure of RULER's tasks (arXiv 2404.06654) and sentences of their own. In retrieval.tasks,
`ruler` stands for all of them and `needle` for the first task. Prints a line for each length with the accuracy over
all depths: how often the right word is the likeliest of ten (choice), or the fraction of the expected strings in the
generated text (found). Each cell is written to eval/TASK/cells/ as soon as it is measured, with all its scores and
examples. The scores of a task are in eval/TASK/results.json. A cell that exists for this checkpoint, text and seed is
not measured again. Examples are generated once, in retrieval.samples_folder, and their hash is in the file of each
cell. On more than tensor × sequence ranks, the copies of the model share the cells.
"""

from functools import partial
from pathlib import Path
from typing import NoReturn

from tost_lm.config import run_program
from tost_lm.eval.settings import RetrievalConfig
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks


def main(path: Path, config: RetrievalConfig) -> None:
    from tost_lm.eval.retrieval import find_text, make_tasks
    from tost_lm.eval.retrieval.grid import lengths_of, measure_tasks
    from tost_lm.inference.hugging_face import find_subject
    from tost_lm.inference.ranks import joined_ranks

    start_ranks("eval retrieval", ranks_of_launch(config.parallel.model_ranks, config.launch))
    with joined_ranks(config.parallel, copies=True, graceful_stop=True) as ranks:
        subject = find_subject(path)
        tokenizer = subject.lossless_tokenizer()
        settings = config.retrieval
        text = partial(find_text, settings.haystack, config.heldout.shards, subject)
        tasks = make_tasks(config, tokenizer, text)
        chosen = settings.model_dump(mode="json", include={"lengths", "samples", "seed"})
        lengths = partial(lengths_of, settings.lengths, settings.samples)
        measure_tasks(ranks, subject, tokenizer, [(task, chosen) for task in tasks], lengths, settings.samples_folder)


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval retrieval",
        doc=__doc__ or "",
        positional="RUN",
        config=RetrievalConfig,
    )


if __name__ == "__main__":
    run()
