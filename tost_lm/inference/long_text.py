"""The score of one long text, read as a stream."""

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

import numpy as np

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.inference.generation import LanguageModel, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import rates
from tost_lm.inference.text_file import BLOCK_BYTES, TextFile, ids_of
from tost_lm.model.block import LMState
from tost_lm.model.streaming import TILE_TOKENS, TokenStream

ID_BYTES = 4

OnProgress = Callable[[int, int, str], object]
"""Called with the number of tokens scored so far, the number of all tokens, and a note."""


def score_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: TextFile,
    ranks: Ranks | None = None,
    report: OnProgress | None = None,
) -> tuple[dict[str, Any], LMState]:
    """Nats per token, perplexity and bits per byte of a text, each token given all before it; and the final state.

    Memory does not grow with the text, unless the model has softmax layers without a window. The model reads an end of
    text first, which is not scored. The ids are those of the whole text, within the limits that `encode_blocks` states;
    they are in a temporary file. Each sequence rank processes TILE_TOKENS tokens at a time.

    Args:
        model: in evaluation mode.
        ranks: all of them call it; None: only this one.
        report: called after each tile.

    Raises:
        ConfigError: the text is longer than the model's positions.
        CheckpointError: a score is not finite.
        DataError: the file changed while it was read.
    """
    ranks = ranks or Ranks()
    with tempfile.TemporaryFile() as ids_file:
        progress = lambda blocks: f"{min(blocks * BLOCK_BYTES, text.bytes):,} of {text.bytes:,} bytes tokenized"
        length = _write_ids(ids_file, ranks.each(ids_of(tokenizer, text.blocks()), progress))
        limit = model.config.position_limit
        if limit is not None and length > limit:
            raise ConfigError(
                f"{text.path}: {length:,} tokens are more than the model's positions (model.max_positions = "
                f"{limit:,}); shorten the text"
            )
        tokens, nats = 0, 0.0
        if report:
            report(tokens, length, "")
        stream = TokenStream(model, _read_ids(ids_file), None, TILE_TOKENS * ranks.sequence_ranks)
        for nats_T in ranks.each(stream):
            require_finite(model, nats_T.numpy())
            tokens, nats = tokens + len(nats_T), nats + float(nats_T.sum())
            if report:
                report(tokens, length, f"{nats / tokens:.4f} nats/token")
            _return_freed_memory()
    assert stream.state
    return rates(nats, tokens, text.bytes), stream.state


def _return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps more and more of it, between pieces that are in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _write_ids(file: IO[bytes], blocks: Iterable[Any]) -> int:
    """Write blocks of ids as uint32; returns the number of ids after the first."""
    for ids in blocks:
        file.write(np.asarray(ids, np.uint32).tobytes())
    return file.tell() // ID_BYTES - 1


def _read_ids(file: IO[bytes]) -> Iterator[np.ndarray]:
    """The ids in blocks. They are read, because mapped pages would count as memory."""
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        yield np.frombuffer(block, np.uint32)
