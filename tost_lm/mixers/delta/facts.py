"""Facts of delta layers: see `tost_lm.mixers.facts`.

Symbols: h key heads of K channels, H value heads of V channels, E = 2·h·K + H·V convolved channels.

Operations one token at a time, in a value head: the decay K·V, what the state returns for the key 2·K·V, the update
2·K·V and the output 2·K·V; the backward has twice as many. The convolution has 2·4 − 1 for a channel, 4·4 − 1 backward.
Smaller terms are not counted. Chunks execute more, as products of matrices.

Autograd stores, in bytes per token: the convolution's input and output e·E each, and that of SiLU e·E; queries and
keys of length 1, 4·2·h·K, and 8·h for their lengths; the values e·H·V and what the state lacks of them 4·H·V; gates
and strengths e·H·(V + 2) and 16·H; a state 4·H·K·V for each group of chunks. The norm, its scale, the gate and the
input of the output projection take 5·e·H·V and 4·H.

A state is 8·H·K·V + 3·e·E bytes: a matrix for each value head in float64, and the convolution's last 3 tokens. Sequence
ranks gather the maps of their tokens, 4·H·K·(K + 2·V) bytes a row.
"""

from typing import TYPE_CHECKING

from tost_lm.mixers.delta.settings import CHUNK_TOKENS, CONV_TAPS, GROUP_CHUNKS, DeltaSettings, Sizes
from tost_lm.mixers.facts import NO_FLOPS, NOT_GATHERED, Flops, GatheredTokens, Load, MixerFacts, OwnNumbers

if TYPE_CHECKING:
    from tost_lm.model.config import ModelConfig


class DeltaFacts(MixerFacts):
    letter = "D"
    folder = "delta"
    name = "gated delta rule"
    tag = "gated-delta-rule"
    settings = DeltaSettings

    def description(self, model: "ModelConfig") -> str:
        return "gated delta rule, linear in time"

    def problem(self, model: "ModelConfig") -> str | None:
        sizes = Sizes.of(model)
        if sizes.value_heads % sizes.key_heads == 0:
            return None
        return (
            f"model.delta.value_heads {sizes.value_heads} is not a multiple of the {sizes.key_heads} key heads; change "
            "it or model.delta.key_heads"
        )

    def has_position_parameters(self, model: "ModelConfig") -> bool:
        return False

    def is_rotary(self, model: "ModelConfig") -> bool:
        return False

    def obstacle_to_tiles(self, model: "ModelConfig") -> str | None:
        return None

    def obstacle_to_tensor_ranks(self, model: "ModelConfig", ranks: int) -> str | None:
        heads = Sizes.of(model).key_heads
        if heads % ranks == 0:
            return None
        return f"the {heads} key heads of delta layers are not divisible by parallel.tensor {ranks}; choose a divisor"

    def channels_in(self, model: "ModelConfig") -> int:
        """Queries, keys and values, gates of the outputs, write strengths and decays."""
        sizes = Sizes.of(model)
        return sizes.convolved + sizes.value_heads * (sizes.value_size + 2)

    def channels_out(self, model: "ModelConfig") -> int:
        sizes = Sizes.of(model)
        return sizes.value_heads * sizes.value_size

    def own_numbers(self, model: "ModelConfig") -> OwnNumbers:
        """The convolution; two rates for each value head; the scales of the norm, which all heads share."""
        sizes = Sizes.of(model)
        return OwnNumbers(sizes.convolved * CONV_TAPS, 2 * sizes.value_heads, sizes.value_size, 1)

    def attention_flops(self, model: "ModelConfig", tokens: int) -> Flops:
        return NO_FLOPS

    def operator_flops(self, model: "ModelConfig") -> Flops:
        sizes = Sizes.of(model)
        state, convolved = sizes.value_heads * sizes.key_size * sizes.value_size, sizes.convolved
        return Flops(7 * state + (2 * CONV_TAPS - 1) * convolved, 14 * state + (4 * CONV_TAPS - 1) * convolved)

    def launches(self) -> int:
        """Assumed: as in an S layer."""
        return 110

    def stored_bytes(self, load: Load) -> float:
        sizes, e = Sizes.of(load.model), load.element_bytes
        keys, values, heads = 2 * sizes.key_heads * sizes.key_size, self.channels_out(load.model), sizes.value_heads
        state = 4 * heads * sizes.key_size * sizes.value_size / min(CHUNK_TOKENS * GROUP_CHUNKS, load.tokens_here)
        maps = state if load.sequence > 1 else 0.0
        convolved = 3 * e * sizes.convolved + 4 * keys + 8 * sizes.key_heads
        return convolved + (6 * e + 4) * values + e * (values + 2 * heads) + 20 * heads + state + maps

    def received_bytes(self, load: Load) -> float:
        if load.sequence == 1:
            return 0.0
        return load.sequence * self.exchanged_bytes(load) / load.tokens_here / load.tensor

    def state_bytes(self, load: Load) -> float:
        sizes = Sizes.of(load.model)
        memory = 8 * sizes.value_heads * sizes.key_size * sizes.value_size
        return memory + load.element_bytes * sizes.convolved * (CONV_TAPS - 1)

    def exchanged_bytes(self, load: Load) -> float:
        sizes = Sizes.of(load.model)
        return 4 * sizes.value_heads * sizes.key_size * (sizes.key_size + 2 * sizes.value_size)

    def gathered_tokens(self, load: Load, tokens: int) -> GatheredTokens:
        return NOT_GATHERED

    def head_softmax_bytes(self, load: Load) -> float:
        return 0.0

    def kernel_bytes(self, load: Load, forwards: float) -> float:
        """Each stored tensor is written and read forward; the backward reads it, and writes and reads its gradient."""
        return (2 * forwards + 3) * self.stored_bytes(load)


DELTA = DeltaFacts()
