"""The language model: embedding, learned positions, blocks, norm, head tied to the embedding."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tost_lm.errors import ConfigError
from tost_lm.model.block import Block, MixerState
from tost_lm.model.config import ModelConfig

IGNORED_LABEL = -100


class LMState(NamedTuple):
    """What the model keeps of the tokens so far: one mixer state a layer, and how many tokens there were."""

    layers: tuple[MixerState, ...]
    position: int


class LMOutput(NamedTuple):
    """`loss`: mean nats per labelled token (None without labels); `logits` [B, T, V]; `state` after the last token."""

    loss: Tensor | None
    logits: Tensor
    state: LMState


class TostLM(nn.Module):
    """A decoder-only language model, weights drawn as published: N(0, 0.02), N(0, 0.02/√(2·layers)) for the two
    projections that end a block's branches, temp 1, denom_bias 0, LayerScale as configured."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.apply(_init_linear_and_embedding)
        for name, module in self.named_modules():
            if name.endswith(".out_proj") and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * config.layers))

    def forward(self, tokens_BT: Tensor, labels: Tensor | None = None, state: LMState | None = None) -> LMOutput:
        """Read tokens, going on from `state` if given.

        Args:
            tokens_BT: ids, int64.
            labels: [B, T], the token that follows each position (so tokens shifted by one); −100 is not counted.
            state: of an earlier call on the tokens before these.

        Raises:
            ConfigError: the tokens pass the model's learned positions.
        """
        position = state.position if state else 0
        T = tokens_BT.shape[1]
        if position + T > self.config.max_positions:
            raise ConfigError(
                f"{position + T} tokens are more than the model has positions (model.max_positions = "
                f"{self.config.max_positions}): shorten the text or train with more positions"
            )
        places_T = torch.arange(position, position + T, device=tokens_BT.device)
        x_BTC = self.embedding(tokens_BT) + self.positions(places_T)
        states: list[MixerState] = []
        for i, block in enumerate(self.blocks):
            x_BTC, mixer_state = block(x_BTC, state.layers[i] if state else None, position)
            states.append(mixer_state)
        logits_BTV = linear(self.norm(x_BTC), self.embedding.weight)
        loss = None if labels is None else next_token_loss(logits_BTV, labels)
        return LMOutput(loss, logits_BTV, LMState(tuple(states), position + T))

    def parameter_count(self) -> int:
        """Parameters without the learned positions, the way the published figures are counted."""
        return sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats over labels other than −100, in float32 at least."""
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL)


def _init_linear_and_embedding(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
