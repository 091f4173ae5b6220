"""The tasks by name, and the lengths of their cells."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.evaluation.context.copying import Copying
from tost_lm.evaluation.context.counted import CountedTask
from tost_lm.evaluation.context.gain import ContextGain
from tost_lm.evaluation.context.many_shot import ManyShot
from tost_lm.evaluation.context.passages import Passages
from tost_lm.evaluation.context_config import CONTEXT_GAIN, COPYING, PASSAGES, ContextTasksConfig
from tost_lm.evaluation.language_model import ModelFacts
from tost_lm.evaluation.retrieval.grid import lengths_of
from tost_lm.evaluation.retrieval.haystacks import Text
from tost_lm.evaluation.retrieval.tasks import Task


def make_tasks(settings: ContextTasksConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> list[Task]:
    """The tasks of `context.tasks`; `text` is called only if one of them reads text."""
    text = cache(text)
    return [_make(name, settings, tokenizer, text) for name in settings.tasks]


def settings_of(task: Task, settings: ContextTasksConfig) -> dict[str, Any]:
    """The settings that the results of a task depend on, for its identity. Those of the cells are called `lengths`."""
    counts = getattr(settings, task.counted) if isinstance(task, CountedTask) else settings.lengths
    own = {} if isinstance(task, CountedTask) else {"target_tokens": settings.target_tokens}
    return {"lengths": counts, "samples": settings.samples, "seed": settings.seed, **own}


def cell_lengths(settings: ContextTasksConfig, task: Task, model: ModelFacts) -> list[int]:
    """The lengths of a task's cells. By default, context_gain leaves out lengths without documents.

    Raises:
        ConfigError, DataError: as in `lengths_of`, and if the text has no two documents of a length.
    """
    if isinstance(task, CountedTask):
        return task.lengths_of(getattr(settings, task.counted), model)
    lengths = lengths_of(settings.lengths, settings.samples, task, model, "context.lengths")
    for i, length in enumerate(sorted(lengths) if isinstance(task, ContextGain) else []):
        assert task.text is not None
        try:
            task.text.documents(length)
        except DataError:
            if settings.lengths or i == 0:
                raise
            return sorted(lengths)[:i]
    return lengths


def _make(name: str, settings: ContextTasksConfig, tokenizer: Tokenizer, text: Callable[[], Text]) -> Task:
    seed = settings.seed
    if name == COPYING:
        return Copying(seed, tokenizer, text(), settings.target_tokens)
    if name == CONTEXT_GAIN:
        return ContextGain(seed, tokenizer, text(), settings.target_tokens)
    return Passages(seed, tokenizer) if name == PASSAGES else ManyShot(name, seed, tokenizer)
