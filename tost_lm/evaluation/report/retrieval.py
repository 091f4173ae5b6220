"""The sections about retrieval: of a run the needle grid and the other tasks, of several runs all tasks by group."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tost_lm.evaluation.report.groups import Group, Mean
from tost_lm.evaluation.report.heatmaps import chance_text, needle_chart, tasks_chart
from tost_lm.evaluation.report.markdown import escape, table
from tost_lm.evaluation.report.page import Page
from tost_lm.evaluation.report.protocols import missing, of_checkpoint
from tost_lm.evaluation.report.record import Evaluated
from tost_lm.evaluation.retrieval_config import NEEDLE, OWN_WORDS, TASKS

HEADLINES = dict.fromkeys(TASKS, "found_share") | {NEEDLE: "choice_accuracy"}
"""The score by which a task is compared."""


def needle(run: Evaluated, page: Page) -> str:
    """The needle grid beside its control."""
    results = run.results(NEEDLE)
    if results is None:
        others = any(run.results(name) for name in OWN_WORDS)
        return "" if others else f"## Needle in a haystack\n\n{missing('eval.retrieval', run.with_text)}"
    cells = results["cells"]
    examples = sum(cell["samples"] for cell in cells)
    keys = ("choice_accuracy", "exact_accuracy")
    rows = [
        (name, *[f"{needle_mean(results, prefix + key):.1%}" for key in keys])
        for name, prefix in (("with the needle", ""), ("control: no needle", "control_"))
    ]
    parts = [
        f"## Needle in a haystack ({escape(NEEDLE)})",
        of_checkpoint(run, results, f"eval.retrieval {run.with_text}"),
        page.show("needle", needle_chart(cells), "Percentage of right words by depth and length, and control"),
        table(("mean over all cells", "right word chosen of ten", "each of its tokens the most likely"), rows),
        f"Chance is {results['chance']:.0%}, with {cells[0]['samples']} examples in a cell and {examples} in all: a "
        f"single cell at chance is off by {_chance_error(results['chance'], cells[0]['samples']):.0%} (one standard "
        f"error), the mean by {_chance_error(results['chance'], examples):.1%}.",
    ]
    if set(results["pattern"]) == {"T"}:
        parts.append(
            "Pure TSSA keeps statistics of the past, not the tokens themselves: it is not expected to recall a word "
            "exactly, and chance level here is no defect."
        )
    return "\n\n".join(parts)


def tasks(run: Evaluated, page: Page) -> str:
    """The tasks of RULER's structure by length, where there are any."""
    found = {name: results for name in OWN_WORDS if (results := run.results(name))}
    if not found:
        return ""
    samples = sorted({cell["samples"] for results in found.values() for cell in results["cells"]})
    return "\n\n".join([
        "## Retrieval tasks",
        *_of_checkpoints(run, found),
        page.show("retrieval", tasks_chart(found), "Percentage of values found by task and length"),
        "The share of what answers must name that the model wrote, taking its most likely token each time, and in "
        "parentheses the same where the text lacks it. Chance is the score of who guesses an answer of the right form. "
        f"Examples in a cell: {' to '.join(f'{count:,}' for count in dict.fromkeys([samples[0], samples[-1]]))}; the "
        f"standard error of a share is {0.5 / samples[0] ** 0.5:.1%} at most.",
        _by_length(found, lambda cell: f"{cell['found_share']:.1%} ({cell['control_found_share']:.1%})"),
        "Answers whose tokens are each the most likely one, given the answer before it, and −log p of the answer in "
        "nats with and without what is asked for in the text:",
        _by_length(
            found,
            lambda cell: f"{cell['exact_accuracy']:.1%}, {cell['answer_nats']:.2f} / {cell['control_answer_nats']:.2f}",
        ),
    ])  # fmt: skip


def of_groups(groups: Sequence[Group]) -> str:
    """Every task and length, a column for each group; empty unless several runs have results."""
    runs = [run for group in groups for run in group.runs]
    if sum(any(run.results(name) for name in TASKS) for run in runs) < 2:
        return ""
    rows = []
    for name in TASKS:
        results = [_of_one_step(group, name) for group in groups]
        chances = [result["chance"] for found in results for result in found]
        lengths = sorted({cell["length"] for found in results for result in found for cell in result["cells"]})
        rows += [
            (name, f"{length:,}", chance_text(chances[0]), *[_mean_of(found, name, length) for found in results])
            for length in lengths
        ]
    return "\n\n".join([
        "## Retrieval",
        f"The share of what answers must name that the model wrote (of {escape(NEEDLE)}, the share of examples whose "
        "right word was chosen of ten), mean ± standard error over the runs of a group, and in parentheses the mean "
        "where the text lacks it.",
        table(("task", "length", "chance", *[f"group {group.number}" for group in groups]), rows),
    ])  # fmt: skip


def needle_mean(results: dict[str, Any], key: str) -> float:
    """The mean of a score over all examples of a needle grid."""
    return _mean(results["cells"], key)


def _mean(cells: Sequence[dict[str, Any]], key: str) -> float:
    return sum(cell[key] * cell["samples"] for cell in cells) / sum(cell["samples"] for cell in cells)


def _of_checkpoints(run: Evaluated, found: Mapping[str, dict[str, Any]]) -> list[str]:
    """A line for each checkpoint that tasks were measured on, with their names if there are several."""
    names: dict[str, list[str]] = {}
    for name, results in found.items():
        names.setdefault(results["identity"]["checkpoint_sha256"], []).append(name)
    lines = []
    for own in names.values():
        seconds = sum(found[name]["seconds"] for name in own)
        tasks = ", ".join(f'"{name}"' for name in own)
        command = f"eval.retrieval {run.with_text} 'retrieval.tasks=[{tasks}]'"
        line = of_checkpoint(run, found[own[0]] | {"seconds": seconds}, command)
        lines.append(f"{escape(', '.join(own))}: {line}" if len(names) > 1 else line)
    return lines


def _by_length(found: Mapping[str, dict[str, Any]], shown: Callable[[dict[str, Any]], str]) -> str:
    lengths = sorted({cell["length"] for results in found.values() for cell in results["cells"]})
    rows = []
    for name, results in found.items():
        cells = {cell["length"]: shown(cell) for cell in results["cells"]}
        rows.append((name, chance_text(results["chance"]), *[cells.get(length, "–") for length in lengths]))
    return table(("task", "chance", *[f"{length:,} tokens" for length in lengths]), rows)


def _of_one_step(group: Group, name: str) -> list[dict[str, Any]]:
    """Results of the group's runs; none where they are of different steps or settings, of which there is no mean."""
    found = [results for run in group.runs if (results := run.results(name))]
    made_alike = {str([results["identity"][key] for key in ("step", "settings")]) for results in found}
    return found if len(made_alike) == 1 else []


def _mean_of(found: Sequence[dict[str, Any]], name: str, length: int) -> str:
    """Over runs, of a cell or of the cells of all depths."""
    cells = [own for results in found if (own := [cell for cell in results["cells"] if cell["length"] == length])]
    mean = Mean.of([_mean(own, HEADLINES[name]) for own in cells])
    control = Mean.of([_mean(own, f"control_{HEADLINES[name]}") for own in cells])
    if mean is None or control is None:
        return "–"
    return f"{mean.value:.1%}" + ("" if mean.error is None else f" ± {mean.error:.1%}") + f" ({control.value:.1%})"


def _chance_error(chance: float, examples: int) -> float:
    return (chance * (1 - chance) / examples) ** 0.5
