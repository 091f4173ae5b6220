"""The texts of the examples of test sets in their published formats."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tost_lm.eval.protocols import missing_word, multiple_choice
from tost_lm.eval.protocols.missing_word import passages
from tost_lm.eval.protocols.perplexity import pages, ptb_lines


def _filled_questions(path: Path) -> list[str]:
    return [question.filled(question.answer) for question in missing_word.questions(path)]


def _answered_questions(data_set: str, path: Path) -> list[str]:
    found = [question for _, question in multiple_choice.questions(path, data_set)]
    return [f"{question.context} {question.choices[question.right]}" for question in found]


READERS: dict[str, Callable[[Path], Iterable[str]]] = {
    "wikitext2": pages,
    "wikitext103": pages,
    "lambada_openai": passages,
    "lambada_standard": passages,
    "ptb": ptb_lines,
    "cbt_cn": _filled_questions,
    "cbt_ne": _filled_questions,
    **{name: partial(_answered_questions, name) for name in multiple_choice.ROWS},
}
"""Reads the file of a test set. Raises DataError for another format."""
