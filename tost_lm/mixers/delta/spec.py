"""Spec of delta layers: see `tost_lm.mixers.spec`.

Symbols: h key heads of K channels, H value heads of V channels, E = 2·h·K + H·V convolved channels.

Operations one token at a time, in a value head: the decay K·V, what the state returns for the key 2·K·V, the update
2·K·V and the output 2·K·V; the backward has twice as many. The convolution has 2·4 − 1 for a channel, 4·4 − 1 backward.
Smaller terms are not counted. Chunks execute more, as products of matrices.

Autograd stores, in bytes per token: the convolution's input, with 3 tokens before each row, and on a GPU its output,
e·E each; queries and keys before they are normalized 8·h·K, in float32 the output of the convolution; normalized 8·h·K;
what the state lacks of the values 4·H·V; the output's norm 4·H·V and e·H·V each for input, scale, gate (not for that of
a sigmoid), product and the input of the output projection; 12·H for write strengths, 12·H for decays or 12·H·K for
those of channels, 16·h for lengths; a state 4·H·K·V for each group of chunks. With several sequence ranks, the maps of
their tokens store 4·H·(K + V) and a state 4·H·K·(K + V) for each group; on a GPU also (e + 1)·h·K + H·(K + V + 10) for
inputs without those that are not finite, and which ones these are.

PyTorch computes these maps, also where kernels compute the rest, on a GPU those of pieces of a row at once: a forward
launches 8 operations for each chunk of a piece, 34 for each group of chunks, 3 to join a piece to those before it and
16 to set pieces side by side, a backward 11, up to 94, here 88, and 3.

A state is 8·H·K·V + 3·e·E bytes: a matrix for each value head in float64, and the convolution's last 3 tokens. Sequence
ranks gather the maps of both, 4·H·K·(K + V) and e·(3·E + 9) bytes a row, and 4·H·K·V and 3·e·E in the backward; more
than `ALL_GATHER_RANKS` do so in groups, and between groups. Between tiles they add up the states and their gradients.
"""

import math

from tost_lm.mixers.delta.settings import (
    CHUNK_TOKENS,
    CONV_TAPS,
    DEVICE_GROUP_ELEMENTS,
    GROUP_CHUNKS,
    GROUP_ELEMENTS,
    DeltaShape,
    DeltaSizes,
    pieces_of_maps,
)
from tost_lm.mixers.spec import NO_FLOPS, Costs, Flops, Load, Numbers, RecurrentSpec


class DeltaSpec(RecurrentSpec):
    letter = "D"
    folder = "delta"
    name = "gated delta rule"
    tag = "gated-delta-rule"
    obstacle_to_determinism = "the kernels of delta layers are chosen by their measured time"
    kernel_bandwidth = 0.57  # a compiled step on an H200, corrected for other kernels since (test_planned_times.py)

    def description(self, shape: DeltaShape) -> str:
        return "gated delta rule, linear in time"

    def splits_width(self, shape: DeltaShape) -> bool:
        return shape.own.qk_size is None

    def problem(self, shape: DeltaShape) -> str | None:
        sizes = DeltaSizes.of(shape)
        if shape.own.decay_per_channel and sizes.value_heads != sizes.key_heads:
            return (
                "model.delta.decay_per_channel needs as many value heads as key heads, here "
                f"{sizes.value_heads} and {sizes.key_heads}; remove model.delta.value_heads"
            )
        if sizes.value_heads % sizes.key_heads == 0:
            return None
        return (
            f"model.delta.value_heads {sizes.value_heads} is not a multiple of the {sizes.key_heads} key heads; change "
            "it or model.delta.qk_heads"
        )

    def obstacle_to_tensor_ranks(self, shape: DeltaShape, ranks: int) -> str | None:
        heads = DeltaSizes.of(shape).key_heads
        if heads % ranks == 0:
            return None
        return f"the {heads} key heads of delta layers are not divisible by parallel.tensor {ranks}; choose a divisor"

    def numbers(self, shape: DeltaShape) -> Numbers:
        """Into queries, keys and values, gates of the outputs, write strengths and decays. Beside the projections: the
        convolution; a rate and its steps for each value head; the scales of the norm, which all heads share."""
        sizes, decays = DeltaSizes.of(shape), _decays(shape)
        return Numbers(
            sizes.convolved + sizes.value_heads * (sizes.value_size + 1 + decays),
            sizes.value_heads * sizes.value_size,
            split=((sizes.convolved, CONV_TAPS), (sizes.value_heads,), (sizes.value_heads * decays,)),
            replicated=((sizes.value_size,),),
        )

    def flops(self, shape: DeltaShape, tokens: int) -> tuple[Flops, Flops]:
        sizes = DeltaSizes.of(shape)
        state, convolved = sizes.value_heads * sizes.key_size * sizes.value_size, sizes.convolved
        return NO_FLOPS, Flops(
            7 * state + (2 * CONV_TAPS - 1) * convolved, 14 * state + (4 * CONV_TAPS - 1) * convolved
        )

    def costs(self, load: Load) -> Costs:
        _, H, K, V = sizes = DeltaSizes.of(load.shape)
        factor, added = 4 * H * K * K, 4 * H * K * V  # of the map of a row's tokens, in float32
        taps = load.element_bytes * sizes.convolved * (CONV_TAPS - 1)
        shifts = load.tensor * load.element_bytes * (CONV_TAPS - 1) ** 2
        maps, none = (factor + added + shifts + taps, added + taps), (0.0, 0.0)  # of the tokens; gradients of states
        exchanged, grouped = (maps, none) if load.gathers else (none, maps)
        return Costs(
            launches=145,  # with a decay for each channel 16 more
            launches_of_maps=_launches_of_maps(sizes, load),
            stored=_stored_bytes(sizes, load),
            state=2 * added + taps,
            received=load.received(exchanged[0], grouped[0]),
            exchanged=exchanged,
            grouped=grouped,
            summed=2 * added + taps,
        )


def _launches_of_maps(sizes: DeltaSizes, load: Load) -> tuple[float, float]:
    if load.sequence == 1:
        return 0.0, 0.0
    pieces = _pieces(sizes, load)
    of_piece = math.ceil(load.tokens_here / pieces / CHUNK_TOKENS) * CHUNK_TOKENS
    chunks, groups = (math.ceil(of_piece / size) for size in (CHUNK_TOKENS, _group_tokens(sizes, load, pieces)))
    joined = 3 * (pieces - 1)
    return 8 * chunks + 34 * groups + joined + 16 * (pieces > 1), 11 * chunks + 88 * groups + joined


def _rows(load: Load) -> int:
    return max(1, int(load.tokens * load.sequence / load.row_tokens))


def _pieces(sizes: DeltaSizes, load: Load) -> int:
    """Of a row, whose maps are computed at once."""
    heads = sizes.value_heads // load.tensor
    return 1 if load.on_cpu else pieces_of_maps(math.ceil(load.tokens_here), _rows(load), heads)


def _group_tokens(sizes: DeltaSizes, load: Load, pieces: int = 1) -> int:
    """Tokens of a document, or of a piece of one, whose chunks are computed at once."""
    elements = GROUP_ELEMENTS if load.on_cpu else DEVICE_GROUP_ELEMENTS
    heads = sizes.value_heads / load.tensor
    return CHUNK_TOKENS * int(max(GROUP_CHUNKS, elements // (heads * CHUNK_TOKENS**2) // (_rows(load) * pieces)))


def _stored_bytes(sizes: DeltaSizes, load: Load) -> float:
    (h, H, K, V), e = sizes, load.element_bytes
    states, maps = 4 * H * K * V / min(_group_tokens(sizes, load), load.tokens_here), 0.0
    if load.sequence > 1:
        group_tokens = min(_group_tokens(sizes, load, _pieces(sizes, load)), load.tokens_here)
        maps = 4 * H * (K + V) + 4 * H * K * (K + V) / group_tokens
        maps += 0 if load.on_cpu else (e + 1) * h * K + H * (K + V + 10)
    weights = 4 * CONV_TAPS / load.tokens_here
    convolved = sizes.convolved * (e * (2 - load.on_cpu + (CONV_TAPS - 1) / load.tokens_here) + weights)
    keys = (8 + (8 if load.on_cpu else 2 * e)) * h * K
    gated = 5 - load.shape.own.decay_per_channel
    return convolved + keys + (8 + gated * e) * H * V + 12 * H * (1 + _decays(load.shape)) + 16 * h + states + maps


def _decays(shape: DeltaShape) -> int:
    """Of a value head."""
    return DeltaSizes.of(shape).key_size if shape.own.decay_per_channel else 1


DELTA = DeltaSpec()
