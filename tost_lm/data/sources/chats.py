"""Rows with prompts and answers: messages, by the chat template of a tokenizer, or a prompt and its completion."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tost_lm.errors import DataError, first_line, install_hint, printable

MESSAGES, TOOLS, PAIR = "messages", "tools", ("prompt", "completion")
"""Fields of a row."""
SHOWN = 40  # characters of a text
CHAT_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
"""What a template and its variables are read from."""
NO_DATE = "{%- set strftime_now = date_of_today %}"  # not defined: a corpus has equal tokens on every day


class UnusableError(Exception):
    """Carries the reason why a row cannot be used."""


class Part(NamedTuple):
    """Text of a document that is tokenized on its own."""

    text: str
    counts: bool
    """Whether its tokens count in the loss."""


Parts = tuple[Part, ...]


def completed(row: Mapping[str, Any]) -> Parts:
    """The prompt of a row and its completion."""
    for field in PAIR:
        if not isinstance(row[field], str):
            raise UnusableError(f"field {field!r} is not a string; join messages in a field {MESSAGES!r}")
    prompt, completion = (row[field] for field in PAIR)
    if not completion:
        raise UnusableError(f"field {PAIR[1]!r} is empty, so nothing counts; remove the row")
    return Part(prompt, False), Part(completion, True)


class Chats:
    """Renders messages by the chat template in the folder of a tokenizer, and tokenizes the result. Picklable."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` of the Hugging Face library; None: there is no template."""
        self._folder = folder

    def parts(self, messages: Any, tools: Any = None) -> Parts:
        """The document that a conversation becomes, up to its last answer.

        An answer counts where the whole conversation has it as it was when it was last.

        Raises:
            UnusableError: what is no conversation, has no answer or a template that does not divide it.
        """
        if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
            raise UnusableError("messages are not an array of objects with 'role' and 'content'; convert them")
        messages = [{name: value for name, value in one.items() if value is not None} for one in messages]
        answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        if not answers:
            raise UnusableError("no message has the role 'assistant', so nothing counts; remove the row")
        whole = self._render(messages[: answers[-1] + 1], tools)
        parts: list[Part] = []
        end = 0
        for at in answers:
            prompt, answered = self._render(messages[:at], tools, prompts=True), self._render(messages[: at + 1], tools)
            if not answered.startswith(prompt) or answered == prompt:
                raise UnusableError(
                    f"message {at + 1} cannot be split into prompt and answer: the chat template ends the prompt with "
                    f"{prompt[-SHOWN:]!r} but the conversation continues with {_after(prompt, answered)!r}; correct "
                    f"the template in {self._folder}"
                )
            start = max(len(prompt), end)
            if whole.startswith(answered):
                parts += [Part(whole[end:start], False), Part(whole[start : len(answered)], True)]
                end = len(answered)
        return tuple(parts)

    def encode(self, text: str) -> "np.ndarray":
        """The ids of a part of a conversation, uint32 [tokens]: names of special tokens are these tokens."""
        return np.array(self._pipeline.encode(text, add_special_tokens=False).ids, np.uint32)

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, *, prompts: bool = False) -> str:
        """The text of messages; a text that `prompts` ends where an answer begins."""
        tokenizer = self._tokenizer
        try:
            template = NO_DATE + tokenizer.get_chat_template(tools=tools)
            return tokenizer.apply_chat_template(
                messages, tools, chat_template=template, add_generation_prompt=prompts, tokenize=False
            )
        except Exception as error:  # a template raises anything
            raise UnusableError(f"the chat template refuses the messages: {first_line(error)}; correct them") from None

    @cached_property
    def _tokenizer(self) -> Any:
        """The library's, with a chat template."""
        if self._folder is None:
            raise UnusableError("messages need a chat template; set tokenizer.path to the folder of a tokenizer.json")
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise DataError(f"a chat template needs the package transformers; {install_hint('hf')}") from None
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(self._folder, local_files_only=True)
        except Exception as error:  # the library has none of its own
            raise DataError(f"{self._folder}: transformers rejects it: {first_line(error)}; correct it") from None
        if not tokenizer.chat_template:
            raise UnusableError(f"{self._folder} has no chat template; add its chat_template.jinja")
        return tokenizer

    @cached_property
    def _pipeline(self) -> Any:
        """The tokenizer itself."""
        from tokenizers import Tokenizer

        assert self._folder is not None, "a template rendered the text"
        pipeline = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        pipeline.no_truncation()
        pipeline.no_padding()
        return pipeline


def _after(prompt: str, answered: str) -> str:
    """The first characters of an answered prompt that are not the prompt's."""
    same = next((at for at, (a, b) in enumerate(zip(prompt, answered, strict=False)) if a != b), len(answered))
    return printable(answered[same : same + SHOWN])
