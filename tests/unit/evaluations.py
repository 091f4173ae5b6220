"""Evaluations by the code of `tost eval`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tost_lm.config import validate
from tost_lm.data.tokenizers import Tokenizer
from tost_lm.eval.commands.evaluate import main
from tost_lm.tasks.grid import GridTask
from tost_lm.tasks.haystacks import Text
from tost_lm.tasks.queries import Queries, QuerySource
from tost_lm.tasks.registry import find_task
from tost_lm.tasks.scored import ScoredTask
from tost_lm.tasks.settings import EvalConfig

RETRIEVAL = ["needle@keys", "association@landmarks", "records@numbers"]

WIKI = " \n = One = \n \n It was 2 @.@ 5 , he said . \n The end of it , and of all . \n = Two = \n \n More words . \n"
LAMBADA = ["He saw it, and so it was", "They went on and on until the very end of the road, and back"]
PTB = " no it was n't <unk> \n the N dogs ' tails \n"
FILES = {"wikitext2": WIKI, "lambada_openai": "".join(json.dumps({"text": text}) + "\n" for text in LAMBADA)}
FILES |= {"ptb": PTB}
"""Texts of test sets by name."""


def evaluate(path: Path, *tasks: str, **sections: Any) -> None:
    """Measure a run or model by tasks; `sections` are the settings."""
    main(path, validate(EvalConfig, {"tasks": tasks, **sections}, "test"))


def make_queries(name: str, tokenizer: Tokenizer, find_text: Callable[[], Text], **settings: Any) -> Queries:
    """The queries of a task with cells; `settings` are those of its family."""
    family, task = find_task(name)
    assert isinstance(task, GridTask)
    assert family.settings
    own = validate(family.settings, settings, family.name)
    return task.make(name, QuerySource(family.name, own, tokenizer, find_text))


def scored(name: str) -> ScoredTask:
    """A task on a test set."""
    _, task = find_task(name)
    assert isinstance(task, ScoredTask)
    return task
