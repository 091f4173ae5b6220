"""The language model: embedding, positions, blocks, norm, head tied to the embedding."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tost_lm.errors import ConfigError
from tost_lm.model.block import STATE_OF, Block, MixerState
from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import Places, rotation, sinusoidal
from tost_lm.model.streaming import PIECE_TOKENS, Tokens, TokenStream
from tost_lm.ops.cross_entropy import IGNORED_LABEL, linear_cross_entropy
from tost_lm.ops.phases import SequenceShard

INITIAL_STD = 0.02


class LMState(NamedTuple):
    """What the model keeps of the tokens so far."""

    layers: tuple[MixerState, ...]
    """Of each layer, N rows."""
    positions: tuple[int, ...]
    """How many tokens there were of each row, [N]; the rows may differ."""


class LMOutput(NamedTuple):
    """What a call of the model gives."""

    loss: Tensor | None
    """Mean nats per labelled token; None without labels."""
    nats: Tensor | None
    """Of each token [B, T], 0 where its label is not counted, in float32 at least; without a gradient."""
    is_top: Tensor | None
    """Whether no word has a larger logit than the label [B, T], False where it is not counted; None with gradients."""
    state: LMState | None
    """After the last token; None unless wanted."""
    read_logits: Callable[[], Tensor]
    """Computes the logits; on tensor or sequence ranks all of them call it."""

    @property
    def logits(self) -> Tensor:
        """[B, T, V], computed each time they are asked for: a call that does not ask never holds them."""
        return self.read_logits()


class TiedHead(nn.Module):
    """The loss and the logits, by the token embedding."""

    def forward(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sum over labels in nats; of each token [B, T] its nats and, without gradients, whether it is on top."""
        total, nats_M, is_top_M = linear_cross_entropy(x_BTC.flatten(0, 1), weight_VC, labels_BT.flatten())
        return total, nats_M.view(labels_BT.shape), None if is_top_M is None else is_top_M.view(labels_BT.shape)

    def logits(self, x_BTC: Tensor, weight_VC: Tensor, tokens: int) -> Tensor:
        """[B, T, V] of a call of T `tokens`, which x holds a share of where the residual stream is shared out."""
        return linear(x_BTC, weight_VC)


class TostLM(nn.Module):
    """A decoder-only language model, weights drawn as published: N(0, 0.02), N(0, 0.02/√(2·layers)) for the two
    projections that end a block's branches, temp 1, denom_bias 0, LayerScale as configured."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_positions, config.width) if learned else None
        self.blocks = nn.ModuleList(Block(config, letter) for letter in config.letters)
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head: Any = TiedHead()
        self.share_of_residual: Callable[[Tensor], Tensor] = lambda position: position
        """Positions of the tokens that stand in the residual stream here."""
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
        *,
        label_count: Tensor | float | None = None,
        output_state: bool | Literal["last"] = True,
        shard: SequenceShard | None = None,
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
                other, and `state` has N rows, or one, of the first document: the others begin. None: every row is a
                document, N = B.
            label_count: what the sum of losses is divided by; None: the labels counted here.
            output_state: whether the state is wanted, of all documents or (`last`) of the last of packed ones.
            shard: tokens and labels are a shard of sequences that lie on several ranks; cu_seqlens, `state` and the
                state that comes out are of the whole sequences, as in `causal_tssa`.

        Raises:
            ConfigError: a document passes the positions that the model has learned something for.
            ValueError: cu_seqlens does not fit the tokens, or the state is of other rows or of another model.
        """
        places = Places.of(tokens_BT, state and state.positions, cu_seqlens, shard, output_state)
        self._check_length(max(places.ends))
        if state is not None:
            self._check_layers(state)
        x_BTC = self.embedding(tokens_BT)
        position = self.share_of_residual(places.position)
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(position)
        elif self.config.positions == "sinusoidal":
            # As large as learned positions are drawn, so that they do not drown the tokens.
            x_BTC = x_BTC + INITIAL_STD * sinusoidal(position, x_BTC.shape[-1], x_BTC.dtype)
        if "A" in self.config.pattern and self.config.rope_theta:
            channels = self.config.width // self.config.heads
            turn = rotation(places.position, channels, self.config.rope_theta, x_BTC.dtype)
            places = replace(places, turn=turn)
        states: list[Any] = []
        for i, block in enumerate(self.blocks):
            x_BTC, mixer_state = block(x_BTC, state.layers[i] if state else None, places)
            states.append(mixer_state)
        x_BTC, weight_VC = self.norm(x_BTC), self.embedding.weight
        loss = nats_BT = is_top_BT = None
        if labels is not None:
            total, nats_BT, is_top_BT = self.head(x_BTC, weight_VC, labels)
            loss = total / ((labels != IGNORED_LABEL).sum() if label_count is None else label_count)
        ends = places.ends[-1:] if output_state == "last" else places.ends
        state = LMState(tuple(states), ends) if output_state else None
        read_logits = _later(partial(self.head.logits, x_BTC, weight_VC, tokens_BT.shape[1]))
        return LMOutput(loss, nats_BT, is_top_BT, state, read_logits)

    def stream(self, tokens: Tokens, state: LMState | None = None, piece_tokens: int = PIECE_TOKENS) -> TokenStream:
        """The nats of each token of a text of any length, in constant memory: see `TokenStream`."""
        return TokenStream(self, tokens, state, piece_tokens)

    def parameter_count(self) -> int:
        """Parameters without the learned positions, the way the published figures are counted."""
        positions = 0 if self.positions is None else self.positions.weight.numel()
        return sum(p.numel() for p in self.parameters()) - positions

    def _check_layers(self, state: LMState) -> None:
        kinds = [STATE_OF[letter] for letter in self.config.letters]
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


def _later(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`compute` with gradients as they are on or off now."""
    with_grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def computed() -> Tensor:
        with torch.inference_mode(inference), torch.set_grad_enabled(with_grad):
            return compute()

    return computed


def _init_linear_and_embedding(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
