"""Measure a model by tasks: test sets, held-out text, retrieval, loss by position, any text file.

    tost eval runs/demo heldout
    tost eval runs/base wikitext2@hf-stride1024 lambada_openai@lm-eval sets.wikitext2=wiki.test.raw
    tost eval runs/long needle records needle.samples=100 'needle.lengths=[1024, 4096, 16384]'
    tost eval runs/long text text.file=book.txt
    tost eval runs/base suite sets.wikitext2=wiki.test.raw

RUN is a run, a step folder, an export or a folder of a Hugging Face model, also at a URL, or hub:NAME. TASK is the name
of a task, of a family (all its tasks) or of a group, as `tost tasks` lists them, or one suite: a TOML file (or recipe)
with `tasks` and settings. All settings, test sets and texts are checked before anything is measured.

Writes eval/TASK/results.json: the totals with standard errors, control and chance; tasks on test sets and held-out
documents also rows.jsonl (a line per example). Valid results for the same checkpoint, text and settings are reused,
and the same command resumes: each length of retrieval is a file. `tost report` shows all results of a run, and `tost
compare` those of several models and published ones. On more than tensor × sequence ranks, copies of the model share the
work.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tost_lm.command_line import run_program
from tost_lm.errors import TostError
from tost_lm.inference.settings import RanksConfig
from tost_lm.parallel.graceful_stop import terminable
from tost_lm.parallel.launch import ranks_of_launch, start_ranks
from tost_lm.tasks.settings import EvalConfig, tasks_of
from tost_lm.tasks.task import Family, Task


def main(path: Path, config: Any) -> None:
    from tost_lm.inference.hugging_face import find_evaluated
    from tost_lm.inference.ranks import joined_ranks
    from tost_lm.tasks.task import evaluate

    tasks = tasks_of(config)
    size = ranks_of_launch(config.parallel.model_ranks, config.launch)
    start_ranks("eval", size)
    with joined_ranks(layout(config.parallel, tasks, size), copies=True) as ranks:
        failed = evaluate(replace(find_evaluated(path), dtype=config.dtype), ranks, config, tasks)
    if failed:
        raise TostError("\n".join(f"{name}: {error}" for name, error in failed.items()))


def layout(parallel: RanksConfig, tasks: Sequence[tuple[Family, Task]], size: int) -> RanksConfig:
    """The layout of so many ranks: those of tasks that read one text are sequence ranks, unless parallel.sequence is
    set."""
    if "sequence" in parallel.model_fields_set or not all(task.reads_one_stream for _, task in tasks):
        return parallel
    return parallel.model_copy(update={"sequence": max(1, size // parallel.tensor)})


def run() -> NoReturn:
    run_program(
        terminable(main),
        name="tost eval",
        doc=__doc__ or "",
        positional="RUN TASK…",
        config=EvalConfig,
        takes_urls=True,
    )


if __name__ == "__main__":
    run()
