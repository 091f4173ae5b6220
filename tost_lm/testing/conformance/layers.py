"""The adapter of the layers of this project's language model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tost_lm.model.block import MIXER_OF
from tost_lm.model.config import ModelConfig
from tost_lm.model.positions import SequenceInfo, rotary_cos_sin
from tost_lm.ops.sequence_shard import SequenceShard, SequenceSplit
from tost_lm.testing.conformance.adapter import MixerAdapter, State
from tost_lm.torch_internals import pytree


def layer_adapter(
    letter: str, config: ModelConfig, shard: Callable[[SequenceSplit], SequenceShard] | None = None, **fields: Any
) -> MixerAdapter:
    """The mixer that `letter` has in `model.pattern`.

    A state is that of the layer with the number of tokens so far, which the layer gets as positions.

    Args:
        letter: of `tost_lm.model.config.MIXERS`.
        config: the shape of the layer.
        shard: as in `MixerAdapter`.
        fields: other fields of the adapter.
    """
    return MixerAdapter(
        name=letter,
        channels=config.width,
        build=partial(MIXER_OF[letter], config),
        call=partial(_call, config),
        shard=shard,
        concatenate_states=concatenate_aligned,
        **{"window": config.window or None if letter == "A" else None, **fields},
    )


def _call(
    config: ModelConfig,
    mixer: nn.Module,
    x_BTC: Tensor,
    *,
    state: State | None,
    cu_seqlens: Tensor | None,
    output_state: bool,
    shard: SequenceShard | None,
) -> tuple[Tensor, State | None]:
    layer_state, positions = (None, None) if state is None else (state[0], state[1].tolist())
    documents = len(x_BTC) if cu_seqlens is None else len(cu_seqlens) - 1
    if positions is not None:
        positions += [0] * (documents - len(positions))
    info = SequenceInfo.of(x_BTC[..., 0], positions, cu_seqlens, shard, output_state)
    if config.rope_theta:
        channels = config.width // config.heads
        info = replace(info, rotary=rotary_cos_sin(info.position, channels, config.rope_theta, x_BTC.dtype))
    y_BTC, layer_state = mixer(x_BTC, layer_state, info)
    return y_BTC, (layer_state, torch.tensor(info.end_positions)) if output_state else None


def concatenate_aligned(states: Sequence[State]) -> State:
    """As `concatenate_rows`; keys and values [N, H, S, D] of fewer tokens are padded with zeros on the left."""

    def concatenate(*tensors: Tensor) -> Tensor:
        if tensors[0].dim() < 4:
            return torch.cat(tensors)
        S = max(x.shape[2] for x in tensors)
        return torch.cat([pad(x, (0, 0, S - x.shape[2], 0)) for x in tensors])

    return pytree.tree_map(concatenate, *states)
