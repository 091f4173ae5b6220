"""Scores of a model's answers: by the text that it generates, and by the likelihood of the right answer. Each query is
scored with the needles in the text and, as a control, without them:

    found    fraction of the references in the greedily generated text, ignoring case; the text ends at an end of text,
             or when the room for the answer is used up
    exact    whether every token of the right answer is the most likely one, given the answer before it
    tokens   fraction of the tokens of the right answer that are the most likely one, given the answer before them
    nats     −log p of the right answer, also per token
    choice   whether the right answer is the likeliest option, if the task has several options
"""

from collections.abc import Callable, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tost_lm.inference.generation import LanguageModel, chosen_ids, greedy, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.model import LMOutput
from tost_lm.model.streaming import TILE_TOKENS, prefill
from tost_lm.tasks.queries import Queries, Query

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


Scorer = Callable[[Sequence[Query], int], Scores]
"""(examples with prompts of equal length, tokens to generate) → their scores."""


def model_scorer(model: LanguageModel, vocab_size: int, ranks: Ranks | None = None) -> Scorer:
    """The scorer of a model in evaluation mode. It reads each prompt once, in tiles, and continues from the state. It
    raises CheckpointError if a logit is not finite.

    Args:
        vocab_size: as in `chosen_ids`.
        ranks: all of one copy of the model call the scorer; None: only this one.
    """
    each = (ranks or Ranks()).each

    @torch.no_grad()
    def score(examples: Sequence[Query], room: int) -> Scores:
        prompts_ST = torch.from_numpy(np.stack([example.prompt for example in examples]))
        tokens = prompts_ST.shape[1]
        progress = lambda tiles: f"{min(tiles * TILE_TOKENS, tokens):,} of {tokens:,} tokens of each prompt read"
        output = prefill(model, each(prompts_ST.split(TILE_TOKENS, 1), progress))
        nats, top_share = zip(
            *(
                _score_option(model, output, [example.options[i] for example in examples], vocab_size)
                for i in each(range(len(examples[0].options)))
            ),
            strict=True,
        )
        require_finite(model, np.stack(nats))
        steps = list(each(chosen_ids(model, output, room, greedy, vocab_size)))
        return Scores(np.stack(nats, 1), np.stack(top_share, 1), [*map(list, zip(*steps, strict=True))])

    return score


def score_cell(
    task: Queries, scorer: Scorer, length: int, depth: float | None, samples: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(scores, rows): means over a cell's examples with and without the needles, and a row for each of both.

    Each mean has a standard error over the examples; None if there is only one. The gain over the control is the nats
    per token by which the needles lower the answer, with the standard error of paired differences.
    """
    rows: dict[str, list[dict[str, Any]]] = {"needle": [], "control": []}
    longest = min(TILE_TOKENS, length - task.room)
    together = max(1, min(TOKENS_AT_ONCE // longest, ANSWER_TOKENS_AT_ONCE // task.room))
    for first in range(0, samples, together):  # bounds the memory of the texts
        sets = [task.query(length, depth, sample) for sample in range(first, min(first + together, samples))]
        for own, examples in zip(rows.values(), zip(*sets, strict=True), strict=True):
            own += _rows(task, scorer, examples)
    scores: dict[str, Any] = {}
    for prefix, own in zip(("", "control_"), rows.values(), strict=True):
        for key, name in MEANS.items():
            if key in own[0]:
                scores |= _mean(prefix + name, [row[key] for row in own])
    with_needles, without = ([row["nats_per_token"] for row in own] for own in rows.values())
    scores |= _mean("gain_over_control", [a - b for a, b in zip(without, with_needles, strict=True)])
    numbered = [
        {"sample": sample, "condition": condition, **row}
        for condition, own in rows.items() for sample, row in enumerate(own)
    ]  # fmt: skip
    return scores, numbered


def _mean(name: str, values: Sequence[float]) -> dict[str, float | None]:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {name: mean(values), f"{name}_standard_error": error}


def _rows(task: Queries, scorer: Scorer, examples: Sequence[Query]) -> list[dict[str, Any]]:
    rows, tokenizer = [], task.tokenizer
    scores = scorer(examples, task.room)
    for i, example in enumerate(examples):
        ids, references = scores.generated[i], example.references
        text = tokenizer.decode(ids[: ids.index(tokenizer.eot)] if tokenizer.eot in ids else ids)
        row: dict[str, Any] = {"question": example.question, "references": list(references), "generated": text}
        row["found"] = sum(name.lower() in text.lower() for name in references) / len(references)
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
