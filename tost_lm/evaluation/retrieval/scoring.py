"""How well a model answers: what it writes, and how likely it finds the answer.

Two scores of each example, with and without the needles:

    found   share of what the answer must name that stands in the greedily generated text, in any case of letters; the
            text ends with the room for the answer, or where the model ends the document
    exact   whether every token of the answer is the most likely one, given the answer before it; `nats` is −log p of
            the whole answer

Where a task compares answers, `choice` says whether the right one is the likeliest of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.generation import continuations, greedy
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.retrieval.interface import Example, Task
from tost_lm.model import LMOutput
from tost_lm.model.streaming import PIECE_TOKENS, read

TOKENS_AT_ONCE = 8 * PIECE_TOKENS
MEANS = {"choice": "choice_accuracy", "found": "found_share", "exact": "exact_accuracy", "nats": "answer_nats"}
"""What a cell calls the means of its rows."""


class Scores(NamedTuple):
    """Of S examples with as many options each."""

    nats: np.ndarray
    """−log p of each option after the prompt, float64 [S, options]."""
    exact: np.ndarray
    """Whether each of its tokens is the most likely one, bool [S, options]."""
    generated: list[list[int]]
    """Ids of the greedily generated text of each example."""


Scorer = Callable[[Sequence[Example], int], Scores]
"""(examples with prompts of one length, tokens to generate) → their scores."""


def model_scorer(model: LanguageModel, vocab_size: int) -> Scorer:
    """The scorer of a model in evaluation mode: it reads each prompt once, in pieces, and goes on from its state.

    `vocab_size`: ids that the tokenizer has; rows of a padded vocabulary beyond it are never the most likely.
    """

    @torch.no_grad()
    def score(examples: Sequence[Example], room: int) -> Scores:
        prompts_ST = torch.from_numpy(np.stack([example.prompt for example in examples]))
        output = read(model, prompts_ST.split(PIECE_TOKENS, 1))
        each = [
            _score_option(model, output, [example.options[i] for example in examples], vocab_size)
            for i in range(len(examples[0].options))
        ]
        generated = list(continuations(model, output, room, lambda logits_SV: greedy(logits_SV[:, :vocab_size])))
        return Scores(
            np.stack([nats for nats, _ in each], axis=1),
            np.stack([exact for _, exact in each], axis=1),
            torch.stack(generated, dim=1).tolist(),
        )

    return score


def score_cell(
    task: Task, tokenizer: Tokenizer, scorer: Scorer, length: int, depth: float | None, samples: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(scores, rows): means over a cell's examples and over their controls, and a row for each of either."""
    with_needles: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    together = max(1, TOKENS_AT_ONCE // min(PIECE_TOKENS, length))
    for first in range(0, samples, together):  # so that few texts are held at once
        pairs = [task.example(length, depth, sample) for sample in range(first, min(first + together, samples))]
        for rows, examples in zip((with_needles, without), zip(*pairs, strict=True), strict=True):
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
    """−log p of one option of each example [S], float64, and whether all its tokens are most likely, bool [S]."""
    lengths = [len(ids) for ids in options]
    ids_ST = torch.zeros(len(options), max(lengths), dtype=torch.int64)  # filled up where a causal model cannot look
    for row, ids in zip(ids_ST, options, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    logits_STV: Tensor = output.logits[:, -1:]
    ids_ST = ids_ST.to(logits_STV.device)
    if max(lengths) > 1:
        logits_STV = torch.cat([logits_STV, model(ids_ST[:, :-1], state=output.state).logits], dim=1)
    logits_STV = logits_STV if logits_STV.dtype == torch.float64 else logits_STV.float()
    nats_ST = -torch.log_softmax(logits_STV, dim=-1).gather(2, ids_ST[..., None])[..., 0].double()
    is_top_ST = logits_STV[..., :vocab_size].argmax(dim=-1) == ids_ST
    is_behind_ST = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    is_behind_ST = is_behind_ST.to(logits_STV.device)
    nats_S = nats_ST.masked_fill(is_behind_ST, 0).sum(dim=1)
    return nats_S.cpu().numpy(), (is_top_ST | is_behind_ST).all(dim=1).cpu().numpy()
