"""What a plugin's layer takes, counted: it runs on tensors without values, as on a CPU, forward and backward.

Counted are parameters, operations of torch's dispatcher, the products of matrices among them, what autograd stores, and
what a sequence rank sends. A layer that runs more operations for more tokens, as a loop over chunks does, is counted
for few tokens, and grows linearly from there.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.flop_counter import flop_registry

from tost_lm.mixers.registry import mixer_class
from tost_lm.mixers.shape import MixerShape
from tost_lm.mixers.spec import NO_FLOPS, Costs, Flops, Load, MixerSpec, Numbers, gathered_tokens
from tost_lm.mixers.state import leaves
from tost_lm.ops.layout import Dealt, SequenceSplit
from tost_lm.ops.positions import SequenceInfo
from tost_lm.sizes import rank_groups
from tost_lm.torch_internals import FakeFloats
from tost_lm.user_files import explained_errors

LENGTHS = 128, 256
"""Tokens of two traces, which show whether there are more operations for more tokens."""
LOOPS = 1.5
"""There are, if the second trace has so many times the operations of the first."""
F = TypeVar("F", bound=Callable[..., Any])
DTYPES = {2: torch.bfloat16, 4: torch.float32}


def is_launched(operation: Any) -> bool:
    """Whether an operation of the dispatcher launches something: all but views and allocations."""
    name = operation.name()
    return not (operation.is_view or "empty" in name or name in ("aten::_unsafe_view", "prim::device"))


class _Counter(FakeFloats):
    launches = 0
    flops = 0
    """Of products of matrices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.launches += is_launched(func)
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


class _CountingShard:
    """A `tost_lm.ops.layout.SequenceShard` of a rank without the others: it counts what it would send."""

    def __init__(self, split: SequenceSplit, gathers: bool):
        ranks = len(split.lengths)
        self.split, self.gathers = split, gathers
        self.groups = (range(ranks),) if gathers else rank_groups(ranks)
        self.exchanged = self.exchanges = self.grouped = self.dealt = self.gathered_channels = 0

    def exchange_rows(self, row: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        self.exchanged += row.nbytes
        self.exchanges += 1
        rows_R = torch.stack([row] * len(self.split.lengths))
        return function(rows_R)[self.split.rank].clone()

    def gather_group(self, x: Tensor) -> Tensor:
        self.exchanges += 1
        self.exchanged += x.nbytes if self.gathers else 0
        self.grouped += 0 if self.gathers else x.nbytes
        return torch.stack([x] * len(next(group for group in self.groups if self.split.rank in group)))

    def gather_groups(self, x: Tensor) -> Tensor:
        return torch.stack([x] * len(self.groups))

    def gather(self, x_BHTD: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        self.gathered_channels += x_BHTD.shape[1] * x_BHTD.shape[3]
        return torch.cat([x_BHTD[:, :, :1].expand(-1, -1, n, -1) for n in lengths or self.split.lengths], 2)

    def deal(self, parts: Sequence[Dealt], *xs_BHTD: Tensor) -> tuple[Tensor, ...]:
        return tuple(starmap(self._received, zip(parts, xs_BHTD, strict=True)))

    def _received(self, part: Dealt, x_BHTD: Tensor) -> Tensor:
        lengths, here = self.split.lengths, self.split.rank
        sent = sum(
            heads * tokens for heads, tokens in (part.shape(lengths, rank, here) for rank in range(len(lengths)))
        )
        self.dealt += sent * x_BHTD[:, 0, 0].nbytes
        heads, tokens = part.shape((sum(lengths),), here, 0)
        return x_BHTD[:, :1, :1].expand(-1, heads, tokens, -1)

    def collect(self, part: Dealt, y_BhtD: Tensor, heads: int) -> Tensor:
        self.dealt += y_BhtD.nbytes
        return y_BhtD[:, :1, :1].expand(-1, heads, self.split.lengths[self.split.rank], -1)


def _once(function: F) -> F:
    """Cached by the layer's class and the text of its shape: settings may not be hashable."""
    known: dict[Any, Any] = {}

    def call(spec: MixerSpec, shape: MixerShape, *arguments: Any) -> Any:
        key = mixer_class(spec.letter), repr(shape), arguments
        if key not in known:
            known[key] = function(spec, shape, *arguments)
        return known[key]

    return call  # pyright: ignore[reportReturnType]


@_once
def numbers(spec: MixerSpec, shape: MixerShape) -> Numbers:
    """Implements `MixerSpec.numbers`."""
    with torch.device("meta"):
        layer = mixer_class(spec.letter)(shape)
    own = [(name, p) for name, p in layer.named_parameters() if not name.startswith(("in_proj.", "out_proj."))]
    return Numbers(
        channels_in=layer.in_proj.weight.shape[0],
        channels_out=layer.out_proj.weight.shape[1],
        split=tuple(tuple(p.shape) for name, p in own if name in layer.OF_HEADS),
        replicated=tuple(tuple(p.shape) for name, p in own if name not in layer.OF_HEADS),
    )


def flops(spec: MixerSpec, shape: MixerShape, tokens: int) -> tuple[Flops, Flops]:
    """Implements `MixerSpec.flops`: all products of matrices between the projections. Other arithmetic, far less, is
    not counted."""
    counts, projections = _counts(spec, shape, tokens, torch.float32, 1, True), 2 * spec.weights(shape)
    return Flops(counts["forward"] / tokens - projections, counts["backward"] / tokens - 2 * projections), NO_FLOPS


def costs(spec: MixerSpec, load: Load) -> Costs:
    """Implements `MixerSpec.costs`."""
    tokens = -(-load.tile_tokens // load.sequence)
    counts = _counts(spec, load.shape, tokens, DTYPES[load.element_bytes], load.sequence, load.gathers)
    gathered = load.sequence * gathered_tokens(spec.kept_tokens(load.shape), tokens) / tokens
    gathered *= counts["gathered channels"] * load.element_bytes / load.tensor
    dealt = counts["dealt"] / tokens
    return Costs(
        launches=counts["launches"],
        stored=counts["stored"] / tokens,
        state=counts["state"],
        received=load.received(counts["sent forward"], counts["grouped forward"]) + gathered + dealt / load.tensor,
        exchanged=(counts["sent forward"], counts["sent backward"]),
        exchanges=int(counts["exchanges"]),
        grouped=(counts["grouped forward"], counts["grouped backward"]),
        summed=counts["sent with a state"] - counts["sent forward"],
        dealt=dealt,
        gathered_channels=int(counts["gathered channels"]),
    )


def _counts(
    spec: MixerSpec, shape: MixerShape, tokens: int, dtype: torch.dtype, ranks: int, gathers: bool
) -> dict[str, float]:
    """The counts of a row, of which this rank has so many tokens. Raises ConfigError if the layer cannot be traced."""
    file = Path(sys.modules[mixer_class(spec.letter).__module__].__file__ or "")
    what = f"plugin {file}: counted on tensors without values (unless its spec states flops and costs)"
    with explained_errors(file, what):
        few, more = (_traced(spec, shape, min(tokens, length), dtype, ranks, gathers) for length in LENGTHS)
        if more["launches"] < LOOPS * few["launches"]:
            return _traced(spec, shape, tokens, dtype, ranks, gathers)
    times = max(0, tokens - LENGTHS[1]) / (LENGTHS[1] - LENGTHS[0])
    return {name: count + times * (count - few[name]) for name, count in more.items()}


@_once
def _traced(
    spec: MixerSpec, shape: MixerShape, tokens: int, dtype: torch.dtype, ranks: int, gathers: bool
) -> dict[str, float]:
    shard = _CountingShard(SequenceSplit((tokens,) * ranks, ranks // 2), gathers)
    with _Counter() as counter:
        layer = mixer_class(spec.letter)(shape)
        parameters = {name: p.detach().to(dtype).requires_grad_() for name, p in layer.named_parameters()}
        x_BTC = torch.zeros(1, tokens, shape.width, dtype=dtype, requires_grad=True)
        token_BT = torch.zeros(1, tokens, dtype=torch.int64)
        info = SequenceInfo.of(token_BT, None, None, shard if ranks > 1 else None, "last")
        info = info.with_rotary(spec.rotary(shape), dtype)
        with torch.no_grad():
            _, state = functional_call(layer, parameters, (x_BTC, None, info))  # and fills caches of offsets
        with_state, shard.exchanged, shard.grouped, shard.dealt, shard.gathered_channels = shard.exchanged, 0, 0, 0, 0
        shard.exchanges = counter.launches = counter.flops = 0
        others = {x.untyped_storage() for x in (x_BTC, *parameters.values(), *(info.rotary or ()))}
        stored: set[torch.UntypedStorage] = set()

        def store(x: Tensor) -> Tensor:
            stored.add(x.untyped_storage())
            return x

        with saved_tensors_hooks(store, lambda x: x):
            y_BTC, _ = functional_call(layer, parameters, (x_BTC, None, replace(info, output_state=False)))
        flops, exchanged, exchanges, grouped = counter.flops, shard.exchanged, shard.exchanges, shard.grouped
        y_BTC.backward(torch.ones_like(y_BTC))
    return {
        "launches": counter.launches,
        "forward": flops,
        "backward": counter.flops - flops,
        "stored": sum(x.nbytes() for x in stored - others),
        "state": sum(x.nbytes for x in leaves(state)),
        "sent forward": exchanged,
        "sent backward": shard.exchanged - exchanged,
        "sent with a state": with_state,
        "exchanges": exchanges,
        "grouped forward": grouped,
        "grouped backward": shard.grouped - grouped,
        "dealt": shard.dealt,
        "gathered channels": shard.gathered_channels,
    }
