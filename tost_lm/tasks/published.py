"""Published results, and tables of models beside them: which of the results are comparable."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tost_lm.errors import ConfigError
from tost_lm.files import read_rows
from tost_lm.inference.effective_length import ACCURACIES, accuracy_of, effective_lengths
from tost_lm.inference.evaluated import differing, read_result_file
from tost_lm.intervals import paired
from tost_lm.markdown import escape, format_chance, format_result, table, with_interval
from tost_lm.tasks.grid import length_file, without_lengths
from tost_lm.tasks.over_texts import of_texts

GPT2_PAPER = "GPT-2 paper (Radford et al. 2019)"
TOST_PAPER = "ToST paper (arXiv 2412.17810)"


class Published(NamedTuple):
    """A published result."""

    task: str
    """The task of the result, or one that measures the same test set."""
    model: str
    measure: str
    value: float
    source: str
    window_tokens: int = 1024
    """Length of a window."""
    differs: str = ""
    """How the measurement differs from the task; empty: it does not."""

    @property
    def shown_value(self) -> str:
        """The value with the two decimals that the sources have at most."""
        return f"{self.value:.2%}" if self.measure.endswith("accuracy") else f"{self.value:,.2f}"


OWN_DETOKENIZERS = "their detokenizers were not released"
OWN_SCRIPT = "their script was not released"
HUGGING_FACE = "Hugging Face's guide to perplexity"
MEASURED_GPT2 = "GPT-2's released weights"
NANOGPT = "nanoGPT, GPT-2's released weights"

PUBLISHED = [
    Published("wikitext2@hf-stride1024", "GPT-2 124M", "token_perplexity", 29.94, MEASURED_GPT2),
    Published("wikitext2@hf-stride1024", "GPT-2 774M", "token_perplexity", 19.44, HUGGING_FACE),
    Published("wikitext2@hf-stride512", "GPT-2 774M", "token_perplexity", 16.44, HUGGING_FACE),
    Published("wikitext2@lm-eval", "GPT-2 124M", "word_perplexity", 37.37, MEASURED_GPT2),
    Published("wikitext2@lm-eval", "GPT-2 117M", "word_perplexity", 29.41, GPT2_PAPER, differs=OWN_DETOKENIZERS),
    Published(
        "wikitext2@lm-eval", "GPT-2 117M, as WikiText-103", "word_perplexity", 37.50, GPT2_PAPER,
        differs=OWN_DETOKENIZERS,
    ),
    Published("lambada_openai@lm-eval", "GPT-2 124M", "accuracy", 0.3256, MEASURED_GPT2),
    Published("lambada_openai@lm-eval", "GPT-2 124M", "word_perplexity", 40.06, MEASURED_GPT2),
    Published("lambada_openai@lm-eval", "GPT-2 117M", "word_perplexity", 35.13, GPT2_PAPER, differs=OWN_SCRIPT),
    Published("lambada_openai@last-token", "GPT-2 124M", "accuracy", 0.4667, MEASURED_GPT2),
    Published("lambada_openai@last-token", "GPT-2 117M", "accuracy", 0.4599, GPT2_PAPER, differs=OWN_SCRIPT),
    Published("ptb@megatron", "GPT-2 117M", "word_perplexity", 65.85, GPT2_PAPER, differs=OWN_DETOKENIZERS),
    Published("owt@nanogpt", "GPT-2 124M", "nats_per_token", 3.12, NANOGPT),
    Published("owt@nanogpt", "gpt2-base 124M", "nats_per_token", 2.84, TOST_PAPER),
    Published("owt@nanogpt", "tost-base 110M", "nats_per_token", 3.20, TOST_PAPER),
    Published("owt@nanogpt", "tost-medium 304M", "nats_per_token", 2.88, TOST_PAPER),
    Published("owt@nanogpt", "tost-large 655M", "nats_per_token", 2.72, TOST_PAPER),
]  # fmt: skip


def comparable(published: Published, results: dict[str, Any]) -> str:
    """Whether a published result is comparable with results of its task: yes or no, and why."""
    if published.differs:
        return f"no: {published.differs}"
    if results.get("published_file") is False:
        return "no: the file is not the published one"
    if results["window_tokens"] != published.window_tokens:
        return f"no: windows of {results['window_tokens']:,} tokens, not {published.window_tokens:,}"
    if results["by_token"] and not results["tokenizer_is_gpt2s"]:
        return "no: measured by token, and the tokenizer is not GPT-2's"
    return "yes" if results.get("published_file") else "yes, if the file is the published one"


def models_comparable(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether the results of two models for one task are comparable: yes or no, and why."""
    if any(one["identity"].get(name) != other["identity"].get(name) for name in ("data_sha256", "task_sha256")):
        return "no: another test set file or task"
    if one["window_tokens"] != other["window_tokens"]:
        return f"no: windows of {other['window_tokens']:,} tokens, not {one['window_tokens']:,} as in the first row"
    same_tokenizer = one["identity"]["tokenizer_sha256"] == other["identity"]["tokenizer_sha256"]
    if one["by_token"] and not same_tokenizer and not (one["tokenizer_is_gpt2s"] and other["tokenizer_is_gpt2s"]):
        return "no: measured by token, and the tokenizers differ"
    return "yes"


def side_by_side(homes: Sequence[Path]) -> str:
    """Markdown for all test sets and tasks with lengths that have results in any of these folders.

    Raises:
        ConfigError: a folder has no results, or damaged ones.
    """
    found = {path: read_results(_home(path)) for path in homes}
    tasks = list(dict.fromkeys(name for results in found.values() for name in results))
    sections = [text for name in tasks for text in _section(name, found)]
    rows = [(str(home), own.shown, own.about) for home, results in found.items() for own in effective_lengths(results)]
    if rows:
        sections.append(f"## Effective length\n\n{table(('model', 'effective length', 'measured by'), rows)}")
    if any(DIFFERENCE in section for section in sections):
        sections.append(
            f"{DIFFERENCE}: the mean over examples or texts that both models read, in parentheses its 95 % interval "
            "over them and the number of pairs; in nats of an example where the result is no accuracy. Other "
            "parentheses: the 95 % interval over examples or texts (Wilson's), where a text counts with the mean over "
            "its questions. ±: the standard error over examples. No interval here is over training seeds; tost report "
            "of several runs has those."
        )
    return "\n\n".join(sections)


DIFFERENCE = "minus the first model"


def read_results(home: Path) -> dict[str, dict[str, Any]]:
    """The results of test sets and of tasks with lengths, by task. Raises ConfigError when there are none."""
    found = {}
    for path in sorted(home.glob("eval/*@*/results.json")):
        if (results := read_result_file(path)) and results.keys() & {"by_token", "cells"}:
            found[path.parent.name] = results
    if not found:
        raise ConfigError(f"{home}: no results of retrieval or test sets; run tost eval {home} TASK, see tost tasks")
    return found


def _section(task: str, found: Mapping[Path, dict[str, dict[str, Any]]]) -> Iterator[str]:
    measured = {home: results[task] for home, results in found.items() if task in results}
    (first_home, first), rows = next(iter(measured.items())), list[tuple[str, ...]]()
    yield f"## {escape(task)}"
    if "cells" in first:
        yield _by_length(task, measured)
        return
    published = [row for row in PUBLISHED if row.task == task]
    measures = dict.fromkeys([first["headline"], *(row.measure for row in published)])
    for measure in measures:
        for home, results in measured.items():
            result, checkpoint = format_result(measure, results["model"]), results["identity"]["checkpoint"]
            verdict, difference = models_comparable(first, results), "–"
            if verdict == "yes" and home != first_home:
                files = (_home(one) / "eval" / task / "rows.jsonl" for one in (home, first_home))
                difference = _difference(measure, *map(read_rows, files))
            rows.append((str(home), measure, result, difference, checkpoint, verdict))
        for row in published:
            if row.measure != measure:
                continue
            verdicts = {home: comparable(row, results) for home, results in measured.items()}
            same = len(set(verdicts.values())) == 1
            shown = next(iter(verdicts.values())) if same else "; ".join(f"{h}: {v}" for h, v in verdicts.items())
            rows.append((row.model, row.measure, row.shown_value, "–", row.source, shown))
    yield table(
        ("model", "measure", "result", DIFFERENCE, "checkpoint or source", "comparable"),
        [(model, measure.replace("_", " "), *rest) for model, measure, *rest in rows],
    )


def _by_length(task: str, measured: Mapping[Path, dict[str, Any]]) -> str:
    """A row for each length and model; models are paired by text."""
    (first_home, first), rows = next(iter(measured.items())), []
    for length in sorted({cell["length"] for results in measured.values() for cell in results["cells"]}):
        for home, results in measured.items():
            cell = next((cell for cell in results["cells"] if cell["length"] == length), None)
            if not cell:
                continue
            key, verdict, difference = accuracy_of(cell), grids_comparable(first, results), "–"
            if verdict == "yes" and home != first_home:
                folders = (_home(one) / "eval" / task for one in (home, first_home))
                difference = _difference(key, *(_texts(folder, length, ACCURACIES[key]) for folder in folders))
            score = f"{ACCURACIES[key]} {with_interval(cell[key], cell['samples'], '.1%')}"
            control = f"{cell[f'control_{key}']:.1%}" if f"control_{key}" in cell else "–"
            checkpoint = results["identity"]["checkpoint"]
            rows.append((
                str(home), f"{length:,}", f"{cell['samples']:,}", score, control, difference, checkpoint, verdict,
            ))  # fmt: skip
    header = ("model", "tokens", "texts", "score", "control", DIFFERENCE, "checkpoint", "comparable")
    return f"Chance {format_chance(first['chance'])}.\n\n{table(header, rows)}"


def grids_comparable(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Whether two models were asked the same questions: yes or no, and why."""
    first, second = (results["identity"] for results in (one, other))
    if first["tokenizer_sha256"] != second["tokenizer_sha256"]:
        return "no: the tokenizers differ, and so the questions"
    texts = [(identity["shards_fingerprint"], identity.get("text_sha256")) for identity in (first, second)]
    if texts[0] != texts[1]:
        return "no: another text"
    settings = [without_lengths(identity["settings"]) for identity in (first, second)]
    return "yes" if settings[0] == settings[1] else f"no: another {differing(*settings)}"


def _texts(folder: Path, length: int, key: str) -> list[dict[str, Any]]:
    """A row for each text of a length, with the mean score over the questions whose answers are in it."""
    stored = read_result_file(length_file(folder, length)) or {"examples": []}
    asked = [row for row in stored["examples"] if row["condition"] == "needle"]
    return [{key: score} for score in of_texts(asked, key)]


def _difference(measure: str, own: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str:
    """The mean difference of the examples of two models, with its interval and the number of pairs."""
    is_score = measure in ACCURACIES or measure.endswith("accuracy")
    key = ACCURACIES.get(measure) or ("right" if is_score else "nats")
    columns = [[float(row[key]) for row in rows] for rows in (own, other) if rows and key in rows[0]]
    if len(columns) < 2 or len(columns[0]) != len(columns[1]):
        return "–"
    if (found := paired(*columns, are_scores=is_score)) is None:
        return "–"
    form, unit = ("+.1%", "") if is_score else ("+.4g", " nats")
    return f"{found.mean:{form}}{unit} ({found.low:{form}} to {found.high:{form}}, {found.pairs:,} pairs)"


def _home(path: Path) -> Path:
    """The folder with the results of a run or model folder. Raises ConfigError when it does not exist."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; give runs, exports or folders of Hugging Face models")
    return path.parent.parent if path.absolute().parent.name == "checkpoints" else path
