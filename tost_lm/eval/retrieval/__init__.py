"""Retrieval from long texts: a needle in a haystack by length and depth, and tasks with RULER's structure by length.

Here are the tasks by name, and the text of their haystacks.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.eval.retrieval.haystacks import Text
from tost_lm.eval.retrieval.needles import NeedleTask, NiahTask, Questions, VariableTracking
from tost_lm.eval.retrieval.tasks import Task
from tost_lm.eval.retrieval.word_lists import CommonWords, FrequentWords
from tost_lm.eval.settings import RetrievalConfig
from tost_lm.inference.protocol_names import NEEDLE, QUESTIONS, VARIABLE_TRACKING, WORD_LISTS
from tost_lm.inference.subject import Subject


def make_tasks(config: RetrievalConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> list[Task]:
    """The tasks of `retrieval.tasks`; `text` is called only if one of them has a haystack of text."""
    text = cache(text)
    return [_make(name, config, tokenizer, text) for name in config.retrieval.tasks]


def find_text(file: Path | None, shards: str, subject: Subject, section: str = "retrieval") -> Text:
    """The text in `file`, else the held-out documents, else Python's documentation. The tokenizer may lose text of it.

    Args:
        shards: as in `Subject.open_shards`.
        section: of the settings, for errors.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or as in `Subject.open_shards`.
        ConfigError: as in `Subject.open_shards`.
    """
    tokenizer = subject.tokenizer()
    if file is not None:
        return Text.of_file(file, tokenizer, section)
    if shards or (subject.home / "config.toml").is_file():
        return Text.of_shards(subject.open_shards(shards), tokenizer, section)
    return Text.embedded(tokenizer, section)


def _make(name: str, config: RetrievalConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> Task:
    seed = config.retrieval.seed
    if name == NEEDLE:
        return NeedleTask(seed, tokenizer, text(), config.needle.depths)
    if name == VARIABLE_TRACKING:
        return VariableTracking(name, seed, tokenizer)
    if name in WORD_LISTS:
        return (CommonWords if name == WORD_LISTS[0] else FrequentWords)(name, seed, tokenizer)
    if name in QUESTIONS:
        return Questions(name, seed, tokenizer)
    return NiahTask(name, seed, tokenizer, text)
