"""The measures of the released code of arXiv 2412.17810, by its own rules, for comparison with its table only.

The released code computes in bfloat16 with autocast; here the model computes in its own data type.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Request
from tost_lm.tasks.data_sets import DataSet
from tost_lm.tasks.missing_word import CBT_CN, CBT_NE, LAMBADA_OPENAI, LAMBADA_STANDARD, Cloze, MissingWord, passages
from tost_lm.tasks.perplexity import (
    OWT,
    PTB,
    WIKITEXT2,
    WIKITEXT103,
    RunningText,
    openwebtext_ids,
    ptb_lines,
    wikitext_rows,
)
from tost_lm.tasks.scored import Example, ScoredTask, accuracy_of, section_of_test_sets
from tost_lm.tasks.task import Family, Row

BATCHES, BATCH_SIZE, SEED = 1000, 16, 1337


def joined(rows_of: Callable[[Path], Sequence[str]]) -> Callable[[Path, Tokenizer], np.ndarray]:
    """A function that reads the ids of a file, int64: those of each row of `rows_of`, each with an end of text."""

    def read(path: Path, tokenizer: Tokenizer) -> np.ndarray:
        return np.array([id for row in rows_of(path) for id in [*tokenizer.encode(row), tokenizer.eot]], np.int64)

    return read


class RandomWindows(RunningText):
    """`owt@tost`, `wikitext2@tost`, `wikitext103@tost`, `lambada_standard@tost`, `ptb@tost`: mean nats of all tokens in
    1,000 batches of 16 windows, drawn uniformly with replacement from all rows.

    An end of text follows each row, also blank ones, and counts as a token; so there are no words and bytes. The
    released code draws with torch after it has drawn the weights. Its windows cannot be repeated, and ours have a seed
    of their own: results agree within the standard error. Not comparable with perplexities of other tasks;
    `lambada_standard@tost` is the loss of whole passages, not of last words.
    """

    about = "nats per token of random windows, as the authors' released code"
    rules, headline, by_token = "tost", "nats_per_token", True

    def __init__(self, data_set: DataSet, read: Callable[[Path, Tokenizer], np.ndarray]):
        """`read` returns the ids of a file."""
        super().__init__(data_set)
        self.read = read

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        ids = self.read(path, tokenizer)
        if len(ids) <= window:
            raise DataError(f"{path}: {len(ids):,} tokens are too few for windows of {window:,}; give the whole file")
        starts = np.random.default_rng(SEED).integers(0, len(ids) - window, BATCHES * BATCH_SIZE)
        return [
            Example((Request(ids[start : start + 1], ids[start + 1 : start + 1 + window]),), {"start": start})
            for start in starts.tolist()
        ]


class GeneratedLastWord(ScoredTask):
    """`lambada_openai@tost`: whether the last word is a substring of 10 greedily generated tokens, ignoring case.

    As in the released code, typographic double quotes become straight ones, a line end precedes the stripped passage,
    and no end of text does. The context is everything before the last space. The last word may be part of another
    word, or come after other words, so this is not comparable with the accuracy of any other LAMBADA task. We
    assume that the released code's data, the `en` subset on the hub, is OpenAI's variant. An end of text does not stop
    the generation; it reads as nothing here, but as `<|endoftext|>` there. A context that does not fit the window loses
    its beginning.
    """

    about = "the last word in 10 generated tokens, as the authors' released code"
    rules, headline, by_token, new_tokens = "tost", "accuracy", True, 10

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        room = max(1, window - self.new_tokens + 1)  # the last new token is not read
        examples = []
        for text in passages(path):
            context, word = ("\n" + text.replace("“", '"').replace("”", '"').strip()).rsplit(" ", 1)
            ids = np.array(tokenizer.encode(context), dtype=np.int64)[-room:]
            examples.append(Example((Request(ids, ids[:0]),), {"word": word}))
        return examples

    def row(self, example: Example, scores: str) -> Row:
        right = example.facts["word"].lower() in scores.lower()
        return {**example.facts, "generated": scores, "right": right}

    def totals(self, rows: Sequence[Row]) -> Row:
        return accuracy_of(rows)


class WholePassage(MissingWord):
    """`cbt_cn@tost` and `cbt_ne@tost`: the candidate with which the whole passage has the lowest total nats.

    As in the released code, the passage is not detokenized, an end of text precedes it, and its last end of text is not
    scored. Since tokens before the blank are scored too, this is not comparable with `cbt_cn@gpt2`, `cbt_ne@gpt2` or
    figures of the GPT-2 paper. The released code cannot read a passage longer than its positions; here it loses its
    beginning, at the same token for all candidates of a question. Words are joined with single spaces.
    """

    about = "the candidate with the likeliest passage, as the authors' released code"
    rules, by_token = "tost", True

    def requests(self, cloze: Cloze, tokenizer: Tokenizer, window: int) -> list[Request]:
        passages = [np.array(tokenizer.encode(cloze.filled(word)), dtype=np.int64) for word in cloze.candidates]
        start, eot = max(0, max(map(len, passages)) - window), np.array([tokenizer.eot])
        return [Request(eot, ids[start:]) for ids in passages]


FAMILY = Family(
    "tost_release",
    [
        RandomWindows(OWT, openwebtext_ids),
        RandomWindows(WIKITEXT2, joined(wikitext_rows)),
        RandomWindows(WIKITEXT103, joined(wikitext_rows)),
        RandomWindows(LAMBADA_STANDARD, joined(passages)),
        RandomWindows(PTB, joined(ptb_lines)),
        GeneratedLastWord(LAMBADA_OPENAI),
        WholePassage(CBT_CN),
        WholePassage(CBT_NE),
    ],
    section=section_of_test_sets,
)
