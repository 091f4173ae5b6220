"""Texts of any length to ids and back, holding a block of them at a time."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tost_lm.data.tokenizers.interface import Tokenizer
from tost_lm.data.tokenizers.sentencepiece_bpe import ESCAPE

if TYPE_CHECKING:
    import numpy as np

BLOCK_CHARACTERS = 1 << 18
REPLACEMENT = "\ufffd"
INCOMPLETE = 3  # most bytes of a character that is not whole
LOST_IDS = 64  # with so many ids and still no whole character, they are none


def encode_blocks(tokenizer: Tokenizer, blocks: Iterable[str]) -> Iterator["np.ndarray"]:
    """Ids of the text that `blocks` make together, as arrays of any length; the end-of-text id is not among them.

    They are those of `tokenizer.encode` of the whole text. The text is cut before a space behind another character than
    white space, where both kinds of tokenizer cut it as well: GPT-2's always, a SentencePiece model where none of its
    pieces goes on beyond a word, as those trained here (a user symbol may). Where there is no such space in a whole
    block, the text is cut at the block's end, and one token may become two.
    """
    held = ""
    for block in blocks:
        text = held + block
        cut = _last_word(text)
        if not cut and len(text) >= BLOCK_CHARACTERS:
            cut = len(text)
        if cut:
            yield tokenizer.encode_array(text[:cut])
        held = text[cut:]
    if held:
        yield tokenizer.encode_array(held)


def decode_ids(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """The text of ids, in whole characters as they become complete: together what `tokenizer.decode` makes of all.

    There is a string for each id, perhaps an empty one, and one for the end. Of 64 ids in a row whose last character is
    not whole, nothing more is expected: what they give is told as it is.
    """
    before: list[int] = []  # ids whose text is told, in front of those that follow: a tokenizer may trim a beginning
    held: list[int] = []
    told = 0
    for i in ids:
        held.append(i)
        text = _behind(tokenizer, before, held)
        whole = _whole(text)
        if len(held) >= LOST_IDS:
            whole = len(text)
        yield text[told:whole]
        told = whole
        if whole == len(text):
            before, held, told = held, [], 0
    yield _behind(tokenizer, before, held)[told:]


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of one id behind other text: '' of the end of text, U+FFFD where it is a part of a character."""
    return _behind(tokenizer, tokenizer.encode("a"), [token])


def _last_word(text: str) -> int:
    """Where the last space behind another character than white space is; 0: nowhere."""
    end = len(text)
    while (space := text.rfind(" ", 1, end)) > 0:
        if not text[space - 1].isspace():
            return space
        end = space
    return 0


def _behind(tokenizer: Tokenizer, before: list[int], held: list[int]) -> str:
    """The text of `held` behind that of `before`."""
    return tokenizer.decode([*before, *held])[len(tokenizer.decode(before)) :]


def _whole(text: str) -> int:
    """Characters of a text that later ids cannot change: without a character, or an escape, that may be a beginning."""
    if text.endswith(ESCAPE):
        return len(text) - 1
    cut = len(text)
    while cut > max(0, len(text) - INCOMPLETE) and text[cut - 1] == REPLACEMENT:
        cut -= 1
    return cut
