"""Tasks with a small text as haystack."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.eval.retrieval import make_tasks
from tost_lm.eval.retrieval.haystacks import Text
from tost_lm.eval.retrieval.tasks import Task
from tost_lm.eval.settings import RetrievalConfig
from tost_lm.inference.protocol_names import NEEDLE

LINES = [f"Page {page}. The lines of this page are short.\nThey say little! Do they?\nNo.\n\n" for page in range(300)]


@pytest.fixture
def make_task(tokenizer: Tokenizer) -> Callable[..., Task]:
    """Makes a task by its name; the default tokenizer is that of the small text."""
    own = tokenizer

    def make(
        name: str = NEEDLE, seed: int = 0, depths: Sequence[float] = (0.0, 0.5, 1.0), tokenizer: Tokenizer = own
    ) -> Task:
        tree: dict[str, Any] = {"retrieval": {"tasks": [name], "seed": seed}, "needle": {"depths": depths}}
        text = Text("the text", map(tokenizer.encode_array, LINES), {})
        (task,) = make_tasks(validate(RetrievalConfig, tree, "test"), tokenizer, lambda: text)
        return task

    return make
