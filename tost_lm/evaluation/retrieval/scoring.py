"""Scores of a model's answers: the text that it generates, and the likelihood of the right answer.

Each example is scored with the needles and, as a control, without them:

    found    fraction of the references in the greedily generated text, ignoring case; the text ends at an end of text,
             or when the room for the answer is used up
    exact    whether every token of the right answer is the most likely one, given the answer before it
    nats     −log p of the right answer
    choice   whether the right answer is the likeliest option, if the task has several options
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.generation import continuations, greedy
from tost_lm.evaluation.language_model import LanguageModel
from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.retrieval.interface import Example, Task
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
    task: Task, tokenizer: Tokenizer, scorer: Scorer, length: int, depth: float | None, samples: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(scores, rows): means over a cell's examples and over their controls, and a row for each example and control."""
    with_needles: list[dict[str, Any]] = []
    without: list[dict[str, Any]] = []
    together = max(1, TOKENS_AT_ONCE // min(TILE_TOKENS, length))
    for first in range(0, samples, together):  # bounds the memory of the texts
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
