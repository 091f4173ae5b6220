"""RULER (arXiv 2404.06654): the tasks of lm-evaluation-harness, with its prompts and scores.

The harness makes the texts; they are read and scored here, in tiles, on any ranks, and with intervals. A prompt is that
of `tost lm-eval --tasks NAME --metadata '{"max_seq_lengths": [LENGTH]}'` with the same tokenizer, so the first texts of
a length do not depend on other lengths or tasks. Like there, no end of text stands before a prompt.
"""

import io
import os
import random
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import numpy as np

from tost_lm.errors import ConfigError, DataError, first_line, install_hint
from tost_lm.lifetime import end_with_parent
from tost_lm.tasks.grid import GridTask, section
from tost_lm.tasks.queries import AskedText, GridConfig, Queries, QuerySource, Question
from tost_lm.tasks.task import Family

RANDOM_SEED, NUMPY_SEED = 0, 1234
"""Of the harness."""
Prompt = tuple[str, tuple[str, ...]]
"""A prompt and its references."""


class RulerConfig(GridConfig):
    """The tasks of RULER."""

    tokenizer: str = ""
    """Tokenizer of the Hugging Face library that sizes the texts, a name or folder, as `tokenizer` of tost lm-eval."""


class RulerQueries(Queries):
    """The texts of one task: prompts of at most the length with the room for an answer. There is no control."""

    chance = 0.0

    def __init__(self, name: str, source: QuerySource, task: str, room: int):
        """Raises ConfigError if the harness or a tokenizer is missing."""
        super().__init__(name, source)
        self.task, self.room, self.needed = task, room, room
        self.prompts = cache(self._prompts)
        if not self.settings.tokenizer:
            raise ConfigError(
                "ruler.tokenizer: must be set; give the name or folder of a tokenizer of the Hugging Face library"
            )
        if not all(map(find_spec, ("lm_eval", "wonderwords"))):
            raise ConfigError(f"{name} needs packages of the harness; {install_hint('lm-eval')}")

    def asked(self, length: int, sample: int) -> AskedText:
        """Raises DataError if the harness cannot make the texts."""
        texts = self.prompts(length)
        if sample >= len(texts):
            raise DataError(f"{self.name}: the harness makes {len(texts)} texts of a length; lower ruler.samples")
        prompt, references = texts[sample]
        ids = np.array(self.tokenizer.encode(prompt), np.int64)
        return AskedText(ids[:-1], (Question(ids[-1:], prompt[-100:], references),))

    def _prompts(self, length: int) -> list[Prompt]:
        try:
            with ProcessPoolExecutor(1, get_context("spawn"), end_with_parent, (os.getpid(),)) as process:
                return process.submit(_make_prompts, self.task, self.settings.tokenizer, length).result()
        except Exception as error:  # those of the network and of several libraries
            raise DataError(f"{self.name}: the harness cannot make its texts: {first_line(error)}") from None


def _make_prompts(name: str, tokenizer: str, length: int) -> list[Prompt]:
    """The prompts of a length; in a new process, since they depend on the modules and lengths that came before."""
    from lm_eval.tasks import TaskManager
    from transformers.models.auto import tokenization_auto

    # The harness trusts the code of any folder.
    tokenization_auto.resolve_trust_remote_code = lambda *_, **__: False  # pyright: ignore[reportPrivateImportUsage]
    metadata = {"tokenizer": tokenizer, "max_seq_lengths": [length]}
    random.seed(RANDOM_SEED)
    np.random.seed(NUMPY_SEED)
    with redirect_stdout(io.StringIO()):
        task: Any = TaskManager(metadata=metadata).load(name)["tasks"][name]
    return [
        (task.fewshot_context(doc, 0, gen_prefix=task.doc_to_prefix(doc)), tuple(doc["outputs"]))
        for doc in task.test_docs()
    ]


def _task(task: str, room: int, about: str) -> GridTask:
    return GridTask(f"{task}@lm-eval", about, partial(RulerQueries, task=task, room=room))


FAMILY = Family(
    "ruler",
    [
        _task("niah_single_1", 128, "one number in repeated sentences"),
        _task("niah_single_2", 128, "one number in essays, from the network"),
        _task("niah_single_3", 128, "one UUID in essays, from the network"),
        _task("niah_multikey_1", 128, "one of four keys in essays, from the network"),
        _task("niah_multikey_2", 128, "one of many keys, in a text of keys"),
        _task("niah_multikey_3", 128, "one of many UUIDs, in a text of UUIDs"),
        _task("niah_multivalue", 128, "four values of a key in essays, from the network"),
        _task("niah_multiquery", 128, "four keys in essays, from the network"),
        _task("ruler_vt", 30, "variables that have a value"),
        _task("ruler_cwe", 120, "the most common words of a list"),
        _task("ruler_fwe", 50, "the three most frequent words"),
        _task("ruler_qa_squad", 32, "questions of SQuAD among other paragraphs, from the network"),
        _task("ruler_qa_hotpot", 32, "questions of HotpotQA among other paragraphs, from the network"),
    ],
    RulerConfig,
    section,
)
