"""Exact training in memory that does not grow with the length: tile by tile through all layers.

The past of a TSSA layer is its state, so a row is read tile by tile with nothing kept but the states in between. Then
the tiles are taken from the last to the first: each is read again from the state before it, its loss goes backward
together with the gradient of the state after it, and what arrives at the state before it goes on to the tile before.
All tiles but the last are so read twice. The gradients of weights are summed over tiles in float32 at least; autograd
sees one function of the weights, so that whatever reduces gradients does it once.

A layer of windowed softmax attention has a state too: the keys and values in its window.

Shape suffixes: B rows, T tokens of a row, L those of them on this rank, stripe after stripe.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from tost_lm.errors import ConfigError
from tost_lm.model.lm import LMOutput, LMState, TostLM
from tost_lm.ops.cross_entropy import IGNORED_LABEL
from tost_lm.ops.naive import statistics_dtype
from tost_lm.ops.phases import SequenceShard
from tost_lm.ops.split import SequenceSplit
from tost_lm.parallel.apply import shard_of
from tost_lm.parallel.mesh import Mesh


class Tile(NamedTuple):
    """Tokens of every row that are held at once."""

    start: int
    """Of the whole row."""
    split: SequenceSplit
    """How they lie on the sequence ranks: each has a stripe of every tile."""
    shard: SequenceShard | None
    """This rank's stripe; None: there is no other rank."""

    @property
    def end(self) -> int:
        return self.start + self.split.tokens

    @property
    def columns(self) -> tuple[int, int]:
        """Of this rank's stripe in the whole row."""
        return self.start + self.split.start, self.start + self.split.end


class Tiling(NamedTuple):
    """How rows are cut into tiles."""

    tiles: tuple[Tile, ...]
    truncated: bool = False
    """The gradient stops between tiles: truncated back-propagation through time, an approximation."""
    states_on_host: bool = False
    """The states between tiles wait in host memory."""


def tile(mesh: Mesh, tokens: int, tile_tokens: int | None = None, **options: bool) -> Tiling:
    """Rows of so many tokens in tiles of `tile_tokens` (None: one tile), the last one shorter where that must be.

    Raises:
        ConfigError: a tile has fewer tokens than there are sequence ranks.
    """
    size, ranks = tile_tokens or tokens, mesh.sequence
    cuts = list(_cut(tokens, size, ranks.size, ranks.rank))
    start, last = cuts[-1]
    if last.tokens < ranks.size:
        setting = "train.truncate_tokens" if options.get("truncated") else "memory.tile_tokens"
        raise ConfigError(
            f"{setting} {size}: the tile of {last.tokens} tokens that begins at {start:,} of {tokens:,} has less than "
            f"a token for each of parallel.sequence {ranks.size} ranks; take another size"
        )
    return Tiling(tuple(Tile(start, split, shard_of(mesh, split)) for start, split in cuts), **options)


def _cut(tokens: int, size: int, ranks: int = 1, rank: int = 0) -> Iterator[tuple[int, SequenceSplit]]:
    """Where each tile begins, and how it lies on ranks."""
    for start in range(0, tokens, size):
        yield start, SequenceSplit.even(min(size, tokens - start), ranks, rank)


def tiled_loss(
    model: TostLM, tokens_BT: Tensor, labels_BT: Tensor, tile_tokens: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """`model(tokens, labels, cu_seqlens=…).loss`, exact in value and gradients, in the memory of a tile.

    Its backward may be run once; the work is done already when this returns.

    Args:
        model: without A layers, or with a window for them.
        tokens_BT, labels_BT, cu_seqlens: as `TostLM` takes them.
        tile_tokens: tokens of each row that are held at once.

    Raises:
        ConfigError: the model has A layers without a window, or a document passes its positions.
    """
    if obstacle := model.config.obstacle_to_tiles:
        raise ConfigError(obstacle)
    tiles = [Tile(start, split, None) for start, split in _cut(tokens_BT.shape[1], tile_tokens)]
    count = (labels_BT != IGNORED_LABEL).sum()
    portions = list(_portions(tokens_BT, labels_BT, cu_seqlens, count, tiles))
    return _loss(model, portions, Tiling(tuple(tiles)))


class TiledLM(TostLM):
    """A language model as training calls it: whole rows, or tile by tile."""

    def forward(self, tokens: Tensor, labels: Any = None, *arguments: Any, **options: Any) -> LMOutput:
        """As `TostLM`; or forward(tokens_BL, labels_BL, cu_seqlens=…, label_count=…, tiling=…), where tokens and labels
        are this rank's stripes of all tiles and cu_seqlens is of whole rows.

        Of several tiles only the loss comes out, with a gradient whose backward may be run once, or without gradients
        only the nats.

        Raises:
            ConfigError: a document passes the model's positions.
        """
        tiling: Tiling | None = options.pop("tiling", None)
        if tiling is None:
            return super().forward(tokens, labels, *arguments, **options)
        if len(tiling.tiles) == 1:
            shard = tiling.tiles[0].shard
            return super().forward(tokens, labels, *arguments, **options, output_state=False, shard=shard)
        portions = list(_portions(tokens, labels, *arguments, **options, tiles=tiling.tiles))
        if torch.is_grad_enabled():
            return LMOutput(_loss(self, portions, tiling), None, None, None, _no_logits)
        return LMOutput(None, _nats(self, portions), None, None, _no_logits)


class _Portion(NamedTuple):
    """What of a micro-batch one tile has on this rank."""

    tokens_BL: Tensor
    labels_BL: Tensor
    cu_seqlens: Tensor | None
    """Of the documents in the tile."""
    label_count: Tensor | float
    """Of all tiles and ranks."""
    shard: SequenceShard | None
    goes_on: bool
    """Its first document began in an earlier tile."""


def _portions(
    tokens_BL: Tensor,
    labels_BL: Tensor,
    cu_seqlens: Tensor | None,
    label_count: Tensor | float,
    tiles: Sequence[Tile],
) -> Iterator[_Portion]:
    lengths = [end - start for start, end in (tile.columns for tile in tiles)]
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    for tile, tokens, labels in zip(tiles, tokens_BL.split(lengths, 1), labels_BL.split(lengths, 1), strict=True):
        cuts, goes_on = None, tile.start > 0
        if offsets is not None:
            inner = [offset - tile.start for offset in offsets if tile.start < offset < tile.end]
            cuts = torch.tensor([0, *inner, tile.end - tile.start], dtype=torch.int32)
            goes_on = goes_on and tile.start not in offsets
        yield _Portion(tokens, labels, cuts, label_count, tile.shard, goes_on)


Call = Callable[..., LMOutput]


def _read(
    call: Call, portion: _Portion, state: LMState | None, following: _Portion | None, *, with_labels: bool = True
) -> LMOutput:
    """With the state that the following portion goes on from."""
    wants_state = following is not None and following.goes_on
    return call(
        portion.tokens_BL,
        portion.labels_BL if with_labels else None,
        state,
        portion.cu_seqlens,
        label_count=portion.label_count,
        # Of packed documents only the last can go on.
        output_state=wants_state and ("last" if portion.cu_seqlens is not None else True),
        shard=portion.shard,
    )


def _nats(model: Call, portions: Sequence[_Portion]) -> Tensor:
    nats, state = [], None
    for portion, following in _with_next(portions):
        output = _read(model, portion, state, following)
        nats.append(output.nats)
        state = output.state
    return torch.cat(nats, 1)


def _loss(model: TostLM, portions: Sequence[_Portion], tiling: Tiling) -> Tensor:
    names, parameters = zip(*model.named_parameters(), strict=True)
    walk = _truncated if tiling.truncated else partial(_exact, states_on_host=tiling.states_on_host)

    def run(weights: Sequence[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        # Other leaves in the weights' memory: what looks at a weight's gradient sees one, the sum.
        leaves = {name: weight.detach().requires_grad_() for name, weight in zip(names, weights, strict=True)}
        sums: dict[str, Tensor] = {}
        for name, leaf in leaves.items():
            leaf.register_post_accumulate_grad_hook(partial(_add_up, sums, name))
        losses = walk(lambda *arguments, **options: functional_call(model, leaves, arguments, options), portions)
        return torch.stack(losses).sum(), [sums.get(name) for name in names]

    return _Tiled.apply(run, *parameters)  # pyright: ignore[reportReturnType]


class _Tiled(torch.autograd.Function):
    """apply(run, *weights) → loss, where `run(weights)` gives it and its gradient for each weight."""

    @staticmethod
    def forward(ctx, run: Callable[..., tuple[Tensor, list[Tensor | None]]], *weights: Tensor) -> Tensor:
        loss, ctx.gradients = run(weights)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a tiled loss are used up by one backward")
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(None if d is None else d.mul_(d_loss) for d in gradients)


def _exact(call: Call, portions: Sequence[_Portion], states_on_host: bool) -> list[Tensor]:
    """The losses of all portions, each with its backward run, from the last to the first."""
    befores = _states_before(call, portions, states_on_host)
    losses, d_after = [], None
    for portion, following in reversed(list(_with_next(portions))):
        before = _leaf_state(befores.pop(), portion.tokens_BL.device)
        loss, _ = _forward_and_backward(call, portion, before, following, d_after)
        losses.append(loss)
        d_after = [x.grad for x in _statistics(before)] if before else None
    return losses


def _states_before(call: Call, portions: Sequence[_Portion], on_host: bool) -> list[LMState | None]:
    states: list[LMState | None] = [None]
    state = None
    for portion, following in list(_with_next(portions))[:-1]:
        state = _read(call, portion, state, following, with_labels=False).state
        states.append(_mapped(state, Tensor.cpu) if state and on_host else state)
    return states


def _truncated(call: Call, portions: Sequence[_Portion]) -> list[Tensor]:
    """The losses of all portions, each with its backward run as far as its own first token."""
    losses, state = [], None
    for portion, following in _with_next(portions):
        loss, state = _forward_and_backward(call, portion, state, following, None)
        losses.append(loss)
    return losses


def _forward_and_backward(
    call: Call,
    portion: _Portion,
    before: LMState | None,
    following: _Portion | None,
    d_after: list[Tensor | None] | None,
) -> tuple[Tensor, LMState | None]:
    """The loss and the state after it, both without a graph; `d_after` is the gradient of that state."""
    with torch.enable_grad():
        output = _read(call, portion, before, following)
    assert output.loss is not None
    roots, gradients = [output.loss], [torch.ones_like(output.loss)]
    if d_after is not None and output.state is not None:
        for statistic, d in zip(_statistics(output.state), d_after, strict=True):
            if d is not None:  # None: keys and values that no later token of this rank sees
                roots.append(statistic)
                gradients.append(d)
    torch.autograd.backward(roots, gradients)
    return output.loss.detach(), output.state and _mapped(output.state, Tensor.detach)


def _add_up(sums: dict[str, Tensor], name: str, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if name in sums:
        sums[name] += gradient
    else:
        sums[name] = gradient.to(statistics_dtype(gradient))


def _with_next(portions: Sequence[_Portion]) -> Iterator[tuple[_Portion, _Portion | None]]:
    return zip(portions, [*portions[1:], None], strict=True)


def _mapped(state: LMState, change: Callable[[Tensor], Tensor]) -> LMState:
    return LMState(tuple(type(layer)(*map(change, layer)) for layer in state.layers), state.positions)


def _leaf_state(state: LMState | None, device: torch.device) -> LMState | None:
    """With statistics that gather gradients, on the device."""
    if state is None:
        return None
    return _mapped(state, lambda x: x.to(device).detach().requires_grad_(x.is_floating_point()))


def _statistics(state: LMState) -> list[Tensor]:
    """What of a state has a gradient."""
    return [x for layer in state.layers for x in layer if x.is_floating_point()]


def _no_logits() -> Tensor:
    raise RuntimeError("training tile by tile keeps no logits; a model that reads whole rows has them")
