"""Spec of softmax attention layers: see `tost_lm.mixers.spec`.

C channels are those of the queries of all heads. Products: 4·C·p forward for a token that attends to p tokens (q·k and
Π·v), and twice that backward. Over a document of T tokens, p is (T + 1)/2 on average; with a window W < T, it is
W − W·(W − 1)/(2T).

Autograd stores q, k and v, in units of e·C bytes per token: 3. With rotary embedding 5, because v keeps the memory of
all three, and without a window on one sequence rank 6: the kernel's output and a copy of it. The input of the output
projection adds 1, and `model.softmax.gate` 3: its input beside v, the gate and the product. With
`model.softmax.kv_heads`, k and v are narrower. With `model.softmax.qk_norm` it stores q and k before and after the
norm, and 4 bytes for each of their heads, or for all heads of each. With several sequence ranks and a window of w
tokens it stores k and v of the last w − 1 of each rank, and of its own. Attention also stores 4·H.

With `model.softmax.conv` it also stores the input of the convolution, with 3 tokens before each row, which are part of
the state, but not the gate's. Sequence ranks gather the map of these tokens, as in delta layers.

A state has the keys and values of a window; without one, each tile adds those of its tokens to the states after it.
Without a window, sequence ranks exchange tokens for heads and back: queries, keys and values, of which several ranks
may have copies, and outputs. A rank stores what it received, and the output of its heads. With a window, they gather
keys and values of the last w − 1 tokens of each rank. Recomputation keeps what was received.
"""

from tost_lm.mixers.softmax.settings import CONV_TAPS, SoftmaxShape, SoftmaxSizes, head_groups
from tost_lm.mixers.spec import NO_FLOPS, Costs, Flops, Load, MixerSpec, Numbers, gathered_tokens
from tost_lm.ops.rotary import LLAMA3_LENGTH, Rotary


class SoftmaxSpec(MixerSpec):
    letter = "A"
    folder = "softmax"
    name = "softmax attention"
    tag = "softmax-attention"
    extends_context = ("rope_theta", "rope_scaling", "rope_scaling_factor", "rope_original_length")
    kernel_bandwidth = 0.4  # flash attention with 1,024 tokens on an H200, beside what its FLOPs take

    def description(self, shape: SoftmaxShape) -> str:
        window, rotary = shape.own.window, self.rotary(shape)
        text = "softmax attention" + (f" over {window:,} tokens" if window else "")
        if rotary and rotary.factor != 1:
            text += f" with a rotary embedding scaled by {rotary.factor:g} ({rotary.scaling})"
        return text

    def splits_width(self, shape: SoftmaxShape) -> bool:
        return shape.own.head_size is None

    def problem(self, shape: SoftmaxShape) -> str | None:
        kv_heads = shape.own.kv_heads
        if kv_heads and shape.heads % kv_heads:
            return (
                f"model.heads {shape.heads} is not a multiple of model.softmax.kv_heads {kv_heads}; change one of them"
            )
        rotary = self.rotary(shape)
        if rotary and (rotary.channels % 2 or not rotary.channels):
            return (
                f"model.softmax: a rotary embedding rotates pairs of channels, not {rotary.channels} of a head; change "
                "model.width, model.heads, softmax.head_size or rotary_fraction, or set softmax.rope_theta=0"
            )
        if rotary and rotary.scaling == "yarn" and not shape.own.rope_original_length:
            return "model.softmax.rope_scaling yarn needs softmax.rope_original_length; set it to the trained context"
        if rotary and rotary.scaling == "yarn" and rotary.theta <= 1:
            return f"model.softmax.rope_theta {rotary.theta}: softmax.rope_scaling yarn needs a base above 1; raise it"
        return None

    def rotary(self, shape: SoftmaxShape) -> Rotary | None:
        own = shape.own
        if not own.rope_theta:
            return None
        rotated = int(SoftmaxSizes.of(shape).head * own.rotary_fraction)
        length = own.rope_original_length or LLAMA3_LENGTH
        return Rotary(rotated, own.rope_theta, own.rope_scaling, own.rope_scaling_factor, length)

    def kept_tokens(self, shape: SoftmaxShape) -> int | None:
        return shape.own.window or None

    def obstacle_to_tensor_ranks(self, shape: SoftmaxShape, ranks: int) -> str | None:
        kv_heads = shape.own.kv_heads or shape.heads
        if ranks > 1 and shape.own.qk_norm == "all-heads":
            return "tensor ranks cannot split softmax.qk_norm all-heads; set parallel.tensor=1 and use sequence ranks"
        if kv_heads % ranks:
            return (
                f"model.softmax.kv_heads {kv_heads} is not divisible by parallel.tensor {ranks}; choose a divisor of it"
            )
        return None

    def numbers(self, shape: SoftmaxShape) -> Numbers:
        """Beside the projections the convolution, and the scales of the norms of queries and keys."""
        sizes = SoftmaxSizes.of(shape)
        if not shape.own.qk_norm:
            return Numbers(sizes.projected, sizes.queries, _split(shape))
        scales = (sizes.queries, sizes.keys) if shape.own.qk_norm == "all-heads" else (sizes.head, sizes.head)
        return Numbers(sizes.projected, sizes.queries, _split(shape), tuple((size,) for size in scales))

    def flops(self, shape: SoftmaxShape, tokens: int) -> tuple[Flops, Flops]:
        window = min(shape.own.window or tokens, tokens)
        forward = 4 * SoftmaxSizes.of(shape).queries * (window - window * (window - 1) / (2 * tokens))
        return Flops(forward, 2 * forward), NO_FLOPS

    def costs(self, load: Load) -> Costs:
        sizes, e, window, copies = SoftmaxSizes.of(load.shape), load.element_bytes, load.shape.own.window, _copies(load)
        # Gathered tokens for each of a rank's own.
        gathered = load.sequence * gathered_tokens(window, load.tokens_here) / load.tokens_here if window else 0.0
        dealt = e * (2 * sizes.queries + 2 * copies * sizes.keys) if copies else 0.0
        kept = window - 1 if window else (copies or 1) * load.tokens_here
        found = Costs(
            launches=31,
            attention_head=sizes.head,
            stored=_stored_bytes(sizes, load, copies or gathered),
            state=2 * e * sizes.keys * kept,
            received=(dealt + (2 * e * sizes.keys * gathered if load.sequence > 1 else 0.0)) / load.tensor,
            dealt=dealt,
            gathered_channels=2 * sizes.keys if window else 0,
        )
        return _with_convolution(found, sizes, load) if load.shape.own.conv else found


def _split(shape: SoftmaxShape) -> tuple[tuple[int, ...], ...]:
    """The shape of the convolution."""
    return ((SoftmaxSizes.of(shape).keys, CONV_TAPS),) if shape.own.conv else ()


def _with_convolution(costs: Costs, sizes: SoftmaxSizes, load: Load) -> Costs:
    taps = load.element_bytes * sizes.keys * (CONV_TAPS - 1)
    shift = load.tensor * load.element_bytes * (CONV_TAPS - 1) ** 2
    maps, none = (shift + taps, taps), (0.0, 0.0)  # of the tokens; gradients of states
    exchanged, grouped = (maps, none) if load.gathers else (none, maps)
    return costs._replace(
        launches=costs.launches + 8,
        stored=costs.stored + load.element_bytes * sizes.keys + taps / load.tokens_here,
        state=costs.state + taps,
        received=costs.received + load.received(exchanged[0], grouped[0]),
        exchanged=exchanged,
        exchanges=1,
        grouped=grouped,
        summed=taps,
    )


def _copies(load: Load) -> float:
    """Sequence ranks that have the same keys and values, where they exchange tokens for heads; 0: they do not."""
    kv_heads = (load.shape.own.kv_heads or load.shape.heads) // load.tensor
    groups = head_groups(load.shape.heads // load.tensor, kv_heads, load.sequence)
    if load.shape.own.window or load.sequence == 1:
        return 0.0
    return load.sequence * max(1, kv_heads // groups) / kv_heads


def _stored_bytes(sizes: SoftmaxSizes, load: Load, relative: float) -> float:
    shape, e, (_, C, kv, gate) = load.shape, load.element_bytes, sizes
    read, beside = C + kv, 0 if shape.own.conv else gate  # queries and keys; the gate in the memory of the values
    changed = shape.own.rope_theta or shape.own.qk_norm
    if _copies(load):
        # Queries and output of the rank's heads, which it received and will send.
        attention = 2 * C + 2 * relative * kv + (C + 2 * kv + beside if shape.own.qk_norm else 0)
    elif load.sequence > 1:
        kept = C + 2 * kv + beside if shape.own.qk_norm or not shape.own.rope_theta else 0
        attention = (C if changed else 0) + kept + 2 * (relative + 1) * kv  # keys and values, and a copy
    else:
        # Without a window, the kernel stores its output in the order of q's memory, the projection a copy of it.
        attention = C + 2 * kv + beside + (read if changed else 0) + (C if changed and not shape.own.window else 0)
    norms = 2 if shape.own.qk_norm == "all-heads" else read * shape.heads / C
    normed = 4 * norms + _norm_bytes(load) * read if shape.own.qk_norm else 0
    return e * (C + attention + 2 * gate) + 4 * shape.heads + normed


def _norm_bytes(load: Load) -> int:
    """Bytes per channel of queries and keys that their norm stores beside its input, which the values keep anyway: on a
    CPU the input in float32, and normalized; with a factor near 1 what it multiplies, everywhere."""
    copied = 4 if load.on_cpu and load.element_bytes < 4 else 0
    if load.shape.zero_centered:
        return copied + load.element_bytes
    return copied + 4 if load.on_cpu else 0


SOFTMAX = SoftmaxSpec()
