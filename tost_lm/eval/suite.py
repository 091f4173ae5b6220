"""The checks of `tost eval suite` before its first program; and its table: all results of a model, with published
ones and what may be compared.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.errors import ConfigError, TostError
from tost_lm.eval import context as context_tasks
from tost_lm.eval import retrieval
from tost_lm.eval.data_sets import find_set_file
from tost_lm.eval.protocols import find_protocol
from tost_lm.eval.published import PUBLISHED, condition, verdict, why_not_comparable
from tost_lm.eval.retrieval.grid import over_cells
from tost_lm.eval.suite_settings import Step
from tost_lm.files import write_atomically
from tost_lm.inference.hugging_face import HuggingFaceSubject, find_subject
from tost_lm.inference.protocol_names import CONTEXT_FACTS, CONTEXT_GAIN, COPYING, HELDOUT, POSITIONS, TEXT
from tost_lm.inference.subject import Subject
from tost_lm.inference.text import TextFile
from tost_lm.markdown import code, escape, format_result, table
from tost_lm.report.page import to_html, to_markdown
from tost_lm.report.record import EvaluatedModel
from tost_lm.report.retrieval import HEADLINES, SHOWN


def check_steps(path: Path, steps: Sequence[Step]) -> Subject:
    """The subject of `path`, as in `find_subject`, if the test sets and texts of all programs exist.

    Test sets without a file are downloaded. Whether the model can read the lengths is checked by the programs.

    Raises:
        TostError: there is no subject, a protocol is unknown, or files are missing or damaged (a line for each).
    """
    subject = find_subject(path)
    problems: list[str] = []
    for check in [check for step in steps for check in _checks(step, subject)]:
        try:
            check()
        except TostError as error:
            problems += str(error).splitlines()
    if problems:
        raise TostError("\n".join(dict.fromkeys(problems)))
    return subject


def _checks(step: Step, subject: Subject) -> Iterator[Callable[[], object]]:
    """Functions that raise TostError. Raises ConfigError for an unknown protocol."""
    config = step.config
    if step.section == "zero_shot":
        protocols = [find_protocol(name) for name in config.zero_shot.protocols if name != HELDOUT]
        for data_set in dict.fromkeys(protocol.data_set for protocol in protocols):
            yield partial(find_set_file, data_set, config.sets)
        if HELDOUT in config.zero_shot.protocols:
            yield partial(subject.open_shards, config.heldout.shards)
    elif step.section in ("retrieval", "context"):
        yield partial(_make_tasks, step, subject)
    elif isinstance(subject, HuggingFaceSubject):
        yield partial(_reject_hugging_face, step, subject)
    elif step.section == "positions":
        yield partial(subject.open_shards, config.heldout.shards)
    else:
        yield partial(TextFile.check, config.text.file, "text.file")


def _make_tasks(step: Step, subject: Subject) -> None:
    config, tokenizer = step.config, subject.lossless_tokenizer()
    haystack = getattr(config, step.section).haystack
    text = partial(retrieval.find_text, haystack, config.heldout.shards, subject, step.section)
    if step.section == "retrieval":
        retrieval.make_tasks(config, tokenizer, text)
    else:
        context_tasks.make_tasks(config.context, tokenizer, text)


def _reject_hugging_face(step: Step, subject: Subject) -> None:
    raise ConfigError(
        f"{subject.checkpoint}: a Hugging Face model, which tost {step.command} does not read; leave out "
        f"[{step.section}]"
    )


NOTHING = "–"
OWN_TEXT, OWN_SENTENCES = "no: the text is our own", "no: the sentences are our own"


class Row(NamedTuple):
    """A line of the table; a line with an empty task continues the line above with another published result."""

    task: str
    metric: str
    result: str
    reference: str
    """Chance level, result of the control, or a baseline."""
    examples: str
    length: str
    published: str = NOTHING
    comparable: str = NOTHING


HEADER = ("task", "metric", "result", "chance, control", "examples", "length in tokens", "published", "comparable")


def write_suite(subject: Subject, steps: Sequence[Step], failed: Mapping[str, int], target: str) -> Path:
    """Write suite.md and suite.html into the folder `eval` of the subject. Returns the path of suite.html.

    Args:
        failed: exit codes of the programs that failed, by command. Their results are not shown.
        target: the model as the programs are given it.
    """
    title = f"Evaluation of {subject.home.resolve().name}"
    markdown = to_markdown(_sections(title, subject, steps, failed, target))
    folder = subject.home / "eval"
    write_atomically(folder / "suite.md", markdown)
    write_atomically(folder / "suite.html", to_html(markdown, {}, title))
    return folder / "suite.html"


def _sections(
    title: str, subject: Subject, steps: Sequence[Step], failed: Mapping[str, int], target: str
) -> Iterator[str]:
    rows = [row for step in steps for row in _rows_of(step, subject, failed.get(step.command))]
    hashes = subject.hashes()
    yield f"# {escape(title)}"
    yield (
        f"Checkpoint {code(subject.checkpoint.name)} (SHA-256 {hashes['checkpoint_sha256'][:12]}), tokenizer (SHA-256 "
        f"{hashes['tokenizer_sha256'][:12]})."
    )
    yield table(HEADER, rows)
    yield (
        "± is the standard error over examples. A published result is comparable if protocol, test set file and "
        "window length are the same and, for metrics per token, the tokenizer. The published results have no standard "
        "error. Each program writes its results with all metrics to `eval/TASK/results.json`:"
    )
    yield "\n".join(f"- {code(f'tost {step.command} {shlex.join([target, *step.overrides])}')}" for step in steps)


def _rows_of(step: Step, subject: Subject, failure: int | None) -> Iterator[Row]:
    for task in _tasks_of(step):
        if failure is not None:
            yield Row(task, NOTHING, f"tost {step.command} failed (exit code {failure})", *[NOTHING] * 3)
            continue
        results = EvaluatedModel(subject.home).results(task)
        assert results is not None, f"{task}: the program has ended without results"
        yield from ROWS[HELDOUT if task == HELDOUT else step.section](task, results, subject)


def _tasks_of(step: Step) -> list[str]:
    """The names under which a program writes results."""
    config = step.config
    if step.section == "zero_shot":
        return list(dict.fromkeys(config.zero_shot.protocols))
    if step.section in ("retrieval", "context"):
        return getattr(config, step.section).tasks
    return [POSITIONS if step.section == "positions" else TEXT]


def _of_protocol(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    """The cited metric, and those that have published results: a line for each of these."""
    totals, published = results["model"], [row for row in PUBLISHED if row.protocol == task]
    for measure in dict.fromkeys([results["headline"], *(row.measure for row in published)]):
        has_chance = "chance" in totals and measure.endswith("accuracy")
        own = (
            task, _in_words(measure), _result(measure, totals, totals["examples"]),
            f"chance {totals['chance']:.2%}" if has_chance else NOTHING,
            f"{totals['examples']:,}", f"{results['window_tokens']:,}",
        )  # fmt: skip
        others = [
            (
                f"{row.model}: {row.shown_value} ({row.source})",
                verdict(why_not_comparable(row, results), condition(results)),
            )
            for row in published
            if row.measure == measure
        ]
        yield Row(*own, *(others[0] if others else (NOTHING, NOTHING)))
        yield from (Row("", "", "", "", "", "", *other) for other in others[1:])


def _of_heldout(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    totals, key = results["model"], "bits_per_byte"
    best = min(results["baselines"], key=lambda baseline: baseline[key])
    reference = f"{best['name']} {best[key]:.4f}"
    result, examples = _result(key, totals, totals["documents"]), f"{totals['documents']:,}"
    yield Row(task, _in_words(key), result, reference, examples, f"{results['window_tokens']:,}", comparable=OWN_TEXT)


def _of_retrieval(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    """A line for each length, over all depths."""
    key, cells = HEADLINES[task], results["cells"]
    for length in sorted({cell["length"] for cell in cells}):
        means = over_cells([cell for cell in cells if cell["length"] == length], (key, f"control_{key}"))
        yield _of_cells(task, key, means, results["chance"], f"{length:,}")


def _of_context(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    """Two lines for each cell: the cited score, and the gain over the control."""
    for cell in results["cells"]:
        facts = ", ".join(f"{name} {cell[name]:,}" for name in CONTEXT_FACTS if name in cell)
        length = f"{cell['length']:,}" + (f" ({facts})" if facts else "")
        yield _of_cells(task, SHOWN[task][0], cell, results["chance"], length)
        gain = _result("gain_over_control", cell, cell["samples"])
        examples = f"{cell['samples']:,}"
        yield Row(task, "gain over control (nats per token)", gain, NOTHING, examples, length, comparable=_own(task))


def _of_cells(task: str, key: str, cell: Mapping[str, Any], chance: float, length: str) -> Row:
    reference = f"chance {chance:.2%}, control {format_result(f'control_{key}', cell)}"
    result, examples = _result(key, cell, cell["samples"]), f"{cell['samples']:,}"
    return Row(task, _in_words(key), result, reference, examples, length, comparable=_own(task))


def _of_positions(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    """The last positions within the trained length, and the last ones beyond it."""
    buckets, key = results["by_position"], "nats_per_token"
    for is_trained, place in ((True, "within"), (False, "beyond")):
        if last := [bucket for bucket in buckets if bucket["trained"] == is_trained][-1:]:
            totals = {key: last[0][key], f"{key}_standard_error": last[0]["standard_error"]}
            length = f"up to {last[0]['end']:,}, {place} the trained length"
            result, examples = _result(key, totals, results["sequences"]), f"{results['sequences']:,}"
            yield Row(task, _in_words(key), result, NOTHING, examples, length, comparable=OWN_TEXT)


def _of_text(task: str, results: dict[str, Any], subject: Subject) -> Iterator[Row]:
    totals, key = results["model"], "bits_per_byte"
    result, length = _result(key, totals, 1), f"{totals['tokens']:,}"
    yield Row(task, _in_words(key), result, NOTHING, "1", length, comparable=OWN_TEXT)


ROWS: dict[str, Callable[[str, dict[str, Any], Subject], Iterator[Row]]] = {
    HELDOUT: _of_heldout,
    "zero_shot": _of_protocol,
    "retrieval": _of_retrieval,
    "context": _of_context,
    "positions": _of_positions,
    "text": _of_text,
}
"""The lines of a task with results, by protocol or section."""


def _result(key: str, totals: Mapping[str, Any], examples: int) -> str:
    """A result as it is cited, with its standard error, or that it has none, as with a single example."""
    if examples > 1 and totals.get(f"{key}_standard_error") is not None:
        return format_result(key, totals)
    return f"{format_result(key, {key: totals[key]})} (no standard error)"


def _own(task: str) -> str:
    return OWN_TEXT if task in (COPYING, CONTEXT_GAIN) else OWN_SENTENCES


def _in_words(key: str) -> str:
    return key.replace("_", " ")
