"""Multiple choice with the prompts of lm-evaluation-harness: HellaSwag (arXiv 1905.07830), ARC (arXiv 1803.05457) and
PIQA (arXiv 1911.11641).
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ValidationError

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import DataError
from tost_lm.inference.requests import Likelihoods, Request, left_truncated
from tost_lm.tasks.data_sets import DataSet, HubSource
from tost_lm.tasks.scored import Example, ScoredTask, accuracy_of, read_json_lines, section_of_test_sets
from tost_lm.tasks.task import Family, Row


class Question(NamedTuple):
    context: str
    choices: Sequence[str]
    labels: Sequence[str]
    """A label of each choice."""
    answer: str
    """The label of the right choice."""

    @property
    def right(self) -> int:
        """Index of the right choice."""
        return self.labels.index(self.answer)


class QuestionRow(BaseModel):
    """The fields of a row on the hub that a question consists of."""

    @abstractmethod
    def to_question(self) -> Question: ...

    @classmethod
    def read(cls, row: Any) -> Question:
        """The question of a line of JSON. Raises ValidationError."""
        return cls.model_validate(row).to_question()


class HellaSwagRow(QuestionRow):
    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int

    def to_question(self) -> Question:
        context = f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}"
        return Question(cleaned(context), [*map(cleaned, self.endings)], _numbers(self.endings), str(self.label))


class ArcChoices(BaseModel):
    text: list[str]
    label: list[str]


class ArcRow(QuestionRow):
    question: str
    choices: ArcChoices
    answerKey: str

    def to_question(self) -> Question:
        return Question(f"Question: {self.question}\nAnswer:", self.choices.text, self.choices.label, self.answerKey)


class PiqaRow(QuestionRow):
    goal: str
    sol1: str
    sol2: str
    label: int

    def to_question(self) -> Question:
        choices = self.sol1, self.sol2
        return Question(f"Question: {self.goal}\nAnswer:", choices, _numbers(choices), str(self.label))


class MultipleChoice(ScoredTask):
    """`hellaswag@lm-eval`, `arc_easy@lm-eval`, `arc_challenge@lm-eval` and `piqa@lm-eval`: the likeliest choice after
    the question and a space, without examples before it.

    `accuracy` compares the nats of whole choices, `normalized_accuracy` (the harness's acc_norm) nats per character.
    """

    about = "accuracy of multiple choice, also normalized by the length of the choices"

    def __init__(self, data_set: DataSet, read: Callable[[Any], Question], headline: str = "accuracy"):
        super().__init__(data_set)
        self.read, self.headline, self.expected = read, headline, data_set.description

    def examples(self, path: Path, tokenizer: Tokenizer, window: int) -> Sequence[Example]:
        found = []
        for place, question in questions(path, self.read, self.expected):
            requests = [_request(question.context, choice, tokenizer, window) for choice in question.choices]
            if not all(len(request.target) for request in requests):
                raise DataError(f"{place}: a choice without a token; remove the line")
            found.append(Example(tuple(requests), {"choices": list(question.choices), "answer": question.right}))
        return found

    def row(self, example: Example, scores: Likelihoods) -> Row:
        lengths, answer = [len(choice) for choice in example.facts["choices"]], example.facts["answer"]
        with np.errstate(divide="ignore"):  # an empty choice is the least likely one
            chosen, normalized = int(scores.nats.argmin()), int((scores.nats / lengths).argmin())
        return {
            **example.facts,
            "chosen": chosen,
            "right": chosen == answer,
            "normalized_chosen": normalized,
            "normalized_right": normalized == answer,
            "nats": scores.nats.tolist(),
        }

    def totals(self, rows: Sequence[Row]) -> Row:
        chance = float(np.mean([1 / len(row["choices"]) for row in rows]))
        return {**accuracy_of(rows), **accuracy_of(rows, "normalized_"), "chance": chance}


def questions(path: Path, read: Callable[[Any], Question], expected: str) -> Iterator[tuple[str, Question]]:
    """The place, for error messages, and the content of each question of a file. Raises DataError, which asks for
    `expected`."""
    for place, row in read_json_lines(path, expected):
        try:
            question = read(row)
        except DataError as error:
            raise DataError(f"{place}: {error}; give {expected}") from None
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            field, message = ".".join(map(str, problem["loc"])) or "the line", problem["msg"]
            raise DataError(f"{place}: {field}: {message[0].lower()}{message[1:]}; give {expected}") from None
        choices, labels = len(question.choices), question.labels
        if choices != len(labels) or choices < 2:
            raise DataError(f"{place}: {choices} choices with {len(labels)} labels; give {expected}")
        if question.answer not in labels:
            raise DataError(f"{place}: the answer {question.answer!r} is none of {', '.join(labels)}; give {expected}")
        yield place, question


def cleaned(text: str) -> str:
    """A text of HellaSwag without the brackets of its WikiHow articles, as the harness cleans it."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _numbers(choices: Sequence[str]) -> list[str]:
    return [str(number) for number in range(len(choices))]


def _request(context: str, choice: str, tokenizer: Tokenizer, window: int) -> Request:
    """White space at the end of the context belongs to the target, whose tokens follow those of the context alone."""
    before = tokenizer.encode(context.rstrip())
    target = tokenizer.encode(f"{context} {choice}")[len(before) :]
    before = before or [tokenizer.eot]
    return left_truncated(np.array([*before, *target], dtype=np.int64), len(before), window)


def _answered(read: Callable[[Any], Question], path: Path) -> list[str]:
    found = [question for _, question in questions(path, read, "the published file")]
    return [f"{question.context} {question.choices[question.right]}" for question in found]


def _arc(name: str, subset: str, lines: int) -> DataSet:
    fields = 'question, choices {"text": […], "label": […]} and answerKey'
    about = f"{subset}'s test set from the hub: {lines:,} JSON lines with {fields}"
    source = HubSource("allenai/ai2_arc", subset, "test", f"{name}_test.jsonl")
    return DataSet(name, about, source, lines=lines, texts=partial(_answered, ArcRow.read))


HELLASWAG = DataSet(
    "hellaswag",
    "HellaSwag's validation set, hellaswag_val.jsonl: 10,042 JSON lines with activity_label, ctx_a, ctx_b, endings and "
    "label",
    HubSource("Rowan/hellaswag", None, "validation", "hellaswag_val.jsonl"),
    lines=10_042,
    texts=partial(_answered, HellaSwagRow.read),
)
ARC_EASY = _arc("arc_easy", "ARC-Easy", 2376)
ARC_CHALLENGE = _arc("arc_challenge", "ARC-Challenge", 1172)
PIQA = DataSet(
    "piqa",
    "PIQA's validation set from the hub: 1,838 JSON lines with goal, sol1, sol2 and label",
    HubSource("baber/piqa", None, "validation", "piqa_validation.jsonl"),
    lines=1_838,
    texts=partial(_answered, PiqaRow.read),
)

FAMILY = Family(
    "multiple_choice",
    [
        MultipleChoice(HELLASWAG, HellaSwagRow.read, "normalized_accuracy"),
        MultipleChoice(ARC_EASY, ArcRow.read),
        MultipleChoice(ARC_CHALLENGE, ArcRow.read, "normalized_accuracy"),
        MultipleChoice(PIQA, PiqaRow.read),
    ],
    section=section_of_test_sets,
)
