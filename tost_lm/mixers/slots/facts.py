"""Facts of slot memory layers: see `tost_lm.mixers.facts`.

Operations one token at a time, for each head with S slots of V channels and a convolution of K taps:

    forward                                S·V   S           backward                               S·V   S
    convolution of the key                       2·K − 1     dr: Σ_v dy·M/N′                        2     0
    w, r: times temp, softmax                    10     −2   −dr·r/N′; RN, running sum                    3
    M = ρ·M + w·u                          3                 RM = ρ·RM + r/N′·dy                    3
    N = ρ·N + w; N′                              3           du = Σ_s w·RM                          2          −V
    r/N′                                         1           dw = Σ_v u·RM + RN                     2     0
    y = Σ_s r/N′·M                         2            −V   d log ρ, summed over tokens            2     2
                                                             softmaxes, d temp, times temp                14   −2
                                                             dx and d weight of the convolution           4·K − 1
                                           5   13 + 2·K      11  18 + 4·K

The sum is H·(5·S·V + (13 + 2·K)·S − V − 2) forward and H·(11·S·V + (18 + 4·K)·S − V − 2) backward. The products
of chunks execute more.

Autograd stores, in bytes per token and slot: the convolution's input e, its output 4 and memberships 8. Per token and
value channel: what was read 4, and e each for norm, scale, gate and the output projection's input. Values and, in
float32, read scores keep the memory of the input projection's output, 2·e·H·(S + V); in bfloat16 the scores' copy takes
4·H·S. On a GPU there are also a copy of the values, e·H·V, and M and N before each chunk of 64 tokens in float32,
4·H·S·(V + 1); on a CPU, M and N in float64 for each row and for every 2¹⁸/(32·H) tokens. With several sequence ranks
they are stored twice. The norm stores 4·H.

A state is 8·H·S·(V + 1) + 3·e·H·S bytes: M and N in float64, and the convolution's last 3 keys. Sequence ranks send it
forward and its gradient backward. Recomputation keeps up to 16 of them for each row.
"""

from tost_lm.mixers.facts import BLOCK_LAUNCHES, Flops, Load, OwnNumbers, RecurrentFacts
from tost_lm.mixers.slots.settings import CONV_TAPS, SlotsShape
from tost_lm.sizes import SLOT_CHUNK_TOKENS, SLOT_GROUP_ELEMENTS, TRITON_SLOT_CHUNK_TOKENS


class SlotsFacts(RecurrentFacts):
    letter = "S"
    folder = "slots"
    name = "slot memory"
    tag = "slot-memory"
    kernel_bandwidth = 0.31  # on an H200, between 131,072 and 1,048,576 tokens; norm and gate at that of a copy

    def description(self, shape: SlotsShape) -> str:
        return "slot memory, linear in time"

    def channels_in(self, shape: SlotsShape) -> int:
        """Two keys and two values."""
        return 2 * shape.heads * (shape.own.per_head + shape.own.value_size)

    def channels_out(self, shape: SlotsShape) -> int:
        return shape.heads * shape.own.value_size

    def own_numbers(self, shape: SlotsShape) -> OwnNumbers:
        """The convolution and the norm; two temperatures and a decay for each head."""
        H = shape.heads
        return OwnNumbers(H * (shape.own.per_head * CONV_TAPS + shape.own.value_size), 3 * H, 0, 0)

    def operator_flops(self, shape: SlotsShape) -> Flops:
        H, S, V = shape.heads, shape.own.per_head, shape.own.value_size
        forward = H * (5 * S * V + (13 + 2 * CONV_TAPS) * S - V - 2)
        return Flops(forward, H * (11 * S * V + (18 + 4 * CONV_TAPS) * S - V - 2))

    def launches(self) -> int:
        return 81 + BLOCK_LAUNCHES

    def stored_bytes(self, load: Load) -> float:
        shape, e = load.shape, load.element_bytes
        slots, values = shape.heads * shape.own.per_head, shape.heads * shape.own.value_size
        projected = 2 * e * (slots + values) + (4 * slots if e == 2 else 0)
        state = slots * (shape.own.value_size + 1)
        states = (2 if load.sequence > 1 else 1) * state
        if load.on_cpu:
            at_once = SLOT_CHUNK_TOKENS * max(1, SLOT_GROUP_ELEMENTS // (shape.heads * SLOT_CHUNK_TOKENS**2))
            in_operator = 8 * (states / min(at_once, load.tokens) + state / load.tokens_here)
        else:
            in_operator = e * values + 4 * states / min(TRITON_SLOT_CHUNK_TOKENS, load.tokens_here)
        return (12 + e) * slots + (4 + 4 * e) * values + projected + in_operator + 4 * shape.heads

    def state_bytes(self, load: Load) -> float:
        of_slot = 8 * (load.shape.own.value_size + 1) + load.element_bytes * (CONV_TAPS - 1)
        return load.shape.heads * load.shape.own.per_head * of_slot


SLOTS = SlotsFacts()
