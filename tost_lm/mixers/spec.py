"""The spec of a token mixer: what the rest of the package asks about it. A mixer whose spec lacks something without a
usual value cannot be imported.

A spec needs no torch: settings, the resource plan and `--help` read them. Symbols: C channels, H heads, B sequences,
T tokens, e bytes of an element.
"""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape
from tost_lm.ops.rotary import Rotary
from tost_lm.sizes import ALL_GATHER_RANKS, rows_of_groups


class Flops(NamedTuple):
    """Operations per token."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


NO_FLOPS = Flops(0, 0)
PRODUCTS = 6
"""Products of matrices of two linear layers, forward and backward: those of a mixer, or of an MLP."""
BLOCK_LAUNCHES = 32
"""Operations of a block around its mixer: norms, LayerScale, MLP and sums."""
COMPILED_BLOCK_LAUNCHES = 16 + PRODUCTS
"""The same under torch.compile, which makes few kernels of all but the products."""


class OwnNumbers(NamedTuple):
    """Numbers of a layer's parameters beside its two projections."""

    decayed: int
    """Matrices, with weight decay; tensor ranks split them."""
    vectors: int
    """Without weight decay; tensor ranks split them."""
    replicated: int
    """Scales of norms, whole on every tensor rank."""
    replicated_tensors: int
    """Their number of tensors."""


class Load(NamedTuple):
    """A micro-batch of a rank in training."""

    shape: MixerShape
    """The shape of the mixer that is asked."""
    element_bytes: int
    """2 in bfloat16, 4 in float32."""
    on_cpu: bool
    tokens: float
    """Tokens on a sequence rank."""
    row_tokens: int
    """Tokens of a whole row."""
    tile_tokens: int
    """Tokens of a row that are processed at once."""
    sequence: int
    """Sequence ranks."""
    tensor: int
    """Tensor ranks."""
    exchanged_rows: int
    """Rows of statistics that a rank receives in an exchange, its own included."""

    @property
    def tokens_here(self) -> float:
        """Tokens of a tile on a sequence rank."""
        return self.tile_tokens / self.sequence


class GatheredTokens(NamedTuple):
    """The tokens that sequence ranks receive of each other."""

    tokens: float
    """The number of those on each rank."""
    channels: int


NOT_GATHERED = GatheredTokens(0.0, 0)


class Plugin(NamedTuple):
    """The code of a mixer that is not in this package."""

    layer: Any
    """The class that `tost_lm.mixers.registry.mixer_class` returns."""
    text: bytes
    """The text of its file."""
    sha256: str


class MixerSpec(ABC):
    """Everything that is known of a mixer without its code."""

    letter: str
    """In `model.pattern`."""
    folder: str
    """Below tost_lm/mixers, and the name of its section; its `layer.py` has the class `MIXER`. A plugin has none."""
    name: str
    """In messages."""
    tag: str
    """On the hub, in model cards."""
    settings: type[Section]
    """Only of a plugin: its settings in `model.plugin_settings`."""
    plugin: Plugin | None = None
    """Set by `tost_lm.mixers.plugins.register`."""
    extends_context: tuple[str, ...] = ()
    """Its settings that may change when a trained model continues at a longer context."""
    kernel_bandwidth: float = 1.0
    """Fraction of a copy's bandwidth at which `kernel_bytes` are read and written."""

    @property
    def section(self) -> str:
        """The path of its settings in [model]."""
        return f"plugin_settings.{self.letter}" if self.plugin else self.folder

    def layers(self, letters: str) -> int:
        """The number of layers with this mixer in a model with these `ModelConfig.letters`."""
        return letters.count(self.letter)

    def weights(self, shape: MixerShape) -> int:
        """Numbers of the two projections."""
        return shape.width * (self.channels_in(shape) + self.channels_out(shape))

    @abstractmethod
    def description(self, shape: MixerShape) -> str:
        """The mixer of this model, in words."""

    def splits_width(self, shape: MixerShape) -> bool:
        """Whether a head has model.width / model.heads channels."""
        return True

    def problem(self, shape: MixerShape) -> str | None:
        """Settings of a model with this mixer that do not fit each other; None: they do."""
        return None

    def has_position_parameters(self, shape: MixerShape) -> bool:
        """Whether parameters have the size `model.max_positions`."""
        return False

    def rotary(self, shape: MixerShape) -> Rotary | None:
        """The rotary embedding whose angles the layer reads; None: it reads none."""
        return None

    @abstractmethod
    def kept_tokens(self, shape: MixerShape) -> int | None:
        """Tokens whose keys and values are in a state, at most; None: all."""

    def obstacle_to_tensor_ranks(self, shape: MixerShape, ranks: int) -> str | None:
        """Why so many ranks cannot split the layer, apart from `model.heads`; None: they can."""
        return None

    def obstacle_to_determinism(self) -> str | None:
        """Why training on a GPU may round differently each time, whatever torch is asked for; None: it does not."""
        return None

    @abstractmethod
    def channels_in(self, shape: MixerShape) -> int:
        """Channels that the first projection computes."""

    @abstractmethod
    def channels_out(self, shape: MixerShape) -> int:
        """Channels that the last projection reads."""

    @abstractmethod
    def own_numbers(self, shape: MixerShape) -> OwnNumbers:
        """Parameters beside the projections."""

    def attention_flops(self, shape: MixerShape, tokens: int) -> Flops:
        """Products between tokens of a document of `tokens` tokens."""
        return NO_FLOPS

    @abstractmethod
    def operator_flops(self, shape: MixerShape) -> Flops:
        """The arithmetic between the projections that is no such product."""

    @abstractmethod
    def launches(self) -> int:
        """Operations of a block for a tile of a micro-batch, forward and backward, as `benchmarks.launches` counts, and
        `tost plugin` for a plugin."""

    def compiled_launches(self) -> int:
        """The same under torch.compile, at most: a graph may also join operations of the mixer around its operators."""
        return self.launches() - BLOCK_LAUNCHES + COMPILED_BLOCK_LAUNCHES

    @abstractmethod
    def stored_bytes(self, load: Load) -> float:
        """Bytes per token that autograd stores between the projections, the input of the last one included, for all
        tensor ranks together."""

    @abstractmethod
    def received_bytes(self, load: Load) -> float:
        """Bytes per token of a rank that recomputation keeps because other ranks sent them."""

    @abstractmethod
    def state_bytes(self, load: Load) -> float:
        """Bytes of the state of a row between tiles, or if it grows (`kept_tokens` is None) of what a tile adds, for
        all tensor ranks together."""

    @abstractmethod
    def exchanged_bytes(self, load: Load, *, backward: bool) -> float:
        """Bytes of a row's statistics that a sequence rank sends in the two exchanges of a forward or a backward, for
        all tensor ranks together."""

    def grouped_bytes(self, load: Load, *, backward: bool) -> float:
        """Bytes of a row that sequence ranks gather in groups and between groups instead, each in an exchange, for all
        tensor ranks together."""
        return 0.0

    def summed_bytes(self, load: Load) -> float:
        """Bytes of a row's state after a tile, or of its gradient, that sequence ranks add up in another exchange, for
        all tensor ranks together."""
        return 0.0

    def gathered_tokens(self, load: Load, tokens: int) -> GatheredTokens:
        """Channels of tokens that sequence ranks receive of a tile of `tokens` tokens."""
        return NOT_GATHERED

    def head_softmax_bytes(self, load: Load) -> float:
        """Bytes that tensor ranks exchange in a forward and a backward for a softmax over all heads."""
        return 0.0

    def kernel_bytes(self, load: Load, forwards: float) -> float:
        """Bytes per token that are read and written between the projections, in `forwards` forwards and a backward,
        apart from `attention_flops`.

        Usually each stored tensor is written and read forward, and read backward with its gradient written and read.
        """
        return (2 * forwards + 3) * self.stored_bytes(load)


class RecurrentSpec(MixerSpec):
    """Spec of a mixer with a state of constant size, which sequence ranks exchange."""

    def kept_tokens(self, shape: MixerShape) -> int | None:
        return 0

    def received_bytes(self, load: Load) -> float:
        if load.sequence == 1:
            return 0.0
        received = load.exchanged_rows * self.exchanged_bytes(load, backward=False)
        received += rows_of_groups(load.sequence) * self.grouped_bytes(load, backward=False)
        return received / load.tokens_here / load.tensor

    def exchanged_bytes(self, load: Load, *, backward: bool) -> float:
        return self.state_bytes(load)


class AffineSpec(RecurrentSpec):
    """Spec of a mixer whose tokens map its state affinely, by `tost_lm.ops.affine`; its states are float64."""

    @abstractmethod
    def map_bytes(self, load: Load) -> tuple[float, float]:
        """Bytes of A and of C of a row, in float32, for all tensor ranks together. C has the shape of a state."""

    def state_bytes(self, load: Load) -> float:
        return self.summed_bytes(load)

    def exchanged_bytes(self, load: Load, *, backward: bool) -> float:
        return self._maps_bytes(load, backward) if load.sequence <= ALL_GATHER_RANKS else 0.0

    def grouped_bytes(self, load: Load, *, backward: bool) -> float:
        return self._maps_bytes(load, backward) if load.sequence > ALL_GATHER_RANKS else 0.0

    def _maps_bytes(self, load: Load, backward: bool) -> float:
        """The map of the tokens, or the gradient of a state."""
        factor, added = self.map_bytes(load)
        return added if backward else factor + added

    def summed_bytes(self, load: Load) -> float:
        return 2 * self.map_bytes(load)[1]
