"""The tasks by name, and the text of their haystacks."""

from collections.abc import Callable
from functools import cache

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.evaluation.config import NEEDLE, QUESTIONS, VARIABLE_TRACKING, WORD_LISTS, RetrievalConfig
from tost_lm.evaluation.retrieval.haystacks import Text
from tost_lm.evaluation.retrieval.needles import NeedleTask, NiahTask, Questions, VariableTracking
from tost_lm.evaluation.retrieval.tasks import Task
from tost_lm.evaluation.retrieval.word_lists import CommonWords, FrequentWords
from tost_lm.evaluation.subject import Subject


def make_tasks(config: RetrievalConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> list[Task]:
    """The tasks of `retrieval.tasks`; `text` is called only if one of them has a haystack of text."""
    text = cache(text)
    return [_make(name, config, tokenizer, text) for name in config.retrieval.tasks]


def find_text(config: RetrievalConfig, subject: Subject, tokenizer: Tokenizer) -> Text:
    """The text that the settings name, else the held-out documents, else Python's documentation.

    Raises:
        DataError: the file is missing, empty or not UTF-8, or as in `Subject.open_shards`.
        ConfigError: as in `Subject.open_shards`.
    """
    if config.retrieval.haystack is not None:
        return Text.of_file(config.retrieval.haystack, tokenizer)
    if config.heldout.shards or (subject.home / "config.toml").is_file():
        return Text.of_shards(subject.open_shards(config.heldout.shards), tokenizer)
    return Text.embedded(tokenizer)


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
