"""The score of one long text, read as a stream.

The position in the stream is saved: after an interruption the evaluation resumes with equal bits.

Shape suffixes: S tokens of a sequence, N sequences, P position buckets.
"""

import ctypes
import io
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from tost_lm.data.tokenizers import Tokenizer
from tost_lm.errors import ConfigError
from tost_lm.files import regular_file, write_atomically
from tost_lm.inference.evaluated import differing
from tost_lm.inference.generation import LanguageModel, require_finite
from tost_lm.inference.ranks import Ranks
from tost_lm.inference.requests import rates
from tost_lm.inference.text_file import BLOCK_BYTES, TextFile, ids_of
from tost_lm.mixers.registry import SPECS, mixer_class
from tost_lm.model.block import LMState
from tost_lm.model.streaming import TILE_TOKENS, TokenStream

SAVE_EVERY_S = 10.0
LARGEST_SHARE = 0.05
"""Largest fraction of the time that is spent on saving: the state of softmax layers without a window may be large."""
DIGEST_BYTES = 16


class TextPosition(NamedTuple):
    """A position in a text."""

    tokens: int = 0
    """Number of tokens scored so far."""
    nats: float = 0.0
    """Their sum."""
    state: LMState | None = None
    """The model's state before the last of them; None at the beginning."""


class SavedPosition:
    """The file of the last saved position. All ranks make the same calls; rank 0 writes, and all ranks read.

    The file has the XXH3-128 of its content in front, and the states of all tensor ranks. It fits any number of
    sequence ranks.
    """

    def __init__(self, path: Path, identity: dict[str, Any], ranks: Ranks):
        """
        Args:
            identity: everything that the result depends on.
        """
        self.path, self._ranks = path, ranks
        self._identity = identity | {"parallel": {"tensor": ranks.tensor_ranks}}
        self._next_save = time.monotonic() + SAVE_EVERY_S

    def read(self, model: LanguageModel) -> TextPosition:
        """The saved position, which is reported on stdout. Without a file it is the beginning, as with the file of
        another identity or a damaged one, which are named."""
        position, problem = self._read(next(model.parameters()).device)
        found = self._ranks.gather(position.tokens)
        if len(set(found)) > 1:
            position, problem = TextPosition(), "not the same on all nodes"
        if problem:
            print(f"{self.path}: {problem}; scoring starts at the beginning", flush=True)
        elif position.tokens:
            print(f"resuming after {position.tokens:,} tokens", flush=True)
        return position

    def write_if_due(self, position: TextPosition) -> None:
        """Save the position every SAVE_EVERY_S seconds, or more rarely if that takes more than LARGEST_SHARE."""
        started = time.monotonic()
        if not self._ranks.gather(started >= self._next_save)[0]:
            return
        assert position.state
        letter_of = {mixer_class(letter).State: letter for letter in SPECS}
        if not all(type(layer) in letter_of for layer in position.state.layers):
            return  # a cache of another library
        layers = [(letter_of[type(layer)], self._of_all_tensor_ranks(layer)) for layer in position.state.layers]
        if self._ranks.rank == 0:
            buffer = io.BytesIO()
            torch.save((self._identity, position.tokens, position.nats, layers), buffer)
            data = buffer.getvalue()
            write_atomically(self.path, xxhash.xxh3_128_digest(data) + data)
        ended = time.monotonic()
        self._next_save = ended + max(SAVE_EVERY_S, (ended - started) / LARGEST_SHARE)

    def _read(self, device: torch.device) -> tuple[TextPosition, str | None]:
        """The position, and what is wrong with the file."""
        if not self.path.is_file():
            return TextPosition(), None
        content = regular_file(self.path).read_bytes()
        digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest != xxhash.xxh3_128_digest(data):
            return TextPosition(), "damaged"
        identity, tokens, nats, layers = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        if identity != self._identity:
            return TextPosition(), f"saved with another {differing(identity, self._identity)}"
        rank = self._ranks.mesh.tensor.rank if self._ranks.mesh else 0
        states = tuple(mixer_class(letter).State(*(x_R[rank] for x_R in tensors)) for letter, tensors in layers)
        return TextPosition(tokens, nats, LMState(states, (tokens,))), None

    def _of_all_tensor_ranks(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Each tensor of a layer's state on all R tensor ranks, [R, …] on the host."""
        if self._ranks.mesh is None or self._ranks.tensor_ranks == 1:
            return [x[None].cpu().clone() for x in tensors]  # without memory that is not used yet
        from tost_lm.parallel.mesh import all_gather

        return [all_gather(x, self._ranks.mesh.tensor)().cpu() for x in tensors]


ID_BYTES = 4

OnProgress = Callable[[int, int, str], object]
"""Called with the number of tokens scored so far, the number of all tokens, and a note."""


def score_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    text: TextFile,
    ranks: Ranks | None = None,
    saved: SavedPosition | None = None,
    report: OnProgress | None = None,
) -> tuple[dict[str, Any], LMState]:
    """Nats per token, perplexity and bits per byte of a text, each token given all before it; and the final state.

    Memory does not grow with the text, unless the model has softmax layers without a window. The model reads an end of
    text first, which is not scored. The ids are those of the whole text, within the limits that `encode_blocks` states;
    they are in a temporary file. Each sequence rank processes TILE_TOKENS tokens at a time.

    Args:
        model: in evaluation mode.
        ranks: all of them call it; None: only this one.
        saved: where scoring resumes, and where its position is saved.
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
        at = saved.read(model) if saved else TextPosition()
        if report:
            report(at.tokens, length, "")
        stream = TokenStream(model, _ids_from(ids_file, at.tokens), at.state, TILE_TOKENS * ranks.sequence_ranks)
        for nats_T in ranks.each(stream):
            require_finite(model, nats_T.numpy())
            at = TextPosition(at.tokens + len(nats_T), at.nats + float(nats_T.sum()), stream.state)
            if report:
                report(at.tokens, length, f"{at.nats / at.tokens:.4f} nats/token")
            if saved:
                saved.write_if_due(at)
            _return_freed_memory()
    assert at.state
    return rates(at.nats, at.tokens, text.bytes), at.state


def _return_freed_memory() -> None:
    """Give freed memory back to the system: glibc keeps more and more of it, between pieces that are in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _write_ids(file: IO[bytes], blocks: Iterable[Any]) -> int:
    """Write blocks of ids as uint32; returns the number of ids after the first."""
    for ids in blocks:
        file.write(np.asarray(ids, np.uint32).tobytes())
    return file.tell() // ID_BYTES - 1


def _ids_from(file: IO[bytes], first: int) -> Iterator[np.ndarray]:
    """Blocks of the ids from index `first` on. They are read, because mapped pages would count as memory."""
    file.seek(first * ID_BYTES)
    while block := file.read(BLOCK_BYTES):
        yield np.frombuffer(block, np.uint32)
