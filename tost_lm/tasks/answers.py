"""Scores of a model's answers: by the text that it generates, and by the likelihood of the right answer. Each text is
read once, and all its questions continue from there, also those of the control, whose answers are not in the text:

    found    fraction of the references in the greedily generated text, ignoring case; the text ends at an end of text,
             or when the room for the answer is used up
    exact    whether every token of the right answer is the most likely one, given the answer before it
    tokens   fraction of the tokens of the right answer that are the most likely one, given the answer before them
    nats     −log p of the right answer, also per token
    choice   whether the right answer is the likeliest option
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.inference.generation import LanguageModel, chosen_ids, greedy, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.model import LMOutput, LMState
from tost_lm.model.streaming import TILE_TOKENS, prefill
from tost_lm.tasks.queries import AskedText, Queries, Question
from tost_lm.tasks.task import Row

TOKENS_AT_ONCE = 8 * TILE_TOKENS
ANSWER_TOKENS_AT_ONCE = TILE_TOKENS // 2
"""Bounds the memory of logits, which whole answers need at each token."""


class Scores(NamedTuple):
    """Scores of the answers to S questions with equally many options."""

    generated: list[list[int]]
    """Ids of the greedily generated text of each question."""
    nats: np.ndarray
    """−log p of each option after the question, float64 [S, options]."""
    top_share: np.ndarray
    """Fraction of the option's tokens that are the most likely one, float64 [S, options]."""


Scorer = Callable[[Sequence[AskedText], int], list[Scores]]
"""(texts of one shape, tokens to generate) → the scores of each of their questions, of all texts together."""


def model_scorer(model: LanguageModel, vocab_size: int, eot: int | None = None, ranks: Ranks | None = None) -> Scorer:
    """The scorer of a model in evaluation mode. It reads each text once, in tiles, and each question from the state
    after the text. It raises CheckpointError if a logit is not finite.

    Args:
        vocab_size: as in `chosen_ids`.
        eot: id at which a generated text ends; None: each has as many tokens as it has room for.
        ranks: all of one copy of the model call the scorer; None: only this one.
    """
    each = (ranks or Ranks()).each

    @torch.no_grad()
    def score(texts: Sequence[AskedText], room: int) -> list[Scores]:
        contexts_ST = torch.from_numpy(np.stack([text.context for text in texts]))
        tokens = contexts_ST.shape[1]
        progress = lambda tiles: f"{min(tiles * TILE_TOKENS, tokens):,} of {tokens:,} tokens of each text read"
        state = prefill(model, each(contexts_ST.split(TILE_TOKENS, 1), progress)).state
        return [answer(questions, state, room) for questions in zip(*(text.asked for text in texts), strict=True)]

    def answer(questions: Sequence[Question], state: LMState | None, room: int) -> Scores:
        ids_SQ = torch.from_numpy(np.stack([question.ids for question in questions]))
        (output,) = (model(ids_SQ.to(next(model.parameters()).device), state=state) for _ in each([ids_SQ]))
        options = zip(*(question.options for question in questions), strict=True)
        scores = [_score_option(model, output, option, vocab_size) for option in each(options)]
        nats_SO, top_share_SO = np.moveaxis(np.reshape(scores, (len(scores), 2, len(questions))), 0, -1)
        require_finite(model, nats_SO)
        generated = [list[int]() for _ in questions]
        for ids in each(chosen_ids(model, output, room, greedy, vocab_size)):
            for text, i in zip(generated, ids, strict=True):
                text.append(i)
            if all(eot in text for text in generated):
                break
        return Scores(generated, nats_SO, top_share_SO)

    return score


def score_texts(queries: Queries, scorer: Scorer, length: int, samples: Iterable[int]) -> dict[int, list[Row]]:
    """The rows of the texts of a length with these numbers: one for each of their questions, those of controls last."""
    longest = min(TILE_TOKENS, length - queries.room)
    together = max(1, min(TOKENS_AT_ONCE // longest, ANSWER_TOKENS_AT_ONCE // queries.room))
    found, batch = {}, dict[int, AskedText]()
    for sample in samples:
        text = queries.asked(length, sample)
        if batch and (len(batch) == together or text.shape != next(iter(batch.values())).shape):
            found |= _rows(queries, scorer, batch)
            batch = {}
        batch[sample] = text
    return found | (_rows(queries, scorer, batch) if batch else {})


def _rows(queries: Queries, scorer: Scorer, texts: dict[int, AskedText]) -> dict[int, list[Row]]:
    of_questions = scorer([*texts.values()], queries.room)
    return {
        sample: [
            {"sample": sample, "condition": "needle" if number < len(text.questions) else "control"}
            | _row(queries.tokenizer, question, scores.generated[i], scores.nats[i], scores.top_share[i])
            for number, (question, scores) in enumerate(zip(text.asked, of_questions, strict=True))
        ]
        for i, (sample, text) in enumerate(texts.items())
    }  # fmt: skip


def _row(
    tokenizer: Tokenizer, question: Question, ids: Sequence[int], nats_O: np.ndarray, top_share_O: np.ndarray
) -> Row:
    """The row of one question, of its generated ids and O options."""
    text, references = tokenizer.decode([*takewhile(lambda i: i != tokenizer.stop, ids)]), question.references
    row: Row = {"depth": question.depth} if question.depth is not None else {}
    row |= {"question": question.shown, "references": list(references), "generated": text}
    row["found"] = sum(name.lower() in text.lower() for name in references) / len(references)
    if question.options:
        row["nats"], row["tokens"] = float(nats_O[question.right]), float(top_share_O[question.right])
        row["nats_per_token"] = row["nats"] / len(question.options[question.right])
        row["exact"] = row["tokens"] == 1
        chosen = int(nats_O.argmin())
        row["chosen"], row["choice"] = tokenizer.decode(question.options[chosen]).strip(), chosen == question.right
    return row


def _score_option(
    model: LanguageModel, output: LMOutput, option: Sequence[Sequence[int]], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """−log p of one option of each of S questions, and the fraction of its tokens that are the most likely, float64
    [S]."""
    logits_STV, lengths = output.logits[:, -1:], torch.tensor([len(ids) for ids in option])
    # Padded on the right, where a causal model cannot look.
    ids_ST = pad_sequence([torch.tensor(ids) for ids in option], batch_first=True).to(logits_STV.device)
    if ids_ST.shape[1] > 1:
        logits_STV = torch.cat([logits_STV, model(ids_ST[:, :-1], state=output.state).logits], dim=1)
    logits_STV = logits_STV if logits_STV.dtype == torch.float64 else logits_STV.float()
    nats_ST = -torch.log_softmax(logits_STV, dim=-1).gather(2, ids_ST[..., None])[..., 0].double()
    is_top_ST = logits_STV[..., :vocab_size].argmax(dim=-1) == ids_ST
    counted_ST = torch.arange(ids_ST.shape[1]) < lengths[:, None]
    nats_S, tops_S = ((x.cpu() * counted_ST).sum(1).numpy() for x in (nats_ST, is_top_ST.double()))
    return nats_S, tops_S / lengths.numpy()
