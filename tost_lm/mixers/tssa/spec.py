"""Spec of TSSA layers: see `tost_lm.mixers.spec`.

Operations for each token and layer, for any length (`chunked.py`; signs and comparisons are not counted):

    forward                                          C    H         backward                            C    H
    w²                                               1              dy·a                                2
    S1, running sum                                  1              dy·w·a                              1
    Σ_d w²/S1                                        2   −1         q = dy·w·Π·a²/N′                    2
    z: times temp                                         1         R2, running sum                     1
       plus bias, times D                                (2)        RN: Σ_d q·S2/N′, running sum        2    1
    Π, softmax over heads                                 4 − 1/H   dΠ = Σ_d (R2·w² − dy·w·a) + RN      3
    Π·w²                                             1              dz = Π·(dΠ − Σ_h Π·dΠ)                   4 − 1/H
    S2, running sum                                  1              d temp, summed over tokens               2
    N, running sum; N′                                    2         u = temp·dz                              1
    y = −Π·N′·w / (S2 + N′)                          3    1         r = −u·w²/S1²                       2
                                                                    −u/S1 − r; R1, running sum          2
                                                                    dw = −Π·dy·a + 2w·(Π·R2 + … + R1)   7
                                                                    d bias, summed over rows, times D       (2)
                                                     9    7         22   8

The sum is 9·C + 7·H − 1 forward and 22·C + 8·H − 1 backward, plus 2·H in parentheses with a bias. For
tost-base this is less than 0.1 % of the products.

Autograd stores w, e·C bytes per token, the memberships Π, 4·H, the sums before each chunk, 4·(2C + H) per chunk, and
the input of the output projection, e·C (in both cases for all tensor ranks together). Recomputation keeps the log-sums
of other tensor ranks, 4 bytes a rank. A state, and what sequence ranks exchange, is 2C + H numbers in float32. Tensor
ranks exchange one number per token for the softmax over all heads, and three in its backward.
"""

from tost_lm.mixers.spec import NO_FLOPS, Costs, Flops, Load, Numbers, RecurrentSpec
from tost_lm.mixers.tssa.settings import TssaShape
from tost_lm.sizes import CPU_CHUNK_ELEMENTS, TRITON_CHUNK_TOKENS


class TssaSpec(RecurrentSpec):
    letter = "T"
    folder = "tssa"
    name = "TSSA"
    tag = "token-statistics-self-attention"
    kernel_bandwidth = 0.6  # on an H200, between 131,072 and 1,048,576 tokens

    def description(self, shape: TssaShape) -> str:
        return "token statistics (TSSA), linear in time"

    def has_position_parameters(self, shape: TssaShape) -> bool:
        return shape.own.denom_bias == "position"

    def numbers(self, shape: TssaShape) -> Numbers:
        """Beside the projections temp and denom_bias."""
        heads = shape.heads
        biases = {"position": ((heads, shape.max_positions),), "head": ((heads,),), "none": ()}
        return Numbers(shape.width, shape.width, split=((heads,), *biases[shape.own.denom_bias]))

    def flops(self, shape: TssaShape, tokens: int) -> tuple[Flops, Flops]:
        C, H = shape.width, shape.heads
        extra = 0 if shape.own.denom_bias == "none" else 2 * H
        return NO_FLOPS, Flops(9 * C + 7 * H - 1 + extra, 22 * C + 8 * H - 1 + extra)

    def costs(self, load: Load) -> Costs:
        e, C, H = load.element_bytes, load.shape.width, load.shape.heads
        state = 4 * (2 * C + H)
        on_cpu = min(load.tokens_here, max(32, CPU_CHUNK_ELEMENTS // C))
        chunk = on_cpu if load.on_cpu else TRITON_CHUNK_TOKENS
        return Costs(
            launches=33,
            stored=2 * e * C + 4 * H + state / chunk,
            state=state,
            moved=(4 * e * C + C + 8 * H, 7 * e * C + 1.75 * C + 20 * H),
            received=4.0 * load.tensor if load.tensor > 1 else 0.0,
            exchanged=(state, state),
            head_softmax=16 * load.tokens,
        )


TSSA = TssaSpec()
