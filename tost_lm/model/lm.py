"""The language model: embedding, positions, blocks, norm, head tied to the embedding."""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tost_lm.errors import ConfigError
from tost_lm.model.block import Block, MixerState
from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import Places, rotation, sinusoidal
from tost_lm.model.softmax import KeyValueState
from tost_lm.model.tssa import TssaMixer
from tost_lm.ops import TssaState

IGNORED_LABEL = -100
INITIAL_STD = 0.02


class LMState(NamedTuple):
    """What the model keeps of the tokens so far."""

    layers: tuple[MixerState, ...]
    """Of each layer, N rows."""
    positions: tuple[int, ...]
    """How many tokens there were of each row, [N]; the rows may differ."""


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
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_positions, config.width) if learned else None
        letters = config.pattern * (config.layers // len(config.pattern))
        self.blocks = nn.ModuleList(Block(config, letter) for letter in letters)
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.apply(_init_linear_and_embedding)
        for name, module in self.named_modules():
            if name.endswith(".out_proj") and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INITIAL_STD / math.sqrt(2 * config.layers))

    def forward(
        self,
        tokens_BT: Tensor,
        labels: Tensor | None = None,
        state: LMState | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LMOutput:
        """Read tokens, going on from `state` if given.

        Rows of different lengths are packed, whichever side they are padded on; `real_BT` is True at their tokens:

            cu_seqlens = pad(real_BT.sum(1).cumsum(0), (1, 0)).int()
            logits_TV = model(tokens_BT[real_BT][None], cu_seqlens=cu_seqlens).logits[0]

        The logits of row n end at cu_seqlens[n + 1], and its state goes on with one token a row, tokens [N, 1].

        Args:
            tokens_BT: ids, int64.
            labels: [B, T], the token that follows each position (so tokens shifted by one); −100 is not counted.
            state: of an earlier call on the tokens before these, a row for each document.
            cu_seqlens: int32 [N + 1], offsets of N documents packed into one row (B == 1). They know nothing of each
                other, and `state` has N rows. None: every row is a document, N = B.

        Raises:
            ConfigError: a document passes the positions that the model has learned something for.
            ValueError: cu_seqlens does not fit the tokens, or the state is of other rows or of another model.
        """
        places = Places.of(tokens_BT, state and state.positions, cu_seqlens)
        self._check_length(max(places.ends))
        if state is not None:
            self._check_layers(state)
        x_BTC = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(places.position)
        elif self.config.positions == "sinusoidal":
            # As large as learned positions are drawn, so that they do not drown the tokens.
            x_BTC = x_BTC + INITIAL_STD * sinusoidal(places.position, x_BTC.shape[-1], x_BTC.dtype)
        if "A" in self.config.pattern and self.config.rope_theta:
            channels = self.config.width // self.config.heads
            turn = rotation(places.position, channels, self.config.rope_theta, x_BTC.dtype)
            places = replace(places, turn=turn)
        states: list[MixerState] = []
        for i, block in enumerate(self.blocks):
            x_BTC, mixer_state = block(x_BTC, state.layers[i] if state else None, places)
            states.append(mixer_state)
        logits_BTV = linear(self.norm(x_BTC), self.embedding.weight)
        loss = None if labels is None else next_token_loss(logits_BTV, labels)
        return LMOutput(loss, logits_BTV, LMState(tuple(states), places.ends))

    def parameter_count(self) -> int:
        """Parameters without the learned positions, the way the published figures are counted."""
        positions = 0 if self.positions is None else self.positions.weight.numel()
        return sum(p.numel() for p in self.parameters()) - positions

    def _check_layers(self, state: LMState) -> None:
        kinds = [TssaState if isinstance(block.mixer, TssaMixer) else KeyValueState for block in self.blocks]
        if [type(layer) for layer in state.layers] != kinds:
            raise ValueError(
                f"the state is of another model: {len(state.layers)} layers do not match pattern {self.config.pattern} "
                f"in {self.config.layers} layers"
            )

    def _check_length(self, tokens: int) -> None:
        limit = self.config.position_limit
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{tokens} tokens are more than the model has positions (model.max_positions = {limit}): shorten the "
                "text or train with more positions, or with model.positions and model.denom_bias that need none"
            )


def next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats over labels other than −100, in float32 at least."""
    logits_BTV = logits_BTV if logits_BTV.dtype == torch.float64 else logits_BTV.float()
    return cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL)


def _init_linear_and_embedding(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
