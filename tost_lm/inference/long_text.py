"""The score of one long text, read as a stream."""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.inference.generation import LanguageModel, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import rates
from tost_lm.inference.text_file import TextFile, ids_of
from tost_lm.model.block import LMState
from tost_lm.model.streaming import TILE_TOKENS, TokenStream


def score_text(
    model: LanguageModel, tokenizer: Tokenizer, text: TextFile, ranks: Ranks | None = None
) -> tuple[dict[str, Any], LMState]:
    """Nats per token, perplexity and bits per byte of a text, each token given all before it; and the final state.

    Memory does not grow with the text, unless the model has softmax layers without a window. The model reads an end of
    text first, which is not scored. The ids are those of the whole text, within the limits that `encode_blocks` states.
    Each sequence rank processes TILE_TOKENS tokens at a time. Prints progress each minute.

    Args:
        model: in evaluation mode.
        ranks: all of them call it; None: only this one.

    Raises:
        ConfigError: the text is longer than the model's positions.
        CheckpointError: a score is not finite.
        DataError: the file changed while it was read.
    """
    ranks = ranks or Ranks()
    tokens, nats, done = 0, 0.0, 0

    def blocks() -> Iterator[str]:
        nonlocal done
        for block in text.blocks():
            done += len(block.encode())
            yield block

    stream = TokenStream(model, ids_of(tokenizer, blocks()), None, TILE_TOKENS * ranks.sequence_ranks)
    for nats_T in ranks.each(stream, lambda _: f"{done:,} of {text.bytes:,} bytes read"):
        require_finite(model, nats_T.numpy())
        tokens, nats = tokens + len(nats_T), nats + float(nats_T.sum())
        _return_freed_memory()
    assert stream.state
    return rates(nats, tokens, text.bytes), stream.state


def _return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps more and more of it, between pieces that are in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)
