"""Exact training tile by tile through all layers, in memory that does not grow with the length, except for states that
do.

The past of a layer is its state; the states of softmax layers without a window share the keys and values of all earlier
tiles (`tost_lm.mixers.state`). A first pass computes only the states between tiles. A second pass goes from the last
tile to the first. It computes each tile again from the state before it and runs its backward with the gradient of the
state after it. That backward gives the gradient of the state before it, for the previous tile. So every tile but the
last is computed twice.

The engine of a run drives the backward of each tile (`forward_and_backward`) and sums the gradients of weights in
float32. In your own training loop, autograd does (`tiled_backward`), in the data type of the weights.

Shape suffixes: B rows, T tokens of a row, L the row's tokens on this rank: its sequence shards of all tiles in order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tost_lm.data.prefetch import MicroBatch
from tost_lm.errors import ConfigError
from tost_lm.mixers.state import as_leaves, gradients, leaves, mapped
from tost_lm.model.block import LMOutput, LMState
from tost_lm.model.lm import TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.layout import SequenceShard, SequenceSplit
from tost_lm.parallel.apply import shard_of
from tost_lm.parallel.engine import Engine
from tost_lm.parallel.mesh import Mesh


class Tile(NamedTuple):
    """Tokens of each row that are in memory at once."""

    start: int
    """First column of the row."""
    split: SequenceSplit
    """Distribution over sequence ranks, each of which has a sequence shard of every tile."""
    shard: SequenceShard | None
    """This rank's sequence shard; None: there is no other rank."""

    @property
    def end(self) -> int:
        return self.start + self.split.tokens

    @property
    def columns(self) -> tuple[int, int]:
        """First column of this rank's sequence shard in the row, and the column after its last."""
        return self.start + self.split.start, self.start + self.split.end


class Tiling(NamedTuple):
    """The tiles of a row."""

    tiles: tuple[Tile, ...]
    states_on_host: bool = False
    """The states between tiles are stored in host memory."""


def tile(mesh: Mesh, tokens: int, tile_tokens: int | None = None, *, states_on_host: bool = False) -> Tiling:
    """Cut rows of `tokens` tokens into tiles of `tile_tokens` (None: one tile); the last tile may be shorter.

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    size, ranks = tile_tokens or tokens, mesh.sequence
    cuts = list(_splits(tokens, size, ranks.size, ranks.rank))
    start, last = cuts[-1]
    if last.tokens < ranks.size:
        raise ConfigError(
            f"memory.tile_tokens {size}: the tile at {start:,} of {tokens:,} tokens has {last.tokens} tokens, less "
            f"than one for each of parallel.sequence {ranks.size} ranks; set another size"
        )
    return Tiling(tuple(Tile(start, split, shard_of(mesh, split)) for start, split in cuts), states_on_host)


def _splits(tokens: int, size: int, ranks: int = 1, rank: int = 0) -> Iterator[tuple[int, SequenceSplit]]:
    """The first column of each tile and its distribution over ranks."""
    for start in range(0, tokens, size):
        yield start, SequenceSplit.even(min(size, tokens - start), ranks, rank)


def tiled_backward(
    model: TostLM, tokens_BT: Tensor, labels_BT: Tensor, tile_tokens: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The loss of `model(tokens, labels, cu_seqlens=…)` and its backward, exactly, in the memory of one tile.

    The gradients are added to those that the weights have, in their data type, once for each tile.

    Args:
        model: any.
        tokens_BT: ids, int64.
        labels_BT: the token after each token, as in `TostLM.forward`.
        tile_tokens: tokens of each row that are in memory at once.
        cu_seqlens: offsets of packed documents, as in `TostLM.forward`.

    Returns:
        The loss, without a graph.

    Raises:
        ConfigError: a document is longer than the model's positions.
    """
    tiles = [Tile(start, split, None) for start, split in _splits(tokens_BT.shape[1], tile_tokens)]
    count = (labels_BT != IGNORED_LABEL).sum()
    batches = list(tile_batches(tokens_BT, labels_BT, cu_seqlens, count, tiles))
    in_autograd = lambda is_first_tile, roots, d_roots: torch.autograd.backward(roots, d_roots)
    return _sums(_losses_of_tiles(model, batches, states_on_host=False, backward=in_autograd))[MINIMIZED]


def forward_and_backward(
    engine: Engine,
    batch: MicroBatch,
    label_count: Tensor,
    tiling: Tiling,
    before_tile: Callable[[], None] = lambda: None,
    *,
    ends_step: bool,
) -> Mapping[str, Tensor]:
    """Forward and backward of this rank's tokens of a micro-batch. Returns `LMOutput.scalars`."""

    def call(*arguments: Any, **options: Any) -> LMOutput:
        before_tile()
        return engine(*arguments, **options)

    if len(tiling.tiles) > 1:
        batches = list(tile_batches(*batch, label_count, tiling.tiles))

        def backward(is_first_tile: bool, roots: Sequence[Tensor], d_roots: Sequence[Tensor]) -> None:
            engine.backward(roots, d_roots[1:], ends_step=ends_step and is_first_tile)

        _, *scalars = _sums(_losses_of_tiles(call, batches, tiling.states_on_host, backward)).items()
        return dict(scalars)
    output = call(batch.tokens, batch.labels, cu_seqlens=batch.cu_seqlens, label_count=label_count, tiling=tiling)
    assert output.loss is not None
    engine.backward([output.loss], ends_step=ends_step)
    return output.scalars


class TiledLM(TostLM):
    """A language model whose forward also works tile by tile."""

    def forward(self, tokens: Tensor, labels: Any = None, *arguments: Any, **options: Any) -> LMOutput:
        """Run `TostLM`, or forward(tokens_BL, labels_BL, cu_seqlens=…, label_count=…, tiling=…).

        In the second form tokens and labels are this rank's sequence shards, and cu_seqlens describes whole rows. With
        several tiles, which needs no_grad, the output has only the nats.

        Raises:
            ConfigError: a document is longer than the model's positions.
        """
        tiling: Tiling | None = options.pop("tiling", None)
        if tiling is None:
            return super().forward(tokens, labels, *arguments, **options)
        if len(tiling.tiles) == 1:
            shard = tiling.tiles[0].shard
            return super().forward(tokens, labels, *arguments, **options, output_state=False, shard=shard)
        batches = list(tile_batches(tokens, labels, *arguments, **options, tiles=tiling.tiles))
        return LMOutput(None, _nats(self, batches), None, None, _no_logits)


class TileBatch(NamedTuple):
    """This rank's tokens of a micro-batch in one tile."""

    tokens_BL: Tensor
    labels_BL: Tensor
    cu_seqlens: Tensor | None
    """Documents of the tile, counted from its first column."""
    label_count: Tensor | float
    """In all tiles and on all ranks."""
    shard: SequenceShard | None
    is_continued: bool
    """Its last document goes on in the next tile, which needs the state after it."""


def tile_batches(
    tokens_BL: Tensor,
    labels_BL: Tensor,
    cu_seqlens: Tensor | None,
    label_count: Tensor | float,
    tiles: Sequence[Tile],
) -> Iterator[TileBatch]:
    """A micro-batch of this rank, cut into tiles."""
    lengths = [end - start for start, end in (tile.columns for tile in tiles)]
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    for tile, tokens, labels in zip(tiles, tokens_BL.split(lengths, 1), labels_BL.split(lengths, 1), strict=True):
        cuts, is_continued = None, tile is not tiles[-1]
        if offsets is not None:
            inner = [offset - tile.start for offset in offsets if tile.start < offset < tile.end]
            cuts = torch.tensor([0, *inner, tile.end - tile.start], dtype=torch.int32)
            is_continued = is_continued and tile.end not in offsets
        yield TileBatch(tokens, labels, cuts, label_count, tile.shard, is_continued)


Call = Callable[..., LMOutput]


def _forward(call: Call, batch: TileBatch, state: LMState | None, *, with_labels: bool = True) -> LMOutput:
    """The output, with the final state if the next tile needs it."""
    return call(
        batch.tokens_BL,
        batch.labels_BL if with_labels else None,
        state,
        batch.cu_seqlens,
        label_count=batch.label_count,
        output_state=batch.is_continued and "last",
        shard=batch.shard,
    )


def _nats(model: Call, batches: Sequence[TileBatch]) -> Tensor:
    nats, state = [], None
    for batch in batches:
        output = _forward(model, batch, state)
        nats.append(output.nats)
        state = output.state
    return torch.cat(nats, 1)


Backward = Callable[[bool, Sequence[Tensor], Sequence[Tensor]], None]
"""Takes whether it is that of the first tile, the last backward; the loss and the tensors of the final state; and their
gradients."""
MINIMIZED = "minimized"


def _sums(losses: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Over tiles, by name."""
    totals = torch.stack([torch.stack([*of_tile.values()]) for of_tile in losses]).sum(0)
    return dict(zip(losses[0], totals, strict=True))


@torch.no_grad()
def _losses_of_tiles(
    call: Call, batches: Sequence[TileBatch], states_on_host: bool, backward: Backward
) -> list[dict[str, Tensor]]:
    """`_forward_and_backward` of all tiles, from the last to the first."""
    states = _states_before(call, batches, states_on_host)
    losses, d_after = [], None
    for batch in reversed(batches):
        before, device = states.pop(), batch.tokens_BL.device
        if before is not None:
            before = before.map(partial(as_leaves, device=device))
        losses.append(_forward_and_backward(call, batch, before, d_after, partial(backward, not states)))
        d_after = [d for layer in before.layers for d in gradients(layer)] if before else None
    return losses


def _states_before(call: Call, batches: Sequence[TileBatch], on_host: bool) -> list[LMState | None]:
    states: list[LMState | None] = [None]
    state = None
    for batch in batches[:-1]:
        state = _forward(call, batch, state, with_labels=False).state
        states.append(state.map(partial(mapped, change=Tensor.cpu)) if state and on_host else state)
    return states


def _forward_and_backward(
    call: Call,
    batch: TileBatch,
    before: LMState | None,
    d_after: list[Tensor | None] | None,
    backward: Callable[[Sequence[Tensor], Sequence[Tensor]], None],
) -> dict[str, Tensor]:
    """The loss that is minimized, then the scalars; all detached. `d_after` is the gradient of the final state."""
    with torch.enable_grad():
        output = _forward(call, batch, before)
    assert output.loss is not None
    roots, d_roots = [output.loss], [torch.ones_like(output.loss)]
    if d_after is not None and output.state is not None:
        after = [x for layer in output.state.layers for x in leaves(layer)]
        for x, d in zip(after, d_after, strict=True):
            if d is not None:  # None: keys and values outside the window of every later token of this rank
                roots.append(x)
                d_roots.append(d.to(x.device))  # that of an offloaded shared state is on the host
    backward(roots, d_roots)
    return {MINIMIZED: output.loss.detach(), **output.scalars}


def _no_logits() -> Tensor:
    raise RuntimeError("several tiles have no logits; call the model without tiling")
