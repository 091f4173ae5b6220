"""The saved position of an evaluation that reads one long text: after an interruption it resumes with equal bits."""

import io
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from tost_lm.evaluation.ranks import Ranks
from tost_lm.evaluation.subject import differing
from tost_lm.files import write_atomically
from tost_lm.model.block import STATE_OF
from tost_lm.model.output import LMState

if TYPE_CHECKING:
    from tost_lm.evaluation.language_model import LanguageModel

SAVE_EVERY_S = 10.0
LARGEST_SHARE = 0.05
"""Of the time, for saving: the state of softmax layers without a window may be large."""
LETTER_OF = {kind: letter for letter, kind in STATE_OF.items()}
DIGEST_BYTES = 16


class Position(NamedTuple):
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

    def read(self, model: "LanguageModel") -> Position:
        """The saved position, which is reported on stdout. Without a file it is the beginning, as with the file of
        another identity or a damaged one, which are named."""
        position, problem = self._read(next(model.parameters()).device)
        found = self._ranks.gather(position.tokens)
        if len(set(found)) > 1:
            position, problem = Position(), "not the same on all nodes"
        if problem:
            print(f"{self.path}: {problem}; scoring starts at the beginning", flush=True)
        elif position.tokens:
            print(f"resuming after {position.tokens:,} tokens", flush=True)
        return position

    def write_if_due(self, position: Position) -> None:
        """Save the position every SAVE_EVERY_S seconds, or more rarely if that takes more than LARGEST_SHARE."""
        started = time.monotonic()
        if not self._ranks.gather(started >= self._next_save)[0]:
            return
        assert position.state
        layers = [(LETTER_OF[type(layer)], self._of_all_tensor_ranks(layer)) for layer in position.state.layers]
        if self._ranks.rank == 0:
            buffer = io.BytesIO()
            torch.save((self._identity, position.tokens, position.nats, layers), buffer)
            data = buffer.getvalue()
            write_atomically(self.path, xxhash.xxh3_128_digest(data) + data)
        ended = time.monotonic()
        self._next_save = ended + max(SAVE_EVERY_S, (ended - started) / LARGEST_SHARE)

    def remove(self) -> None:
        """Remove the file, after the result is written; rank 0 calls it."""
        self.path.unlink(missing_ok=True)

    def _read(self, device: torch.device) -> tuple[Position, str | None]:
        """The position, and what is wrong with the file."""
        if not self.path.is_file():
            return Position(), None
        content = self.path.read_bytes()
        digest, data = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest != xxhash.xxh3_128_digest(data):
            return Position(), "damaged"
        identity, tokens, nats, layers = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        if identity != self._identity:
            return Position(), f"saved with another {differing(identity, self._identity)}"
        rank = self._ranks.mesh.tensor.rank if self._ranks.mesh else 0
        states = tuple(STATE_OF[letter](*(x_R[rank] for x_R in tensors)) for letter, tensors in layers)
        return Position(tokens, nats, LMState(states, (tokens,))), None

    def _of_all_tensor_ranks(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Each tensor of a layer's state on all R tensor ranks, [R, …] on the host."""
        if self._ranks.mesh is None or self._ranks.tensor_ranks == 1:
            return [x[None].cpu() for x in tensors]
        from tost_lm.parallel.mesh import all_gather

        return [all_gather(x, self._ranks.mesh.tensor)().cpu() for x in tensors]
