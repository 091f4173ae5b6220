"""What `tost eval suite` checks before it runs its first program."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tost_lm.errors import ConfigError, TostError
from tost_lm.evaluation.context import tasks as context_tasks
from tost_lm.evaluation.data_sets import find_set_file
from tost_lm.evaluation.hugging_face import HuggingFaceSubject, find_subject
from tost_lm.evaluation.protocols import find_protocol
from tost_lm.evaluation.retrieval import catalog
from tost_lm.evaluation.subject import HELDOUT, Subject
from tost_lm.evaluation.suite_config import Step
from tost_lm.evaluation.text import TextFile


def check_steps(path: Path, steps: Sequence[Step]) -> Subject:
    """The subject of `path`, as in `find_subject`, if the test sets and texts of all programs exist.

    Test sets without a file are downloaded. Whether the model can read the lengths is checked by the programs.

    Raises:
        TostError: there is no subject, a protocol is unknown, or files are missing or damaged (a line for each).
    """
    subject = find_subject(path)
    problems: list[str] = []
    for check in [check for step in steps for check in _checks(step, subject)]:
        try:
            check()
        except TostError as error:
            problems += str(error).splitlines()
    if problems:
        raise TostError("\n".join(dict.fromkeys(problems)))
    return subject


def _checks(step: Step, subject: Subject) -> Iterator[Callable[[], object]]:
    """Functions that raise TostError. Raises ConfigError for an unknown protocol."""
    config = step.config
    if step.section == "zero_shot":
        protocols = [find_protocol(name) for name in config.zero_shot.protocols if name != HELDOUT]
        for data_set in dict.fromkeys(protocol.data_set for protocol in protocols):
            yield partial(find_set_file, data_set, config.sets)
        if HELDOUT in config.zero_shot.protocols:
            yield partial(subject.open_shards, config.heldout.shards)
    elif step.section in ("retrieval", "context"):
        yield partial(_make_tasks, step, subject)
    elif isinstance(subject, HuggingFaceSubject):
        yield partial(_reject_hugging_face, step, subject)
    elif step.section == "positions":
        yield partial(subject.open_shards, config.heldout.shards)
    else:
        yield partial(TextFile.check, config.text.file, "text.file")


def _make_tasks(step: Step, subject: Subject) -> None:
    config, tokenizer = step.config, subject.tokenizer()
    haystack = getattr(config, step.section).haystack
    text = partial(catalog.find_text, haystack, config.heldout.shards, subject, tokenizer, step.section)
    if step.section == "retrieval":
        catalog.make_tasks(config, tokenizer, text)
    else:
        context_tasks.make_tasks(config.context, tokenizer, text)


def _reject_hugging_face(step: Step, subject: Subject) -> None:
    raise ConfigError(
        f"{subject.checkpoint}: a Hugging Face model, which tost {step.command} does not read; leave out "
        f"[{step.section}]"
    )
