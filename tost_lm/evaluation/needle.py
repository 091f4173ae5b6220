"""Needle in a haystack, protocol `needle@words` (after Kamradt 2023, small enough for a small model).

    [EOT] haystack … The secret word of NAME is WORD. … haystack ⏎ The secret word of NAME is → WORD

The haystack is held-out text in a fixed order, cut so that the prompt and room for the longest word are together
exactly the cell's length in tokens. The needle stands at the cell's depth, moved back to the end of a line or
sentence. WORD is one of ten. Two scores: `choice`, the right word is the most likely of the ten (total
log-probability of its tokens; chance 10 %), and `exact`, greedily generated text begins with it. The control
asks the same question of a haystack of the same length without the needle.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError, DataError
from tost_lm.evaluation.config import NeedleConfig
from tost_lm.evaluation.generation import continuations, greedy
from tost_lm.model import LMState
from tost_lm.model.streaming import PIECE_TOKENS, read
from tost_lm.parallel.whole import LanguageModel

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
WORDS = ("apple", "river", "table", "green", "music", "stone", "horse", "paper", "night", "glass")
CHANCE = 1 / len(WORDS)
ENDINGS = ("\n", ". ", "! ", "? ")

Scorer = Callable[[list[list[int]], list[list[int]]], tuple[np.ndarray, list[list[int]]]]
"""(prompts of one length, candidates) → (log-probability of each candidate after each prompt, float [prompts,
candidates]; greedily generated ids after each prompt, as many as the longest candidate has)."""


@dataclass(frozen=True)
class Example:
    """A prompt of token ids; `word` is the index of the right candidate, `needle` says whether it can be known."""

    prompt: list[int]
    word: int
    needle: bool


class NeedleTask:
    """Builds the examples of a cell: a pure function of the settings, the tokenizer and the held-out documents.

    `max_positions` are the model's, `limit` the longest sequence that it reads (None: any).

    Raises:
        ConfigError: a length passes `limit`, or is too short for needle and question.
        DataError: the held-out text is shorter than the longest cell.
    """

    def __init__(
        self,
        config: NeedleConfig,
        tokenizer: Tokenizer,
        documents: Iterator[np.ndarray],
        max_positions: int,
        limit: int | None,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.candidates = [tokenizer.encode(f" {word}") for word in WORDS]
        self.longest_candidate = max(map(len, self.candidates))
        needed = max(self._frame_tokens(name, word) for name in NAMES for word in range(len(WORDS)))
        quarters = [max_positions // 4, max_positions // 2, max_positions]
        self.lengths = config.lengths or [length for length in quarters if length > needed] or quarters[-1:]
        for length in self.lengths:
            if limit is not None and length > limit:
                raise ConfigError(f"needle.lengths: {length} passes the model's positions ({limit})")
            if length <= needed:
                raise ConfigError(
                    f"needle.lengths: {length} tokens are too few, needle and question alone take {needed}"
                )
        self.hay = _haystack(documents, tokenizer.encode("\n\n"), 64 * max(self.lengths))
        if len(self.hay) < max(self.lengths):
            raise DataError(
                f"the held-out text has {len(self.hay)} tokens, too few for needle.lengths {max(self.lengths)}"
            )

    def examples(self, length: int, depth: float) -> Iterator[tuple[Example, Example]]:
        """The samples of a cell, each with its control. Their prompts all have the same number of tokens."""
        for sample in range(self.config.samples):
            draws = np.random.default_rng((self.config.seed, length, round(depth * 1e6), sample))
            name, word = NAMES[draws.integers(len(NAMES))], int(draws.integers(len(WORDS)))
            needle, question = self._needle(name, word), self._question(name)
            room = length - self.longest_candidate - 1 - len(question)
            start = int(draws.integers(len(self.hay) - room + 1))
            hay = self.hay[start : start + room]
            cut = self._place(hay[: room - len(needle)], depth)
            with_needle = hay[:cut] + needle + hay[cut : room - len(needle)]
            eot = self.tokenizer.eot
            yield Example([eot, *with_needle, *question], word, True), Example([eot, *hay, *question], word, False)

    def _place(self, hay: list[int], depth: float) -> int:
        """The last end of a line or sentence at or before the depth; 0 if there is none."""
        for cut in range(round(depth * len(hay)), 0, -1):
            # Three tokens hold any ending, unless one of them is a lone byte of it.
            if self.tokenizer.decode(hay[max(0, cut - 3) : cut]).endswith(ENDINGS):
                return cut
        return 0

    def _needle(self, name: str, word: int) -> list[int]:
        # In parts, so that the word's tokens are those of the candidate.
        encode = self.tokenizer.encode
        return [*encode(f"The secret word of {name} is"), *self.candidates[word], *encode(".\n")]

    def _question(self, name: str) -> list[int]:
        return [*self.tokenizer.encode("\n"), *self.tokenizer.encode(f"The secret word of {name} is")]

    def _frame_tokens(self, name: str, word: int) -> int:
        return 1 + len(self._needle(name, word)) + len(self._question(name)) + self.longest_candidate


def run_grid(task: NeedleTask, scorer: Scorer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(cells, rows): the scores of each length × depth with and without the needle; a row for every example."""
    cells, rows = [], []
    for length in task.lengths:
        for depth in task.config.depths:
            cell: dict[str, Any] = {"length": length, "depth": depth, "samples": task.config.samples}
            for examples, prefix in zip(zip(*task.examples(length, depth), strict=True), ("", "control_"), strict=True):
                scored = [{"length": length, "depth": depth, **row} for row in _score(task, scorer, examples)]
                cell[f"{prefix}choice_accuracy"] = sum(row["choice"] for row in scored) / len(scored)
                cell[f"{prefix}exact_accuracy"] = sum(row["exact"] for row in scored) / len(scored)
                rows += scored
            cells.append(cell)
    return cells, rows


def model_scorer(model: LanguageModel, vocab_size: int) -> Scorer:
    """The scorer of a model in evaluation mode: it reads each prompt once and goes on from its state."""

    @torch.inference_mode()
    def score(prompts: list[list[int]], candidates: list[list[int]]) -> tuple[np.ndarray, list[list[int]]]:
        output = read(model, torch.tensor(prompts).split(PIECE_TOKENS, 1))
        assert output.state is not None
        log_probs = [_log_probs(model, output.logits[:, -1], output.state, ids) for ids in candidates]
        longest = max(map(len, candidates))
        generated = list(continuations(model, output, longest, lambda logits_BV: greedy(logits_BV[:, :vocab_size])))
        return torch.stack(log_probs, dim=1).cpu().numpy(), torch.stack(generated, dim=1).tolist()

    return score


def _log_probs(model: LanguageModel, logits_BV: Tensor, state: LMState, ids: list[int]) -> Tensor:
    """Total log-probability of `ids` after each sequence of a batch [B], float64."""
    steps = logits_BV[:, None]
    if len(ids) > 1:
        before_BT = torch.tensor([ids[:-1]], device=logits_BV.device).expand(len(logits_BV), -1)
        steps = torch.cat([steps, model(before_BT, state=state).logits], dim=1)
    steps = steps if steps.dtype == torch.float64 else steps.float()
    places = torch.arange(len(ids), device=logits_BV.device)
    return torch.log_softmax(steps, dim=-1)[:, places, ids].double().sum(dim=1)


def _score(task: NeedleTask, scorer: Scorer, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    log_probs, generated = scorer([example.prompt for example in examples], task.candidates)
    for example, row, ids in zip(examples, log_probs, generated, strict=True):
        text = task.tokenizer.decode(ids)
        yield {
            "needle": example.needle,
            "word": WORDS[example.word],
            "chosen": WORDS[int(row.argmax())],
            "generated": text,
            "choice": int(row.argmax()) == example.word,
            "exact": text.startswith(f" {WORDS[example.word]}"),
        }


def _haystack(documents: Iterator[np.ndarray], between: list[int], enough: int) -> list[int]:
    hay: list[int] = []
    for tokens in documents:
        hay += [*tokens.tolist(), *between]
        if len(hay) >= enough:
            break
    return hay
