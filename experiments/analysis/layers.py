"""Input of the analyses: held-out text, and the inputs, memberships and outputs of the TSSA layers of a model while
it processes tokens.

Shapes: B rows, N sequences, T tokens, S tokens of context, V vocabulary, K different tokens of the text or documents,
H heads, D channels per head, C channels. Standard errors are over documents.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tost_lm.data.shards import Concatenation, Shards
from tost_lm.errors import DataError
from tost_lm.mixers.tssa.layer import TssaMixer, bias_of
from tost_lm.mixers.tssa.statistics import TssaState, token_scores
from tost_lm.model import LMState, TostLM
from tost_lm.model.block import Block
from tost_lm.model.streaming import to_running_dtype
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import statistics_dtype


@dataclass(frozen=True)
class HeldoutText:
    """Sequences spread evenly over the concatenated held-out documents."""

    sequences_NT: Tensor
    documents_NT: Tensor
    """Index of each token's document."""
    context_S: Tensor
    """Text before the sequences."""

    @property
    def document_of(self) -> Tensor:
        """The document with the most tokens in each sequence [N]."""
        return self.documents_NT.mode(dim=1).values

    def to(self, device: str) -> "HeldoutText":
        return HeldoutText(*(x.to(device) for x in (self.sequences_NT, self.documents_NT, self.context_S)))


@dataclass(frozen=True)
class Analysis:
    """A model and its held-out text."""

    model: TostLM
    text: HeldoutText

    @property
    def sequences(self) -> Tensor:
        """Tokens [N, T]."""
        return self.text.sequences_NT


def read_text(shards: Shards, sequences: int, tokens: int, context_tokens: int) -> HeldoutText:
    """Sequences [sequences, tokens] and a context of `context_tokens` before them.

    Raises:
        DataError: the held-out text is too short.
    """
    text = Concatenation(shards.token_arrays("valid"))
    if len(text) < context_tokens + sequences * tokens:
        raise DataError(
            f"{shards.folder}: its held-out text is too short for a context of {context_tokens:,} tokens and "
            f"{sequences} sequences of {tokens:,}: {len(text):,} tokens; lower memberships.context_tokens or "
            "memberships.sequences, or give more text (heldout.shards=FOLDER)"
        )
    starts = np.linspace(context_tokens, len(text) - tokens, sequences).astype(np.int64)
    drawn = text.read(np.array([0, *starts]), np.array([context_tokens, *[tokens] * sequences]), np.int64)
    context_S, flat = torch.from_numpy(drawn).split([context_tokens, sequences * tokens])
    ends = np.cumsum(np.concatenate(shards.lengths("valid")), dtype=np.int64)
    documents_NT = np.searchsorted(ends, starts[:, None] + np.arange(tokens), "right")
    return HeldoutText(flat.view(sequences, tokens), torch.from_numpy(documents_NT), context_S)


TILE_TOKENS = 2048


@dataclass(frozen=True)
class LayerTile:
    """One call of one TSSA layer. All rows start at the same position."""

    layer: int
    """Index among the TSSA layers, from 0."""
    block: Block
    mixer: TssaMixer
    x_BTC: Tensor
    """Residual stream before the block."""
    z_BTC: Tensor
    """Input of the mixer: the residual stream, after the block's norm unless that comes after the mixer."""
    y_BTC: Tensor
    """Output of the mixer."""
    state: TssaState | None
    info: SequenceInfo

    @property
    def positions(self) -> slice:
        """Positions of the tokens in their rows."""
        start = self.info.start_positions[0]
        return slice(start, start + self.z_BTC.shape[1])

    @cached_property
    def projected(self) -> Tensor:
        """w [B, T, H, D]."""
        return project(self.mixer, self.z_BTC)

    @cached_property
    def scores(self) -> Tensor:
        """Token scores z [B, T, H], float64."""
        return layer_scores(self.mixer, self.projected, self.state, self.info).double()

    @cached_property
    def pi(self) -> Tensor:
        """Memberships Π [B, T, H], float64."""
        return self.scores.softmax(-1)

    @property
    def branch(self) -> Tensor:
        """The mixer's output, which is added to the residual stream [B, T, C]."""
        return self.block.mixer_scale(self.block.branch_output(self.y_BTC, self.block.mixer_norm))


OnTile = Callable[[LayerTile], None]


def tssa_mixers(model: TostLM) -> list[TssaMixer]:
    """The mixers of the TSSA layers, in the order of their calls."""
    return [module for module in model.modules() if isinstance(module, TssaMixer)]


@torch.inference_mode()
def run_in_tiles(model: TostLM, tokens_BT: Tensor, on_tile: OnTile, state: LMState | None = None) -> LMState:
    """Run the model on rows of any length, `TILE_TOKENS` at once, and pass each call of a TSSA layer to `on_tile`.

    Memory is bounded by one tile and the model's state. Returns the state after the last token.
    """
    with observe_layers(model, on_tile):
        for tile_BT in tokens_BT.split(TILE_TOKENS, dim=1):
            state = to_running_dtype(model(tile_BT, state=state).state)
    assert state is not None
    return state


@contextmanager
def observe_layers(model: nn.Module, on_tile: OnTile) -> Iterator[None]:
    """Pass each call of a TSSA layer to `on_tile` until the context ends."""
    blocks = [block for block in model.modules() if isinstance(block, Block) and isinstance(block.mixer, TssaMixer)]
    streams: list[Tensor] = []

    def before(block: Any, arguments: Any) -> None:
        streams.append(arguments[0])

    def after(layer: int, block: Block, mixer: TssaMixer, arguments: Any, result: Any) -> None:
        z_BTC, state, info = arguments
        on_tile(LayerTile(layer, block, mixer, streams.pop(), z_BTC, result[0], state, info))

    with ExitStack() as hooks:
        for layer, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(before))
            hooks.enter_context(block.mixer.register_forward_hook(partial(after, layer, block)))
        yield


def project(mixer: TssaMixer, z_BTC: Tensor) -> Tensor:
    """w [B, T, H, D]."""
    return mixer.in_proj(z_BTC).unflatten(-1, (mixer.heads, -1))


def layer_scores(mixer: TssaMixer, w_BTHD: Tensor, state: TssaState | None, info: SequenceInfo) -> Tensor:
    """Token scores z [B, T, H] of a layer that is called with this state."""
    dtype = statistics_dtype(w_BTHD)
    w_sq_BTHD = w_BTHD.to(dtype).square()
    energy_BTHD = w_sq_BTHD.cumsum(1)
    if state is not None:
        energy_BTHD = energy_BTHD + state.energy[:, None].to(dtype)
    bias_HT = bias_of(mixer.denom_bias, info)
    bias_TH = None if bias_HT is None else bias_HT.mT.to(dtype)
    return token_scores(w_sq_BTHD, energy_BTHD, mixer.temp.to(dtype), bias_TH)


def standard_error(values: Tensor, documents_N: Tensor) -> Tensor | None:
    """Cluster-robust standard error of the mean of `values` [N, …] over sequences; a cluster is a document.

    Deviations of one document are summed before they are squared, with the factor K/(K − 1). The result equals s/√N
    where each sequence has a document of its own. It is None where all sequences come from one document.
    """
    number_N = documents_N.unique(return_inverse=True)[1].to(values.device)
    documents = int(number_N.max()) + 1
    if documents < 2:
        return None
    deviations = values - values.mean(0)
    sums = deviations.new_zeros(documents, *deviations.shape[1:]).index_add(0, number_N, deviations)
    return (sums.square().sum(0) * documents / (documents - 1)).sqrt() / len(values)
