"""Queries with a small text as haystack."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from evaluations import make_queries

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.queries import KeyedQueries

LINES = [f"Page {page}. The lines of this page are short.\nThey say little! Do they?\nNo.\n\n" for page in range(300)]


@pytest.fixture
def make_task(tokenizer: Tokenizer) -> Callable[..., KeyedQueries]:
    """Makes the queries of a task by its name; the default tokenizer is that of the small text."""
    own = tokenizer

    def make(
        name: str = "needle@keys",
        seed: int = 0,
        depths: Sequence[float] = (0.0, 0.5, 1.0),
        tokenizer: Tokenizer = own,
        **settings: Any,
    ) -> KeyedQueries:
        text = Text("the text", map(tokenizer.encode_array, LINES), {})
        queries = make_queries(name, tokenizer, lambda: text, seed=seed, depths=list(depths), **settings)
        assert isinstance(queries, KeyedQueries)
        return queries

    return make
