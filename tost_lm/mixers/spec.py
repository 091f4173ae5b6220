"""The spec of a token mixer: what the rest of the package asks about it.

Parameters, operations and bytes of a plugin are counted (`tost_lm.mixers.counted`). The specs of this package state
them: settings and plans read these without torch, also for kernels that no CPU runs. Symbols: C channels, H heads, B
sequences, T tokens, e bytes of an element.
"""

from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, NamedTuple

from tost_lm.config import Section
from tost_lm.mixers.shape import MixerShape
from tost_lm.ops.rotary import Rotary
from tost_lm.sizes import rows_of_groups


class Flops(NamedTuple):
    """Operations per token."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


NO_FLOPS = Flops(0, 0)


class Numbers(NamedTuple):
    """Numbers of a layer's parameters."""

    channels_in: int
    """Channels that the first projection computes."""
    channels_out: int
    """Channels that the last projection reads."""
    split: tuple[tuple[int, ...], ...] = ()
    """Shapes of other parameters whose first dimension tensor ranks split."""
    replicated: tuple[tuple[int, ...], ...] = ()
    """Shapes of those that are whole on every tensor rank, as scales of norms."""


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
    gathers: bool
    """Whether sequence ranks exchange statistics in all-gathers; else in all-to-alls."""

    @property
    def tokens_here(self) -> float:
        """Tokens of a tile on a sequence rank."""
        return self.tile_tokens / self.sequence

    @property
    def exchanged_rows(self) -> int:
        """Rows of statistics that a rank receives in an exchange, its own included."""
        # Of all ranks; in all-to-alls a rank's columns of all, the sums before it, and with tiles those over all ranks.
        return self.sequence if self.gathers else 2 + (self.tile_tokens < self.row_tokens)

    def received(self, exchanged: float, grouped: float) -> float:
        """Bytes per token that a rank receives, if each sends so many bytes of a row, also in groups."""
        if self.sequence == 1:
            return 0.0
        rows = self.exchanged_rows * exchanged + rows_of_groups(self.sequence) * grouped
        return rows / self.tokens_here / self.tensor


class Costs(NamedTuple):
    """What a layer takes for a micro-batch of a rank. Bytes are for all tensor ranks together."""

    launches: float
    """Operations for a tile, forward and backward, as `benchmarks.launches` counts them."""
    stored: float
    """Bytes per token that autograd stores between the projections, the input of the last one included."""
    state: float
    """Bytes of the state of a row between tiles, or if it grows (`kept_tokens` is None) of what a tile adds."""
    moved: tuple[float, float] | None = None
    """Bytes per token that are read and written between the projections in a forward, and in a backward, apart from
    products between tokens. None: each stored tensor is written and read forward, and read backward with its gradient
    written and read."""
    attention_head: float = 128.0
    """Channels of a head in its products between tokens."""
    received: float = 0.0
    """Bytes per token of a rank that recomputation keeps because other ranks sent them."""
    exchanged: tuple[float, float] = (0.0, 0.0)
    """Bytes of a row's statistics that a sequence rank sends in all exchanges of a forward, and of a backward."""
    exchanges: int = 2
    """Exchanges of such statistics in a forward, and in a backward."""
    grouped: tuple[float, float] = (0.0, 0.0)
    """Bytes of a row that sequence ranks gather in groups, and as many between groups, in a forward and a backward."""
    summed: float = 0.0
    """Bytes of a row's state after a tile, or of its gradient, that sequence ranks add up in another exchange."""
    dealt: float = 0.0
    """Bytes per token that a sequence rank sends in exchanges of tokens for heads, in a forward and in a backward."""
    gathered_channels: int = 0
    """Channels of the `gathered_tokens` that sequence ranks receive of each other."""
    launches_of_maps: tuple[float, float] = (0.0, 0.0)
    """Operations beside `launches` in a forward, also of recomputation, and in a backward, that grow with the tokens of
    a tile: those of the maps that sequence ranks exchange."""
    head_softmax: float = 0.0
    """Bytes that tensor ranks exchange in a forward and a backward for a softmax over all heads."""


def gathered_tokens(kept: int | None, here: float) -> float:
    """Tokens of which each sequence rank sends keys and values, of `here` tokens; `kept` as `MixerSpec.kept_tokens`."""
    return here if kept is None else min(here, max(1, kept - 1))


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
    obstacle_to_determinism: str | None = None
    """Why training on a GPU may round differently each time, whatever torch is asked for; None: it does not."""
    kernel_bandwidth: float = 1.0
    """Fraction of a copy's bandwidth at which `Costs.moved` is read and written."""

    @property
    def section(self) -> str:
        """The path of its settings in [model]."""
        return f"plugin_settings.{self.letter}" if self.plugin else self.folder

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

    def numbers(self, shape: MixerShape) -> Numbers:
        """Numbers of its parameters, without biases of the projections."""
        return _counted().numbers(self, shape)

    def weights(self, shape: MixerShape) -> int:
        """Numbers of the two projections."""
        numbers = self.numbers(shape)
        return shape.width * (numbers.channels_in + numbers.channels_out)

    def flops(self, shape: MixerShape, tokens: int) -> tuple[Flops, Flops]:
        """Products between tokens of a document of `tokens` tokens, and other arithmetic between the projections."""
        return _counted().flops(self, shape, tokens)

    def costs(self, load: Load) -> Costs:
        """What the layer takes for a micro-batch."""
        return _counted().costs(self, load)


class RecurrentSpec(MixerSpec):
    """Spec of a mixer with a state of constant size."""

    def kept_tokens(self, shape: MixerShape) -> int | None:
        return 0


def _counted() -> Any:
    return import_module("tost_lm.mixers.counted")  # imports torch
