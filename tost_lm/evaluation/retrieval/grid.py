"""The cells of a task. Each is a file of its own, so that an interrupted evaluation resumes:

    eval/TASK/cells/length_00001024_depth_0.50.json    scores and examples; no depth if it is drawn
    eval/TASK/results.json                             scores of all cells

A cell is measured again when its checkpoint, text, seed or number of samples has changed. It does not depend on the
other cells.

A model's answers are scored by the text that it generates and by the likelihood of the right answer. Each example is
scored with the needles and, as a control, without them:

    found    fraction of the references in the greedily generated text, ignoring case; the text ends at an end of text,
             or when the room for the answer is used up
    exact    whether every token of the right answer is the most likely one, given the answer before it
    nats     −log p of the right answer
    choice   whether the right answer is the likeliest option, if the task has several options
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.evaluation.config import RetrievalConfig
from tost_lm.evaluation.generation import continuations, greedy
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.retrieval.samples import StoredExamples, stored_examples
from tost_lm.evaluation.retrieval.tasks import Example, Task
from tost_lm.evaluation.subject import Subject
from tost_lm.files import write_atomically
from tost_lm.model import LMOutput
from tost_lm.model.streaming import TILE_TOKENS, prefill

TOKENS_AT_ONCE = 8 * TILE_TOKENS
MEANS = {"choice": "choice_accuracy", "found": "found_share", "exact": "exact_accuracy", "nats": "answer_nats"}
"""Keys of a cell's means, by the key of its rows."""


class Scores(NamedTuple):
    """Scores of S examples with equally many options."""

    nats: np.ndarray
    """−log p of each option after the prompt, float64 [S, options]."""
    exact: np.ndarray
    """Whether each token of the option is the most likely one, bool [S, options]."""
    generated: list[list[int]]
    """Ids of the greedily generated text of each example."""


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
        nats, exact = zip(
            *(
                _score_option(model, output, [example.options[i] for example in examples], vocab_size)
                for i in each(range(len(examples[0].options)))
            ),
            strict=True,
        )
        generated = continuations(model, output, room, lambda logits_SV: greedy(logits_SV[:, :vocab_size]))
        return Scores(np.stack(nats, 1), np.stack(exact, 1), torch.stack(list(each(generated)), 1).tolist())

    return score


def score_cell(
    task: Task, tokenizer: Tokenizer, scorer: Scorer, pairs: Sequence[tuple[Example, Example]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(scores, rows): means over a cell's examples and over their controls, and a row for each example and control."""
    samples = len(pairs)
    with_needles: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    together = max(1, TOKENS_AT_ONCE // min(TILE_TOKENS, len(pairs[0][0].prompt)))
    for first in range(0, samples, together):  # bounds the memory of the texts
        for rows, examples in zip(
            (with_needles, without), zip(*pairs[first : first + together], strict=True), strict=True
        ):
            rows += _rows(task, tokenizer, scorer, examples)
    scores = {
        prefix + name: sum(row[key] for row in rows) / samples
        for prefix, rows in (("", with_needles), ("control_", without))
        for key, name in MEANS.items() if key in rows[0]
    }  # fmt: skip
    numbered = [
        {"sample": sample, "needle": rows is with_needles, **row}
        for rows in (with_needles, without) for sample, row in enumerate(rows)
    ]  # fmt: skip
    return scores, numbered


def _rows(task: Task, tokenizer: Tokenizer, scorer: Scorer, examples: Sequence[Example]) -> list[dict[str, Any]]:
    rows = []
    scores = scorer(examples, task.room)
    for i, example in enumerate(examples):
        ids = scores.generated[i]
        text = tokenizer.decode(ids[: ids.index(tokenizer.eot)] if tokenizer.eot in ids else ids)
        row: dict[str, Any] = {"question": example.question, "references": list(example.references), "generated": text}
        row["found"] = sum(name.lower() in text.lower() for name in example.references) / len(example.references)
        row["nats"], row["exact"] = float(scores.nats[i, example.right]), bool(scores.exact[i, example.right])
        if len(example.options) > 1:
            chosen = int(scores.nats[i].argmin())
            row["chosen"] = tokenizer.decode(example.options[chosen]).strip()
            row["choice"] = chosen == example.right
        rows.append(row)
    return rows


def _score_option(
    model: LanguageModel, output: LMOutput, options: Sequence[Sequence[int]], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """−log p of one option of each example, float64 [S], and whether all its tokens are the most likely, bool [S]."""
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
    return nats_S.cpu().numpy(), (is_top_ST | is_padding_ST).all(dim=1).cpu().numpy()


NOT_SCORES = ("protocol", "identity", "seconds", "samples_xxh3", "examples")
"""Keys of a cell's file that are no scores."""


class Cell(NamedTuple):
    """A place in a task's grid."""

    length: int
    depth: float | None

    @property
    def name(self) -> str:
        """Of the cell's files."""
        if self.depth is None:
            return f"length_{self.length:08d}"
        depth = f"{self.depth:.2f}" if round(self.depth, 2) == self.depth else f"{self.depth!r}"
        return f"length_{self.length:08d}_depth_{depth}"


def identity_of(task: Task, config: RetrievalConfig, subject: Subject) -> dict[str, Any]:
    """Everything that the results of a task depend on."""
    identity = subject.identity(None, task.text and task.text.shards) | (task.text.facts if task.text else {})
    settings = config.retrieval.model_dump(mode="json", include={"lengths", "samples", "seed"})
    if task.depths != (None,):
        settings["depths"] = list(task.depths)
    return identity | {"settings": settings}


def lengths_of(task: Task, lengths: Sequence[int], samples: int, max_positions: int, limit: int | None) -> list[int]:
    """The lengths of a task's cells: those given, else what fits of a quarter, half and all of `max_positions`.

    Args:
        limit: the model's positions; None: unlimited.

    Raises:
        ConfigError: a length exceeds the limit, or is too short for needles, question and answer.
        DataError: the haystack's text is shorter than a length.
    """
    needed = task.needed(samples)
    quarters = [max_positions // 4, max_positions // 2, max_positions]
    chosen = list(lengths) or [length for length in quarters if length > needed] or quarters[-1:]
    for length in chosen:
        if limit is not None and length > limit:
            raise ConfigError(f"retrieval.lengths: {length} exceeds the model's positions ({limit}); lower it")
        if length <= needed:
            raise ConfigError(
                f"retrieval.lengths: {length} tokens are too few for {task.name}, whose needles, question and answer "
                f"take {needed}; raise it"
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
        exists = ranks.gather([self._exists(cell) for cell in self.cells])[0]
        if any(exists):
            print(f"{self.task.name}: reusing {sum(exists)} of {len(exists)} cells", flush=True)
        todo = [cell for cell, done in zip(self.cells, exists, strict=True) if not done]
        for cell in todo[ranks.copy :: ranks.copies]:
            started = time.monotonic()
            pairs = self._examples(ranks, tokenizer, cell)
            scores, rows = score_cell(self.task, tokenizer, scorer, pairs)
            result = {
                "protocol": self.task.name, "identity": self._identity(cell), **cell._asdict(), "samples": self.samples,
                "samples_xxh3": pairs.xxh3, **scores, "seconds": time.monotonic() - started, "examples": rows,
            }  # fmt: skip
            if ranks.is_first_of_copy:
                write_atomically(self._file(cell), json.dumps(result, indent=1, ensure_ascii=False) + "\n")
            print(f"{self.task.name}: {describe(result)}", flush=True)
        ranks.wait_for_copies()

    def results(self) -> list[dict[str, Any]]:
        """The scores of all cells that exist, also of earlier calls, by length and depth."""
        kept = []
        for path in self.folder.glob("length_*.json"):
            try:
                cell = json.loads(path.read_bytes())
                if cell["identity"] == self._identity(Cell(cell["length"], cell["depth"])):
                    kept.append({k: v for k, v in cell.items() if k not in NOT_SCORES})
            except (ValueError, KeyError, TypeError):
                continue  # damaged; `measure` replaces it
        return sorted(kept, key=lambda cell: (cell["length"], cell["depth"] or 0))

    def _examples(self, ranks: Ranks, tokenizer: Tokenizer, cell: Cell) -> StoredExamples:
        text = self.task.text
        identity = {
            "task": self.task.name, "tokenizer_sha256": tokenizer.sha256, "samples": self.samples,
            "seed": self.identity["settings"]["seed"], **cell._asdict(), **(text.facts if text else {}),
            **({"shards": text.shards.fingerprint} if text and text.shards else {}),
        }  # fmt: skip
        return stored_examples(self.samples_folder, self.task, cell.name, identity, ranks, cell.length, cell.depth)

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def _identity(self, cell: Cell) -> dict[str, Any]:
        """Everything that a cell depends on, without the settings of other cells."""
        settings = {key: self.identity["settings"][key] for key in ("samples", "seed")}
        return self.identity | {"settings": settings | cell._asdict()}

    def _exists(self, cell: Cell) -> bool:
        try:
            return json.loads(self._file(cell).read_bytes())["identity"] == self._identity(cell)
        except (OSError, ValueError, KeyError, TypeError):
            return False


def describe(cell: dict[str, Any]) -> str:
    """A line for a cell, with the scores of its control in parentheses."""
    place = f"length {cell['length']:>9,}" + ("" if cell["depth"] is None else f"  depth {cell['depth']:<5g}")
    names = {"choice_accuracy": "choice", "found_share": "found", "exact_accuracy": "exact"}
    scores = [f"{name} {cell[key]:6.1%} ({cell[f'control_{key}']:.1%})" for key, name in names.items() if key in cell]
    return "  ".join([place, *scores, f"{cell['answer_nats']:.2f} ({cell['control_answer_nats']:.2f}) nats"])
