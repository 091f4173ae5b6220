"""The encoder: embedding of ids or image patches, positions, blocks of bidirectional mixers, and a classification head.

A token of a bidirectional mixer reads its whole document. These mixers have no state: it is None.

Shapes: B rows, T tokens, C channels (width), H heads, D channels per head, K taps of a convolution, N documents (N = B
unless packed).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from tost_lm.errors import ConfigError
from tost_lm.extra.encoder.settings import EncoderConfig
from tost_lm.mixers.registry import bidirectional_class
from tost_lm.model.block import Block, build_norm
from tost_lm.model.config import ModelConfig
from tost_lm.ops.initialization import INITIAL_STD, InitialValue, draw_seed, initialize, set_own_constants
from tost_lm.ops.layout import int64_tensor
from tost_lm.ops.positions import SequenceInfo, reverse, sinusoidal
from tost_lm.ops.precision import statistics_dtype
from tost_lm.ops.short_conv import short_conv

CONV_TAPS = 4
"""Tokens that a convolution reads in each direction, itself included."""


class NoMixer(nn.Module):
    """A layer of each token alone, W₂·silu(W₁·x): the control of `BidirectionalConvolution`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.in_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.out_proj = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor, state: None, info: SequenceInfo) -> tuple[Tensor, None]:
        return self.out_proj(silu(self.mix(self.in_proj(x_BTC), info))), None

    def mix(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
        return x_BTC


class BidirectionalConvolution(NoMixer):
    """W₂·silu(conv(W₁·x)): a token reads itself and K − 1 tokens on each side, channel by channel. The convolution
    begins with what a token reads of itself."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        shape = config.heads, config.width // config.heads, CONV_TAPS
        self.from_start, self.from_end = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        set_own_constants(self)

    def initial_values(self) -> dict[str, InitialValue]:
        taps = torch.zeros(self.from_start.shape, device="cpu")
        taps[..., -1] = 0.5
        return {"from_start": taps, "from_end": taps}

    def mix(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
        y_BTC, _ = short_conv(x_BTC, self.from_start.flatten(0, 1), local=info.local)
        backwards_BTC, _ = short_conv(reverse(x_BTC, info), self.from_end.flatten(0, 1), local=info.local)
        return y_BTC + reverse(backwards_BTC, info)


def mixer_of(letter: str) -> Callable[[ModelConfig], nn.Module]:
    """The layer of a letter of `model.pattern`."""
    return {"C": BidirectionalConvolution, "N": NoMixer}.get(letter) or bidirectional_class(letter)


class PatchEmbedding(nn.Linear):
    """A linear function of the pixels of each square patch (arXiv 2010.11929)."""

    def __init__(self, channels: int, patch_size: int, width: int):
        super().__init__(channels * patch_size**2, width)
        self.patch_size = patch_size

    def forward(self, input: Tensor) -> Tensor:
        """Images [B, channels, height, width] → tokens [B, T, C], row by row of patches.

        Raises:
            ConfigError: patches do not fit the images.
        """
        P = self.patch_size
        if input.dim() != 4 or input.shape[2] % P or input.shape[3] % P:
            raise ConfigError(
                f"images must be [B, channels, height, width] with sides that are multiples of model.patch_size {P}, "
                f"got {list(input.shape)}; resize them, or change model.patch_size"
            )
        patches = input.unflatten(3, (-1, P)).unflatten(2, (-1, P))  # [B, channels, rows, P, columns, P]
        return super().forward(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))


class ClassificationHead(nn.Module):
    """Features of documents to logits. With two towers, of pairs of documents: [x, y, x·y, x − y] → C, GELU, linear."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.pair = nn.Linear(4 * config.width, config.width) if config.towers == 2 else None
        self.linear = nn.Linear(config.width, config.classes)

    def forward(self, features_NC: Tensor) -> Tensor:
        if self.pair is not None:
            x, y = features_NC.unflatten(0, (-1, 2)).unbind(1)
            features_NC = gelu(self.pair(torch.cat([x, y, x * y, x - y], -1)))
        return self.linear(features_NC)


class Encoder(nn.Module):
    """A bidirectional encoder. Initialization as that of `TostLM`: N(0, 0.02), but N(0, 0.02/√(2·layers)) for the
    output projections of mixer and MLP, temp 1, LayerScale as configured, biases 0.

    The seed of the draws comes from torch's CPU generator. Under `torch.device("meta")` nothing is drawn.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        device, width, blocks = torch.get_default_device(), config.width, config.blocks
        self.config = config
        with torch.device("meta"):
            if config.vocab_size:
                self.embedding = nn.Embedding(config.vocab_size, width)
            else:
                self.embedding = PatchEmbedding(config.image_channels, config.patch_size or 1, width)
            self.positions = nn.Embedding(config.max_positions, width) if config.positions == "learned" else None
            self.class_token = nn.Embedding(1, width) if config.pooling == "class_token" else None
            self.blocks = nn.ModuleList(Block(blocks, mixer_of(letter)(blocks)) for letter in config.letters)
            self.norm = build_norm(blocks)
            self.head = ClassificationHead(config)
        self.split_tokens(lambda x_BTC: x_BTC, lambda x_BTC: x_BTC)
        if device.type != "meta":
            initialize(self.to_empty(device=device), config.layers, draw_seed())

    def split_tokens(self, shard: Callable[[Tensor], Tensor], gather: Callable[[Tensor], Tensor]) -> None:
        """Set the map of the residual stream to this tensor rank's tokens of it, and its inverse."""
        self._shard_tokens, self._gather_tokens = shard, gather

    def forward(self, inputs: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Logits of each document [N, classes]; with two towers, of documents 2n and 2n + 1 together [N/2, classes].

        Args:
            inputs: ids [B, T], int64, or images [B, channels, height, width], floating point.
            cu_seqlens: int32 [N + 1], offsets of N documents of ids packed into one row (B == 1). They do not influence
                each other. None: each row is a document. Serve padded batches by packing them, as in `TostLM.forward`.

        Raises:
            ConfigError: a document is longer than the learned positions, or images do not fit the patches.
            ValueError: cu_seqlens does not fit the ids, or documents are no pairs for two towers.
        """
        x_BTC, info = self.encode(inputs, cu_seqlens)
        if len(info.local.lengths) % self.config.towers:
            raise ValueError(f"2 towers read pairs of documents, got {len(info.local.lengths)}; give an even number")
        return self.head(self._pool(x_BTC, info))

    def encode(self, inputs: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, SequenceInfo]:
        """The normed features of the tokens [B, T, C] and their documents, with the class tokens if there are some.

        Arguments and errors are those of `forward`; documents need not be pairs.
        """
        x_BTC = self.embedding(inputs)
        x_BTC = x_BTC.to(statistics_dtype(x_BTC))  # see tost_lm.model.block
        info = _info(x_BTC, cu_seqlens)
        x_BTC = x_BTC + self._positions(x_BTC, info)
        if self.class_token is not None:
            x_BTC, info = self._with_class_tokens(x_BTC, info)
        x_BTC = self._shard_tokens(x_BTC)
        for block in self.blocks:
            x_BTC, _ = block(x_BTC, None, info)
        return self._gather_tokens(self.norm(x_BTC)), info

    def _positions(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor | float:
        if self.positions is not None:
            if (longest := max(info.local.lengths)) > self.config.max_positions:
                raise ConfigError(
                    f"{longest} tokens are more than the model's positions (model.max_positions = "
                    f"{self.config.max_positions}); shorten the document"
                )
            return self.positions(info.position)
        if self.config.positions == "sinusoidal":
            # Scaled to the initial size of learned positions, to be no larger than the token embeddings.
            return INITIAL_STD * sinusoidal(info.position, x_BTC.shape[-1], x_BTC.dtype)
        return 0.0

    def _with_class_tokens(self, x_BTC: Tensor, info: SequenceInfo) -> tuple[Tensor, SequenceInfo]:
        """The stream with the class token before the tokens of each document."""
        assert self.class_token is not None
        token_B1C = self.class_token.weight.expand(len(x_BTC), 1, -1).to(x_BTC.dtype)
        if (cu_seqlens := info.cu_seqlens) is None:
            x_BTC = torch.cat([token_B1C, x_BTC], 1)
        else:
            documents = x_BTC.split(info.local.lengths, 1)
            x_BTC = torch.cat([x for document in documents for x in (token_B1C, document)], 1)
            cu_seqlens = cu_seqlens + torch.arange(len(cu_seqlens))
        return x_BTC, _info(x_BTC, cu_seqlens)

    def _pool(self, x_BTC: Tensor, info: SequenceInfo) -> Tensor:
        """The features of each document, [N, C]."""
        if self.class_token is not None:
            return x_BTC.flatten(0, 1)[int64_tensor(info.local.offsets[:-1], x_BTC.device)]
        if info.cu_seqlens is None:
            return x_BTC.mean(1)
        return torch.stack([document_TC.mean(0) for document_TC in x_BTC[0].split(info.local.lengths)])


def _info(x_BTC: Tensor, cu_seqlens: Tensor | None) -> SequenceInfo:
    return SequenceInfo.of(x_BTC[..., 0], None, cu_seqlens, output_state=False)
