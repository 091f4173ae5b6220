"""The language model: embedding, positions, blocks, norm and head."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tost_lm.errors import ConfigError
from tost_lm.mixers.registry import mixer_class
from tost_lm.model.block import Block, FixedState, LMOutput, LMState, build_norm, normed
from tost_lm.model.config import ModelConfig
from tost_lm.model.streaming import TILE_TOKENS, Tokens, TokenStream
from tost_lm.ops.cross_entropy import IGNORED_LABEL, CrossEntropy, VocabularyShard, linear_cross_entropy
from tost_lm.ops.initialization import draw_seed, initialize
from tost_lm.ops.layout import SequenceShard
from tost_lm.ops.positions import SequenceInfo
from tost_lm.ops.precision import statistics_dtype


class Head(nn.Module):
    """The head. Calls pass the token embedding if it is tied to it: then it has no weight of its own."""

    weight: nn.Parameter | None
    words: VocabularyShard | None = None
    """The vocabulary entries of this rank; None: all."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        tied = config.tied_head
        self.register_parameter("weight", None if tied else nn.Parameter(torch.empty(config.vocab_size, config.width)))

    def forward(self, x_BTC: Tensor, tied_VC: Tensor | None, labels_BT: Tensor, z_loss: float) -> CrossEntropy:
        """The summed loss, as `linear_cross_entropy`; the fields of tokens are [B, T]."""
        x_MC, weight_VC = x_BTC.flatten(0, 1), self.weight_or(tied_VC)
        found = linear_cross_entropy(x_MC, weight_VC, labels_BT.flatten(), shard=self.words, z_loss=z_loss)
        return found.map_tokens(lambda x_M: x_M.view(labels_BT.shape))

    def logits(self, x_BTC: Tensor, tied_VC: Tensor | None, tokens: int) -> Tensor:
        """[B, T, V] for a call with T `tokens`; with tensor ranks, x is one shard of the residual stream."""
        return linear(x_BTC, self.weight_or(tied_VC))

    def weight_or(self, tied_VC: Tensor | None) -> Tensor:
        """The weight, or the embedding if it is tied."""
        weight_VC = self.weight if tied_VC is None else tied_VC
        assert weight_VC is not None
        return weight_VC


class TostLM(nn.Module):
    """A decoder-only language model. Initialization as published: N(0, 0.02), but N(0, 0.02/√(2·layers)) for the output
    projections of mixer and MLP, temp 1, denom_bias 0, LayerScale as configured.

    The seed of the draws comes from torch's CPU generator. Under `torch.device("meta")` nothing is drawn. `head` makes
    the head of the settings.
    """

    z_loss = 0.0
    """In training, the coefficient of the mean squared log-sum-exp of the logits, which the loss includes."""

    def __init__(self, config: ModelConfig, *, head: Callable[[ModelConfig], Head] = Head):
        super().__init__()
        device = torch.get_default_device()
        self.config, self.name = config, "the model"
        learned = config.positions == "learned"
        with torch.device("meta"):
            self.embedding = _embedding(config.vocab_size, config.width)
            self.positions = _embedding(config.max_positions, config.width) if learned else None
            self.blocks = nn.ModuleList(
                Block(config, mixer_class(letter)(config.shape_of(letter)), norm_after=letter in config.norm_after)
                for letter in config.letters
            )
            self.norm = build_norm(config)
            self.head = head(config)
        self._positions_here: Callable[[Tensor], Tensor] = lambda position: position
        if device.type != "meta":
            initialize(self.to_empty(device=device), config.layers, config.init_std, draw_seed())

    def forward(
        self,
        tokens_BT: Tensor,
        labels: Tensor | None = None,
        state: LMState | FixedState | None = None,
        cu_seqlens: Tensor | None = None,
        *,
        label_count: Tensor | float | None = None,
        output_state: bool | Literal["last"] = True,
        shard: SequenceShard | None = None,
    ) -> LMOutput:
        """Process tokens, after those of `state` if given.

        Pack rows of different lengths, padded on either side; `real_BT` is False at padding:

            cu_seqlens = pad(real_BT.sum(1).cumsum(0), (1, 0)).int()
            logits_TV = model(tokens_BT[real_BT][None], cu_seqlens=cu_seqlens).logits[0]

        The logits of row n end at cu_seqlens[n + 1]. Decoding continues from the state with one token a row, [N, 1].

        Args:
            tokens_BT: ids, int64.
            labels: [B, T], the token after each token (tokens shifted by one); −100 is not counted.
            state: the output state of a call on the tokens before these, a row for each document. A `FixedState` is
                updated by a call with one token a row, whose length the caller has checked (`check_length`).
            cu_seqlens: int32 [N + 1], offsets of N documents packed into one row (B == 1). They do not influence each
                other. `state` has N rows, or one for the first document while the others start. None: each row is a
                document, N = B.
            label_count: divisor of the summed loss; None: the number of counted labels.
            output_state: whether to return the state: of all documents, or (`last`) only for more tokens of each row's
                last document, in another tile of training.
            shard: tokens and labels are a sequence shard; cu_seqlens and the states cover the whole sequences, as in
                `causal_tssa`.

        Raises:
            ConfigError: a document is longer than the model's position limit.
            ValueError: cu_seqlens does not fit the tokens, or the state has other rows or is of another model.
        """
        if isinstance(state, FixedState):
            info = SequenceInfo.of_step(state.position_B)
        else:
            info = SequenceInfo.of(tokens_BT, state and state.positions, cu_seqlens, shard, output_state)
            self.check_length(max(info.end_positions))
            if state is not None:
                self._check_layers(state)
        x_BTC = self.embedding(tokens_BT)
        x_BTC = x_BTC.to(statistics_dtype(x_BTC))  # see tost_lm.model.block
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(self._positions_here(info.position))
        info = info.with_rotary(self.config.rotary, x_BTC.dtype)
        states: list[Any] = []
        for i, block in enumerate(self.blocks):
            x_BTC, mixer_state = block(x_BTC, state.layers[i] if state else None, info)
            states.append(mixer_state)
        x_BTC, tied_VC = normed(self.norm, x_BTC), self.embedding.weight if self.head.weight is None else None
        loss = nats_BT = is_top_BT = None
        scalars = {}
        if labels is not None:
            total, nats_BT, is_top_BT, z = self.head(x_BTC, tied_VC, labels, self.z_loss)
            count = (labels != IGNORED_LABEL).sum() if label_count is None else label_count
            loss = total / count
            scalars = {"loss": loss.detach()}
            if self.z_loss:
                z = z / count
                scalars = {"loss": scalars["loss"] - z, "z_loss": z}
            scalars |= {name: total / count for name, total in info.reported.items()}
        new_state = None
        if isinstance(state, FixedState):
            state.update(states)
        elif output_state:
            last = slice(-1 if output_state == "last" and info.cu_seqlens is not None else None, None)
            new_state = LMState(tuple(states), info.end_positions[last])
        compute_logits = _in_this_grad_mode(partial(self.head.logits, x_BTC, tied_VC, tokens_BT.shape[1]))
        return LMOutput(loss, nats_BT, is_top_BT, new_state, compute_logits, scalars)

    def stream(self, tokens: Tokens, state: LMState | None = None, tile_tokens: int = TILE_TOKENS) -> TokenStream:
        """The nats of each token of a text of any length, tile by tile: see `TokenStream`."""
        return TokenStream(self, tokens, state, tile_tokens)

    def split_ends(self, embedding: nn.Module, head: Head, positions_here: Callable[[Tensor], Tensor]) -> None:
        """Replace what is outside the blocks by that of a tensor rank, whose residual stream has a part of the tokens.

        Args:
            embedding: maps ids [B, T] to embeddings of that part.
            head: reads the part, returns results of all tokens.
            positions_here: maps positions of the call's tokens to those of the part.
        """
        self.set_submodule("embedding", embedding)
        self.head, self._positions_here = head, positions_here

    def parameter_count(self) -> int:
        """Number of parameters without the learned positions, as in the published figures."""
        positions = 0 if self.positions is None else self.positions.weight.numel()
        return sum(p.numel() for p in self.parameters()) - positions

    def _check_layers(self, state: LMState) -> None:
        mixers: Any = [block.mixer for block in self.blocks]
        fit = (
            type(layer) in (mixer.State, mixer.TileState) for layer, mixer in zip(state.layers, mixers, strict=False)
        )
        if len(state.layers) != len(mixers) or not all(fit):
            raise ValueError(
                f"the state is of another model: its {len(state.layers)} layers do not match model.pattern "
                f"{self.config.pattern!r} with model.layers {self.config.layers}; give a state of this model"
            )

    def check_length(self, tokens: int) -> None:
        """Raises ConfigError if a document of `tokens` tokens is longer than the model's position limit."""
        limit = self.config.position_limit
        if limit is not None and tokens > limit:
            raise ConfigError(
                f"{tokens} tokens are more than the model's positions (model.max_positions = {limit}); shorten the text"
            )


def _embedding(rows: int, width: int) -> nn.Embedding:
    """Not drawn: on the device `meta`, torch would import its compiler for that, which takes as long as all else."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def _in_this_grad_mode(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`compute`, to be called later in the gradient mode of this moment."""
    with_grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def call() -> Tensor:
        with torch.inference_mode(inference), torch.set_grad_enabled(with_grad):
            return compute()

    return call


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """The shapes of a model's parameters by name."""
    with torch.device("meta"):
        return {name: parameter.shape for name, parameter in TostLM(config).named_parameters()}
