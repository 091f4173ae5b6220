"""The launches and stored bytes of a mixer's layer, counted where it runs on the CPU."""

from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from tost_lm.mixers.registry import mixer_class
from tost_lm.mixers.spec import BLOCK_LAUNCHES, MixerSpec
from tost_lm.ops.positions import SequenceInfo
from tost_lm.pretrain.settings import PretrainConfig
from tost_lm.testing.operations import Operations


class Counted(NamedTuple):
    """Of a layer, forward and backward."""

    launches: int
    """With those of the block around the mixer, as `MixerSpec.launches`."""
    stored_bytes: float
    """Per token, as `MixerSpec.stored_bytes`."""


def count(spec: MixerSpec, config: PretrainConfig) -> Counted:
    """The launches and stored bytes of a layer with drawn weights on a row of the recipe, which is two documents."""
    T, C, dtype = config.row_tokens, config.model.width, getattr(torch, config.train.dtype)
    layer = mixer_class(spec.letter)(config.model.shape_of(spec.letter)).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, C**-0.5)
    offsets = torch.tensor([0, T // 2, T]) if T > 1 else None
    info = SequenceInfo.of(torch.zeros(1, T), None, offsets, output_state=False)
    x_BTC = torch.randn(1, T, C, dtype=dtype, requires_grad=True)
    others = {x.untyped_storage().data_ptr() for x in (x_BTC, *layer.parameters())}
    stored: dict[int, torch.UntypedStorage] = {}  # by address; holds them, so that no address is used twice

    def store(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in others:
            stored[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    layer(x_BTC, None, info)  # fills caches of offsets
    with Operations() as operations, saved_tensors_hooks(store, lambda x: x):
        y_BTC, _ = layer(x_BTC, None, info)
    with operations:
        y_BTC.backward(torch.ones_like(y_BTC))
    bytes_per_token = sum(storage.nbytes() for storage in stored.values()) / T
    return Counted(operations.counts.total() + BLOCK_LAUNCHES, bytes_per_token)
