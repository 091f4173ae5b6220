"""All results of a suite in one table, with published ones and what may be compared."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tost_lm.errors import TostError
from tost_lm.files import write_atomically
from tost_lm.inference.evaluated import EvaluatedCheckpoint
from tost_lm.markdown import code, escape, table
from tost_lm.page import to_html, to_markdown
from tost_lm.tasks.sections import EvaluatedModel
from tost_lm.tasks.table import HEADER, NOTHING, TableRow
from tost_lm.tasks.task import Family, Task


def write_suite(
    evaluated: EvaluatedCheckpoint, tasks: Sequence[tuple[Family, Task]], failed: Mapping[str, TostError]
) -> Path:
    """Write suite.md and suite.html into the folder `eval` of its home. Returns the path of suite.html.

    Args:
        failed: errors of the tasks that failed. Their earlier results are not shown.
    """
    title = f"Evaluation of {evaluated.home.resolve().name}"
    markdown = to_markdown(_sections(title, evaluated, tasks, failed))
    folder = evaluated.home / "eval"
    write_atomically(folder / "suite.md", markdown)
    write_atomically(folder / "suite.html", to_html(markdown, {}, title))
    return folder / "suite.html"


def _sections(
    title: str, evaluated: EvaluatedCheckpoint, tasks: Sequence[tuple[Family, Task]], failed: Mapping[str, TostError]
) -> Iterator[str]:
    hashes = evaluated.hashes()
    yield f"# {escape(title)}"
    yield (
        f"Checkpoint {code(evaluated.checkpoint.name)} (SHA-256 {hashes['checkpoint_sha256'][:12]}), tokenizer "
        f"(SHA-256 {hashes['tokenizer_sha256'][:12]})."
    )
    yield table(HEADER, [row for _, task in tasks for row in _rows_of(task, evaluated, failed.get(task.name))])
    yield (
        "± is the standard error over examples. A published result is comparable if task, test set file and window "
        "length are the same and, for metrics per token, the tokenizer. The published results have no standard error. "
        "`eval/TASK/results.json` has all metrics."
    )


def _rows_of(task: Task, evaluated: EvaluatedCheckpoint, failure: TostError | None) -> Iterator[TableRow]:
    if failure:
        yield TableRow(task.name, NOTHING, f"failed: {failure}", *[NOTHING] * 3)
        return
    results = EvaluatedModel(evaluated.home).results(task.name)
    assert results is not None, f"{task.name}: the evaluation has ended without results"
    yield from task.table_rows(results)
