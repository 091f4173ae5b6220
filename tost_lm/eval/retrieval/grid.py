"""The cells of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/cells/length_00001024_depth_0.50.json    scores and examples; no depth if it is drawn
    eval/TASK/results.json                             scores of all cells

A cell is measured again when its checkpoint, text, seed or number of samples has changed. It does not depend on the
other cells.

A model's answers are scored by the text that it generates and by the likelihood of the right answer. Each example is
scored under each condition of its task: with the needles and, as a control, without them:

    found    fraction of the references in the greedily generated text, ignoring case; the text ends at an end of text,
             or when the room for the answer is used up
    exact    whether every token of the right answer is the most likely one, given the answer before it
    tokens   fraction of the tokens of the right answer that are the most likely one, given the answer before them
    nats     −log p of the right answer, also per token
    choice   whether the right answer is the likeliest option, if the task has several options
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.eval.retrieval.tasks import Example, StoredExamples, Task, stored_examples
from tost_lm.inference.generation import LanguageModel, ModelFacts, continuations, greedy
from tost_lm.inference.protocol_names import CONTEXT_FACTS
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.subject import Subject, read_result_file, write_result_file
from tost_lm.markdown import format_chance, with_error
from tost_lm.model import LMOutput
from tost_lm.model.streaming import TILE_TOKENS, prefill

TOKENS_AT_ONCE = 8 * TILE_TOKENS
ANSWER_TOKENS_AT_ONCE = TILE_TOKENS // 2
"""Bounds the memory of logits, which whole answers need at each token."""
MEANS = {
    "choice": "choice_accuracy",
    "found": "found_share",
    "exact": "exact_accuracy",
    "tokens": "token_accuracy",
    "nats": "answer_nats",
    "nats_per_token": "nats_per_token",
}
"""Keys of a cell's means, by the key of its rows."""


class Scores(NamedTuple):
    """Scores of S examples with equally many options."""

    nats: np.ndarray
    """−log p of each option after the prompt, float64 [S, options]."""
    top_share: np.ndarray
    """Fraction of the option's tokens that are the most likely one, float64 [S, options]."""
    generated: list[list[int]]
    """Ids of the greedily generated text of each example."""


ACCURACIES = {"choice_accuracy": "choice", "found_share": "found", "token_accuracy": "tokens"}
"""Scores by precedence, and their names in print: a task's accuracy is the first that it has."""
FEW_EXAMPLES = 25
"""With fewer the standard error of an accuracy may exceed 10 %."""


Scorer = Callable[[Sequence[Example], int], Scores]
"""(examples with prompts of equal length, tokens to generate) → their scores."""


def model_scorer(model: LanguageModel, vocab_size: int, ranks: Ranks | None = None) -> Scorer:
    """The scorer of a model in evaluation mode. It reads each prompt once, in tiles, and continues from the state.

    Args:
        vocab_size: ids that the tokenizer has; padding of the vocabulary is never the most likely.
        ranks: all of one copy of the model call the scorer; None: only this one.
    """
    each = (ranks or Ranks()).each

    @torch.no_grad()
    def score(examples: Sequence[Example], room: int) -> Scores:
        prompts_ST = torch.from_numpy(np.stack([example.prompt for example in examples]))
        output = prefill(model, each(prompts_ST.split(TILE_TOKENS, 1)))
        nats, top_share = zip(
            *(
                _score_option(model, output, [example.options[i] for example in examples], vocab_size)
                for i in each(range(len(examples[0].options)))
            ),
            strict=True,
        )
        steps = list(each(continuations(model, output, room, lambda logits_SV: greedy(logits_SV[:, :vocab_size]))))
        generated = torch.stack(steps, 1).tolist() if steps else [[]] * len(examples)
        return Scores(np.stack(nats, 1), np.stack(top_share, 1), generated)

    return score


def score_cell(
    task: Task, tokenizer: Tokenizer, scorer: Scorer, sets: Sequence[tuple[Example, ...]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(scores, rows): means over a cell's examples under each condition, and a row for each example and condition.

    Each mean has a standard error over the examples; None if there is only one. The gain over a control is the nats per
    token by which the first condition lowers the answer, with the standard error of paired differences.
    """
    rows: dict[str, list[dict[str, Any]]] = {condition: [] for condition in task.conditions}
    longest = min(TILE_TOKENS, len(sets[0][0].prompt))
    together = max(1, min(TOKENS_AT_ONCE // longest, ANSWER_TOKENS_AT_ONCE // task.room))
    for first in range(0, len(sets), together):  # bounds the memory of the texts
        for own, examples in zip(rows.values(), zip(*sets[first : first + together], strict=True), strict=True):
            own += _rows(task, tokenizer, scorer, examples)
    scores: dict[str, Any] = {}
    (shown, asked), *controls = rows.items()
    for condition, own in rows.items():
        prefix = "" if condition == shown else f"{condition}_"
        for key, name in MEANS.items():
            if key in own[0]:
                scores |= _mean(prefix + name, [row[key] for row in own])
    for condition, own in controls:
        pairs = zip(own, asked, strict=True)
        scores |= _mean(f"gain_over_{condition}", [a["nats_per_token"] - b["nats_per_token"] for a, b in pairs])
    numbered = [
        {"sample": sample, "condition": condition, **row}
        for condition, own in rows.items() for sample, row in enumerate(own)
    ]  # fmt: skip
    return scores, numbered


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: mean(values), f"{name}_standard_error": error}


def _rows(task: Task, tokenizer: Tokenizer, scorer: Scorer, examples: Sequence[Example]) -> list[dict[str, Any]]:
    rows = []
    scores = scorer(examples, task.room if examples[0].references else 0)
    for i, example in enumerate(examples):
        row: dict[str, Any] = {"question": example.question}
        if example.references:
            ids = scores.generated[i]
            text = tokenizer.decode(ids[: ids.index(tokenizer.eot)] if tokenizer.eot in ids else ids)
            row |= {"references": list(example.references), "generated": text}
            row["found"] = sum(name.lower() in text.lower() for name in example.references) / len(example.references)
        row["nats"], row["tokens"] = float(scores.nats[i, example.right]), float(scores.top_share[i, example.right])
        row["nats_per_token"] = row["nats"] / len(example.options[example.right])
        row["exact"] = row["tokens"] == 1
        if len(example.options) > 1:
            chosen = int(scores.nats[i].argmin())
            row["chosen"] = tokenizer.decode(example.options[chosen]).strip()
            row["choice"] = chosen == example.right
        rows.append(row)
    return rows


def _score_option(
    model: LanguageModel, output: LMOutput, options: Sequence[Sequence[int]], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """−log p of one option of each example, and the fraction of its tokens that are the most likely, float64 [S]."""
    lengths = [len(ids) for ids in options]
    ids_ST = torch.zeros(
        len(options), max(lengths), dtype=torch.int64
    )  # padded on the right, where a causal model cannot look
    for row, ids in zip(ids_ST, options, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    logits_STV: Tensor = output.logits[:, -1:]
    ids_ST = ids_ST.to(logits_STV.device)
    if max(lengths) > 1:
        logits_STV = torch.cat([logits_STV, model(ids_ST[:, :-1], state=output.state).logits], dim=1)
    logits_STV = logits_STV if logits_STV.dtype == torch.float64 else logits_STV.float()
    nats_ST = -torch.log_softmax(logits_STV, dim=-1).gather(2, ids_ST[..., None])[..., 0].double()
    is_top_ST = logits_STV[..., :vocab_size].argmax(dim=-1) == ids_ST
    is_padding_ST = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    is_padding_ST = is_padding_ST.to(logits_STV.device)
    nats_S = nats_ST.masked_fill(is_padding_ST, 0).sum(dim=1)
    tops_S = (is_top_ST & ~is_padding_ST).sum(dim=1).cpu().numpy()
    return nats_S.cpu().numpy(), tops_S / np.array(lengths)


NOT_SCORES = ("protocol", "identity", "seconds", "samples_xxh3", "examples")
"""Keys of a cell's file that are no scores."""


class Cell(NamedTuple):
    """A place in a task's grid."""

    length: int
    depth: float | None

    @property
    def name(self) -> str:
        """Name of the cell's files."""
        if self.depth is None:
            return f"length_{self.length:08d}"
        depth = f"{self.depth:.2f}" if round(self.depth, 2) == self.depth else f"{self.depth!r}"
        return f"length_{self.length:08d}_depth_{depth}"


def identity_of(task: Task, settings: dict[str, Any], subject: Subject) -> dict[str, Any]:
    """Everything that the results of a task depend on. `settings` are its lengths, samples, seed and its own."""
    identity = subject.identity(None, task.text and task.text.shards) | (task.text.facts if task.text else {})
    if task.depths != (None,):
        settings = settings | {"depths": list(task.depths)}
    return identity | {"settings": settings}


def measure_tasks(
    ranks: Ranks,
    subject: Subject,
    tokenizer: Tokenizer,
    tasks: Sequence[tuple[Task, dict[str, Any]]],
    lengths: Callable[[Task, ModelFacts], list[int]],
    samples_folder: Path,
    section: str = "retrieval",
) -> None:
    """Measure the tasks that have no results for this subject, print a line for each length, and write their results.

    Args:
        tasks: each with its settings, as in `identity_of`.
        lengths: of a task's cells; it is called for all tasks before the first of them is measured.
        samples_folder: folder of generated examples.
        section: of the settings, for the warning about few samples.
    """
    chosen = [(task, identity_of(task, settings, subject)) for task, settings in tasks]
    wanted = [(task, identity) for task, identity in chosen if not ranks.reusable(subject, task.name, identity)]
    if not wanted:
        return
    model = ranks.load(subject)
    grids = [Grid(task, own, subject, lengths(task, model.config), samples_folder) for task, own in wanted]
    scorer = model_scorer(model, tokenizer.vocab_size, ranks)
    for grid in grids:
        started = time.monotonic()
        grid.measure(ranks, scorer, tokenizer)
        if ranks.rank == 0:
            results = {"pattern": model.config.pattern, "chance": grid.task.chance, "cells": grid.results()}
            subject.write_results(grid.task.name, grid.identity, started, results)
    fewest = min(grid.samples * len(grid.task.depths) for grid in grids)
    if fewest < FEW_EXAMPLES:
        print(
            f"warning: with {fewest} examples of a length, the standard error of an accuracy is up to "
            f"{0.5 / fewest**0.5:.0%}; raise {section}.samples"
        )


def lengths_of(
    lengths: Sequence[int], samples: int, task: Task, model: ModelFacts, setting: str = "retrieval.lengths"
) -> list[int]:
    """The lengths of a task's cells: those given, else what fits of a quarter, half and all of its context length.

    Args:
        setting: names the lengths in errors.

    Raises:
        ConfigError: a length exceeds the limit, or is too short for needles, question and answer.
        DataError: the haystack's text is shorter than a length.
    """
    needed, limit, context = task.needed(samples), model.position_limit, model.context_length
    quarters = [context // 4, context // 2, context]
    chosen = list(lengths) or [length for length in quarters if length > needed] or quarters[-1:]
    for length in chosen:
        if limit is not None and length > limit:
            raise ConfigError(f"{setting}: {length} exceeds the model's positions ({limit}); lower it")
        if length <= needed:
            raise ConfigError(
                f"{setting}: {length} tokens are too few for {task.name}, whose texts without a haystack take "
                f"{needed}; raise it"
            )
        if task.text:
            task.text.for_length(length)
    return chosen


class Grid:
    """The cells of one task and their files."""

    def __init__(
        self, task: Task, identity: dict[str, Any], subject: Subject, lengths: Sequence[int], samples_folder: Path
    ):
        self.task, self.identity, self.samples_folder = task, identity, samples_folder
        self.samples: int = identity["settings"]["samples"]
        self.cells = [Cell(length, depth) for length in lengths for depth in task.depths]
        self.folder = subject.results_path(task.name).parent / "cells"

    def measure(self, ranks: Ranks, scorer: Scorer, tokenizer: Tokenizer) -> None:
        """Measure the cells that have no results. All ranks call it, and the copies of the model share the cells.
        When it returns, all files exist."""
        # All ranks use what rank 0 finds: with different lists, they would wait for each other forever.
        exists = ranks.gather([self._stored(self._file(cell)) is not None for cell in self.cells])[0]
        if any(exists):
            print(f"{self.task.name}: reusing {sum(exists)} of {len(exists)} cells", flush=True)
        todo = [cell for cell, done in zip(self.cells, exists, strict=True) if not done]
        lengths = list(dict.fromkeys(cell.length for cell in self.cells))
        for cell in todo[ranks.copy :: ranks.copies]:
            started = time.monotonic()
            sets = self._examples(ranks, tokenizer, cell)
            scores, rows = score_cell(self.task, tokenizer, scorer, sets)
            result = {
                "protocol": self.task.name, "identity": self._identity(cell), **cell._asdict(), "samples": self.samples,
                "samples_xxh3": sets.xxh3, **self.task.facts(cell.length), **scores,
                "seconds": time.monotonic() - started, "examples": rows,
            }  # fmt: skip
            if ranks.is_first_of_copy:
                write_result_file(self._file(cell), result)
            if ranks.rank == 0:
                self._print_complete(lengths)
        ranks.wait_for_copies()
        if ranks.rank == 0:
            self._print_complete(lengths)

    def results(self) -> list[dict[str, Any]]:
        """The scores of all cells that exist, also of earlier calls, by length and depth."""
        stored = filter(None, map(self._stored, self.folder.glob("length_*.json")))
        scores = [{key: value for key, value in cell.items() if key not in NOT_SCORES} for cell in stored]
        return sorted(scores, key=lambda cell: (cell["length"], cell["depth"] or 0))

    def _examples(self, ranks: Ranks, tokenizer: Tokenizer, cell: Cell) -> StoredExamples:
        text = self.task.text
        identity = {
            "task": self.task.name, "tokenizer_sha256": tokenizer.sha256, **self._settings(cell),
            **(text.facts if text else {}), **({"shards": text.shards.fingerprint} if text and text.shards else {}),
        }  # fmt: skip
        return stored_examples(self.samples_folder, self.task, cell.name, identity, ranks, cell.length, cell.depth)

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _identity(self, cell: Cell) -> dict[str, Any]:
        """Everything that a cell depends on, without the settings of other cells."""
        return self.identity | {"settings": self._settings(cell)}

    def _settings(self, cell: Cell) -> dict[str, Any]:
        settings = {k: v for k, v in self.identity["settings"].items() if k not in ("lengths", "depths")}
        return settings | cell._asdict()

    def _stored(self, file: Path) -> dict[str, Any] | None:
        """A cell; None: its file is missing, damaged, edited or of another identity, and `measure` replaces it."""
        with suppress(ConfigError, OSError):
            cell = read_result_file(file)
            if cell and cell["identity"] == self._identity(Cell(cell["length"], cell["depth"])):
                return cell
        return None

    def _print_complete(self, lengths: list[int]) -> None:
        """Print the lengths whose cells all exist, and remove them from the list."""
        for length in list(lengths):
            cells = [self._stored(self._file(cell)) for cell in self.cells if cell.length == length]
            if len(complete := [cell for cell in cells if cell]) == len(cells):
                print(f"{self.task.name}: {describe(complete)}  chance {format_chance(self.task.chance)}", flush=True)
                lengths.remove(length)


def describe(cells: Sequence[dict[str, Any]]) -> str:
    """The accuracy over the cells of a length beside that of the control, and the gain where the answer is a text."""
    first = cells[0]
    key = next(key for key in ACCURACIES if key in first)
    means = over_cells(cells, (key, f"control_{key}"))
    words = [f"length {first['length']:>9,}", *(f"{name} {first[name]:,}" for name in CONTEXT_FACTS if name in first)]
    words.append(f"{ACCURACIES[key]} {with_error(means[key], means[f'{key}_standard_error'], '.1%')}")
    words.append(f"control {means[f'control_{key}']:.1%}")
    if key == "token_accuracy":
        gain = with_error(first["gain_over_control"], first["gain_over_control_standard_error"], "+.3f")
        words.append(f"gain over control {gain} nats/token")
    return "  ".join(words)


def over_cells(cells: Sequence[dict[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    """Means over the examples of cells, with the standard errors of independent examples."""
    samples = sum(cell["samples"] for cell in cells)
    means: dict[str, Any] = {"samples": samples}
    for key in keys:
        errors = [cell[f"{key}_standard_error"] for cell in cells]
        means[key] = sum(cell[key] * cell["samples"] for cell in cells) / samples
        means[f"{key}_standard_error"] = (
            None
            if None in errors
            else sum((cell["samples"] * error) ** 2 for cell, error in zip(cells, errors, strict=True)) ** 0.5 / samples
        )
    return means
