"""The image classifier of arXiv 2412.17810 as released: convolutions, Fourier positions, TSSA blocks, class attention.

Shapes: B images, T patches, C channels (width), H heads, D channels a head.
"""

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from experiments.vision.settings import VisionConfig
from tost_lm.errors import ConfigError
from tost_lm.mixers.softmax.attention import attend_one
from tost_lm.mixers.softmax.layer import SoftmaxMixer
from tost_lm.mixers.tssa.layer import TssaMixer
from tost_lm.mixers.tssa.statistics import TssaState
from tost_lm.model.block import Block, LayerNorm, LayerScale
from tost_lm.model.config import ModelConfig
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import MASS_FLOOR, statistics_dtype

CLASS_BLOCKS = 2
NORM_EPSILON = 1e-6
INITIAL_STD = 0.02
FOURIER_FEATURES = 32
"""Number for each coordinate of a patch."""
FOURIER_BASE = 10000.0
NORM_FLOOR = 1e-12
"""Lower bound of the norm of a channel over the tokens of an image."""


class PatchConvolutions(nn.Module):
    """Convolutions of 3 × 3 pixels and stride 2, each with batch norm and, between them, GELU. Channels double."""

    def __init__(self, count: int, width: int):
        super().__init__()
        channels = [3, *(width >> i for i in reversed(range(count)))]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False) for before, after in pairwise(channels)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in channels[1:])

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, 3, height, width] → features [B, C, rows, columns], the sides divided and rounded up."""
        x = images
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            x = norm(convolution(gelu(x) if number else x))
        return x


class FourierPositions(nn.Linear):
    """A linear function of sines and cosines of the row and the column of a patch, relative to the image."""

    def __init__(self, width: int):
        super().__init__(2 * FOURIER_FEATURES, width)

    def forward(self, rows: int, columns: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The embedding [T, C] of `rows` × `columns` patches, row by row."""
        arange = partial(torch.arange, dtype=torch.float64, device=self.weight.device)
        periods_F = FOURIER_BASE ** (arange(FOURIER_FEATURES) // 2 * 2 / FOURIER_FEATURES)
        features = []
        for count in (rows, columns):
            angles_NF = 2 * math.pi * arange(1, count + 1)[:, None] / (count + 1e-6) / periods_F
            features.append(torch.stack([angles_NF[:, ::2].sin(), angles_NF[:, 1::2].cos()], -1).flatten(1))
        y_TF, x_TF = features[0].repeat_interleave(columns, 0), features[1].repeat(rows, 1)
        return super().forward(torch.cat([y_TF, x_TF], 1).to(self.weight.dtype))


class StochasticDepth(LayerScale):
    """LayerScale of a branch that training drops for some images (arXiv 1603.09382)."""

    def __init__(self, width: int, initial: float, rate: float):
        super().__init__(width, initial)
        self.rate = rate

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = super().forward(x_BTC)
        if not self.training or not self.rate:
            return x_BTC
        kept = 1 - self.rate
        return x_BTC * (x_BTC.new_empty(len(x_BTC), 1, 1).bernoulli_(kept) / kept)


def bidirectional_scores(w_sq_BTHD: Tensor, temp_H: Tensor) -> Tensor:
    """Scores z = temp · Σ_d w²/S1 of the bidirectional form, [B, T, H]; S1 is the sum over all tokens."""
    energy_B1HD = w_sq_BTHD.sum(1, keepdim=True).clamp_min(NORM_FLOOR**2)
    return temp_H * (w_sq_BTHD / energy_B1HD).sum(-1)


def tssa(w_BTHD: Tensor, temp_H: Tensor) -> Tensor:
    """Bidirectional TSSA, the operator of the paper, of B documents: y [B, T, H, D]."""
    dtype = statistics_dtype(w_BTHD)
    w_sq_BTHD = w_BTHD.to(dtype).square()
    pi_BTH1 = bidirectional_scores(w_sq_BTHD, temp_H.to(dtype)).softmax(-1)[..., None]
    second_moment_B1HD = (pi_BTH1 * w_sq_BTHD).sum(1, keepdim=True) / (pi_BTH1.sum(1, keepdim=True) + MASS_FLOOR)
    return (-pi_BTH1 * w_BTHD.to(dtype) / (1 + second_moment_B1HD)).to(w_BTHD.dtype)


class BidirectionalTssa(TssaMixer):
    """Bidirectional TSSA (arXiv 2412.17810)."""

    def forward(self, x_BTC: Tensor, state: TssaState | None, info: SequenceInfo) -> tuple[Tensor, None]:
        w_BTHD = self.in_proj(x_BTC).unflatten(-1, (self.heads, -1))
        with torch.autocast(x_BTC.device.type, enabled=False):
            y_BTHD = tssa(w_BTHD, self.temp)  # an image has few tokens
        return self.out_proj(y_BTHD.flatten(-2)), None


class ClassAttention(SoftmaxMixer):
    """Softmax attention of the first token, the class token, to all tokens."""

    def forward(self, x_BTC: Tensor, state: Any, info: SequenceInfo) -> tuple[Tensor, None]:
        """The class token's output, [B, 1, C]."""
        q_BHTD, k_BHTD, v_BHTD = self.heads_of(self.in_proj(x_BTC), info)
        y_BH1D = attend_one(q_BHTD[:, :, :1], k_BHTD, v_BHTD, None)
        return self.out_proj(y_BH1D.transpose(1, 2).flatten(-2)), None


class ClassAttentionBlock(Block):
    """Class attention and an MLP of the class token (arXiv 2103.17239, with `tokens_norm`).

    As released, the patches change as well: both residual streams contain the normalized tokens.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config, ClassAttention(config.shape_of("A")))

    def compute(self, x_BTC: Tensor, state: None, info: SequenceInfo) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normed_BTC = self.mixer_norm(x_BTC)
        class_B1C, _ = self.mixer(normed_BTC, None, info)
        x_BTC = self.mlp_norm(x_BTC + self.mixer_scale(torch.cat([class_B1C, normed_BTC[:, 1:]], 1)))
        class_B1C = self.mlp_scale(self.mlp(x_BTC[:, :1]))
        return x_BTC + torch.cat([class_B1C, x_BTC[:, 1:]], 1), None


class TostVision(nn.Module):
    """The released image classifier. Initialization as released: N(0, 0.02) for linear layers and the class token,
    torch's defaults for convolutions and positions, temp 1, LayerScale as configured, biases 0.

    Draws come from torch's default generator. Under `torch.device("meta")` nothing is drawn.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        blocks = config.blocks
        self.config = config
        self.embedding = PatchConvolutions(config.convolutions, config.width)
        self.positions = FourierPositions(config.width)
        self.blocks = nn.ModuleList(
            Block(blocks, BidirectionalTssa(blocks.shape_of("T"))) for _ in range(config.layers)
        )
        for block in self.blocks:
            block.mixer_scale, block.mlp_scale = (
                StochasticDepth(config.width, config.layer_scale, config.drop_path) for _ in range(2)
            )
        self.class_token = nn.Parameter(torch.empty(config.width))
        self.class_blocks = nn.ModuleList(ClassAttentionBlock(blocks) for _ in range(CLASS_BLOCKS))
        self.norm = LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        self.class_token.normal_(std=INITIAL_STD)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = NORM_EPSILON
            elif isinstance(module, nn.Linear) and module is not self.positions:
                # The released draws are cut at 100 standard deviations, which none reaches.
                module.weight.normal_(std=INITIAL_STD)
                module.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, 3, height, width] of any size, normalized as in training.

        Raises:
            ConfigError: these are no colour images.
        """
        if images.dim() != 4 or images.shape[1] != 3:
            raise ConfigError(f"images must be [B, 3, height, width], got {list(images.shape)}; convert them to RGB")
        features = self.embedding(images)
        x_BTC = features.flatten(2).mT
        x_BTC = x_BTC.to(statistics_dtype(x_BTC)) + self.positions(*features.shape[2:])  # see tost_lm.model.block
        info = SequenceInfo.of(x_BTC[..., 0], None, None, output_state=False)
        for block in self.blocks:
            x_BTC, _ = block(x_BTC, None, info)
        x_BTC = torch.cat([self.class_token.expand(len(x_BTC), 1, -1).to(x_BTC.dtype), x_BTC], 1)
        for block in self.class_blocks:
            x_BTC, _ = block(x_BTC, None, info)
        return self.head(self.norm(x_BTC[:, 0]))
