"""Encodes and decodes texts of any length with bounded memory."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.data.tokenizers.sentencepiece_bpe import ESCAPE

if TYPE_CHECKING:
    import numpy as np

BLOCK_CHARACTERS = 1 << 18
REPLACEMENT = "\ufffd"
MAX_INCOMPLETE = 3  # replacement characters of an incomplete UTF-8 sequence, at most
MAX_PENDING_IDS = 64  # this many ids without a complete character are not UTF-8


def encode_blocks(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator["np.ndarray"]:
    """Token ids of the concatenated `blocks`, as arrays of any length, without the end-of-text id.

    The ids equal `tokenizer.encode` of the whole text if the text has spaces and the tokenizer cuts at them. The text
    is cut before a space that follows a non-space character. GPT-2 always cuts there; so does any other tokenizer
    unless one of its tokens crosses a word boundary (a user symbol may). A block without such a space is cut at its
    end, where one token may become two, and a tokenizer that puts a space before a text puts one.
    """
    pending, space = "", ""
    for block in blocks:
        text = pending + block
        cut = _last_boundary(text)
        if not cut and len(text) >= BLOCK_CHARACTERS:
            cut = len(text)
        if cut:
            yield tokenizer.encode_array(text[:cut].removeprefix(space))
            space = " " if tokenizer.adds_space else ""  # it puts back the space before a cut
        pending = text[cut:]
    if pending:
        yield tokenizer.encode_array(pending.removeprefix(space))


def decode_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of token ids, in complete characters; the concatenation equals `tokenizer.decode` of all ids.

    Yields one string (possibly empty) for each id and one at the end. After 64 ids without a complete last character,
    it yields the decoded text with its replacement characters.
    """
    context: list[int] = []  # ids before `pending`, because a tokenizer may trim the beginning of a text
    pending: list[int] = []
    emitted = 0
    for i in ids:
        pending.append(i)
        text = _decode_after(tokenizer, context, pending)
        complete = len(text) if len(pending) >= MAX_PENDING_IDS else _complete_characters(text)
        yield text[emitted:complete]
        emitted = complete
        if complete == len(text):
            context, pending, emitted = pending, [], 0
    yield _decode_after(tokenizer, context, pending)[emitted:]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one id after other text: '' for the end-of-text id, U+FFFD for an incomplete character."""
    return _decode_after(tokenizer, tokenizer.encode("a"), [token])


def _last_boundary(text: str) -> int:
    """Index of the last space after a non-space character and before any character; 0: none."""
    end = len(text) - 1
    while (space := text.rfind(" ", 1, end)) > 0:
        if not text[space - 1].isspace():
            return space
        end = space
    return 0


def _decode_after(tokenizer: Tokenizer, context: list[int], ids: list[int]) -> str:
    """The text that `ids` add to the text of `context`."""
    return tokenizer.decode([*context, *ids])[len(tokenizer.decode(context)) :]


def _complete_characters(text: str) -> int:
    """Number of leading characters that later ids cannot change."""
    if text.endswith(ESCAPE):
        return len(text) - 1
    return len(text) - min(MAX_INCOMPLETE, len(text) - len(text.rstrip(REPLACEMENT)))
